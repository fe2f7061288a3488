"""What to type where an optional package is missing."""


def install_hint(extra: str) -> str:
    """The command that installs an extra of Winnow's; it works without an index that knows Winnow."""
    return f"in a checkout of Winnow, pip install '.[{extra}]'"
