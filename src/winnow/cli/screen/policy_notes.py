"""Notes on the policies that `winnow policies` shows first, a few words each; other presets are for research."""

from collections.abc import Mapping
from typing import NamedTuple


class PolicyNote(NamedTuple):
    """Some words about a policy.

    Attributes:
        purpose: the job that it is for.
        costs: what it costs beside the cache.
        needs: what must be there.
        known: what is measured of it on a real model.
    """

    purpose: str
    costs: str
    needs: str
    known: str


NOTES: Mapping[str, PolicyNote] = {
    "full": PolicyNote("exact answers", "memory alone", "-", "1.00"),
    "winnow": PolicyNote("one of the next that suits", "as that", "-", "as that"),
    "winnow-seen": PolicyNote(
        "questions at the prompt's end", "next to nothing", "the question seen", "0.93 at 8x"
    ),
    "kvzip": PolicyNote("a document, asked often", "1.6 prefills", "room for it twice", "1.03 at 4x"),
    "kvzip-part": PolicyNote(
        "the same, in less time", "less than kvzip", "room for 512 more", "not measured"
    ),
    "fitted": PolicyNote(
        "the same, without the replay", "a fit, once a model", "winnow fit MODEL", "not measured"
    ),
    "fitted-pd": PolicyNote(
        "prompts beyond memory too", "a fit, once a model", "winnow fit MODEL", "not measured"
    ),
    "snapkv": PolicyNote(
        "questions at the prompt's end", "next to nothing", "the question seen", "0.43 at 4x"
    ),
    "keydiff": PolicyNote("prompts beyond memory, no fit", "next to nothing", "-", "0.26 at 4x"),
    "streaming": PolicyNote("endless text, only its end", "nothing", "-", "not measured"),
    "leverage": PolicyNote("the demo model alone", "next to nothing", "-", "0.00 at 8x"),
}
"""Known: shares of the full cache's answers (docs/results/payoff.md, real.md, docs/eviction.md)."""
