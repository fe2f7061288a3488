"""WHO computes: transformers' own model classes, loaded safely and bound to attention over the paged cache."""

from typing import TYPE_CHECKING

from winnow.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow.models.binding import AttentionStep
    from winnow.models.geometry import ModelGeometry
    from winnow.models.loaded import LoadedModel, PlainModel
    from winnow.models.loader import DEMO_MODEL, load_model, load_plain_model, pack_model

__all__ = [
    "DEMO_MODEL",
    "AttentionStep",
    "LoadedModel",
    "ModelGeometry",
    "PlainModel",
    "load_model",
    "load_plain_model",
    "pack_model",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "AttentionStep": "winnow.models.binding",
        "DEMO_MODEL": "winnow.models.loader",
        "LoadedModel": "winnow.models.loaded",
        "ModelGeometry": "winnow.models.geometry",
        "PlainModel": "winnow.models.loaded",
        "load_model": "winnow.models.loader",
        "load_plain_model": "winnow.models.loader",
        "pack_model": "winnow.models.loader",
    },
)
