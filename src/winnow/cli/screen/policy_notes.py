"""Notes on the policies that `winnow policies` shows first, a few words each; other presets are for research."""

from collections.abc import Mapping
from typing import NamedTuple

from winnow.known_accuracy import record, share_range

KNOWN_MODEL = "SmolLM2-135M-Instruct"


class PolicyNote(NamedTuple):
    """Some words about a policy.

    Attributes:
        purpose: the job that it is for.
        costs: what it costs beside the cache.
        needs: what must be there.
    """

    purpose: str
    costs: str
    needs: str


NOTES: Mapping[str, PolicyNote] = {
    "full": PolicyNote("exact answers", "memory alone", "-"),
    "winnow": PolicyNote("one of the next that suits", "as that", "-"),
    "winnow-seen": PolicyNote("questions at the end", "next to nothing", "the question seen"),
    "winnow-keys": PolicyNote("a document, asked often", "next to nothing", "-"),
    "winnow-keys-pd": PolicyNote("prompts beyond memory", "next to nothing", "-"),
    "kvzip-keys": PolicyNote("as winnow-keys, at 16x", "1.6 prefills", "room for it twice"),
    "kvzip": PolicyNote("a document, asked often", "1.6 prefills", "room for it twice"),
    "snapkv": PolicyNote("questions at the end", "next to nothing", "the question seen"),
    "streaming": PolicyNote("endless text, only its end", "nothing", "-"),
    "leverage": PolicyNote("the demo model alone", "next to nothing", "-"),
}


def known_shares(policy: str) -> str:
    """Return the measured shares of the full cache's answers on `KNOWN_MODEL`, up to 8x, as text."""
    if policy in ("full", "winnow"):
        return "1.00" if policy == "full" else "as that"
    rows = [each for each in record() if each.policy == policy and each.is_of(KNOWN_MODEL)]
    rate = max((each.compression for each in rows if each.compression <= 8.0), default=None)
    if rate is None:
        return "not measured"
    return f"{share_range([each for each in rows if each.compression == rate])} at {rate:g}x"
