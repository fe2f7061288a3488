"""Commands that install a missing optional package."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of Winnow's; it works without an index that knows Winnow."""
    return f"in a checkout of Winnow, pip install '.[{extra}]'"
