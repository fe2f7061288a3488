"""The backends by name."""

from winnow.attention.interface import AttentionBackend
from winnow.attention.reference import ReferenceBackend


def open_backend(name: str) -> AttentionBackend:
    """The backend of that name, one of `winnow.config.ATTENTION_BACKENDS`; "auto" takes the fastest that runs here."""
    backends: dict[str, type[AttentionBackend]] = {"auto": ReferenceBackend, "reference": ReferenceBackend}
    return backends[name]()
