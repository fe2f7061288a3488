"""Optional packages: what to type where one is missing."""

_CHECKOUT = "in a checkout of Winnow"


def install_hint(extra: str) -> str:
    """The command that installs what an extra of Winnow's needs; it works without an index that knows Winnow."""
    return f"pip install '.[{extra}]' {_CHECKOUT}"
