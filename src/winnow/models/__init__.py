"""WHO computes: transformers' own model classes, loaded safely and bound to attention over the paged cache."""

from winnow.models.binding import AttentionStep
from winnow.models.geometry import ModelGeometry
from winnow.models.loader import DEMO_MODEL, LoadedModel, PlainModel, load_model, load_plain_model

__all__ = [
    "DEMO_MODEL",
    "AttentionStep",
    "LoadedModel",
    "ModelGeometry",
    "PlainModel",
    "load_model",
    "load_plain_model",
]
