"""Tokens of a request that stayed: the numbers, a page to look at them, and the command that joins `winnow`."""

from typing import TYPE_CHECKING

from winnow.process.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow_inspect.inspection import Inspection, KeptTokens, Token, read_tokens
    from winnow_inspect.page import Held

COMMANDS = {"inspect": "show which tokens of a prompt survive eviction, in which layer and head"}
MODULES = "winnow_inspect.{}"

__all__ = ["Held", "Inspection", "KeptTokens", "Token", "read_tokens"]
__getattr__ = lazy_exports(
    __name__,
    dict.fromkeys(("Inspection", "KeptTokens", "Token", "read_tokens"), "winnow_inspect.inspection")
    | {"Held": "winnow_inspect.page"},
)
