"""Tokens of a request that stayed: the numbers, and a page to look at them."""

from winnow.inspect.inspection import Held, Inspection, KeptTokens, Token, read_tokens

__all__ = ["Held", "Inspection", "KeptTokens", "Token", "read_tokens"]
