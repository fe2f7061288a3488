"""WHO computes: transformers' own model classes, loaded safely and bound to attention over the paged cache."""

from typing import TYPE_CHECKING

from winnow.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow.models.bind.binding import AttentionStep
    from winnow.models.bind.geometry import ModelGeometry
    from winnow.models.load.loaded import LoadedModel, PlainModel
    from winnow.models.load.loader import DEMO_MODEL, load_model, load_plain_model, pack_model

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
        "AttentionStep": "winnow.models.bind.binding",
        "DEMO_MODEL": "winnow.models.load.loader",
        "LoadedModel": "winnow.models.load.loaded",
        "ModelGeometry": "winnow.models.bind.geometry",
        "PlainModel": "winnow.models.load.loaded",
        "load_model": "winnow.models.load.loader",
        "load_plain_model": "winnow.models.load.loader",
        "pack_model": "winnow.models.load.loader",
    },
)
