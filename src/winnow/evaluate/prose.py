"""The prose that ships with Winnow: what tasks hide things in."""

from importlib.resources import files


def shipped_sentences() -> tuple[str, ...]:
    """Sentences of two books that the demo model was never trained on, in their order; data/SOURCES.md names them."""
    text = files("winnow.evaluate").joinpath("data", "prose.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())
