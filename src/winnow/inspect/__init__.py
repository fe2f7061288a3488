"""Which tokens of a request stayed: the numbers, and a page to look at them."""

from winnow.inspect.inspection import Held, Inspection, Token, read_tokens

__all__ = ["Held", "Inspection", "Token", "read_tokens"]
