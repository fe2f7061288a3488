"""Commands that install a missing optional package; they work without an index that knows Winnow."""

GET_THE_LAB = "in a checkout of Winnow, pip install ./lab"
GET_DRAFTS = "in a checkout of Winnow, pip install ./plugins/drafts"


def install_hint(extra: str, distribution: str = ".") -> str:
    """Return the command that installs an extra of the distribution in that folder of a checkout."""
    return f"in a checkout of Winnow, pip install '{distribution}[{extra}]'"
