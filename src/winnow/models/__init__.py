"""WHO computes: transformers' own model classes, loaded safely and bound to attention over the paged cache.

A layer has one of five forms; the first below that serves is taken, after a trial finds that it computes the same:

| form | serves | replaces |
|---|---|---|
| `fast.packed.decoder` | decoding on a CPU, all layers of Llama's shape | embedding, layers and head: one native call |
| `fast.packed` | models packed by `winnow pack` or the model cache | classes of transformers altogether |
| `fast.fused` | layers of Llama's shape, CPU kernels or Triton | a decoder layer: norms, projections, rotation, gate |
| `fast.packed_linear`, `.int8_linear`, `.library_weights`, `.experts` | any linear layer | its product |
| `bind.binding` alone | every class that attends by `AttentionInterface` | its attention |
"""

from typing import TYPE_CHECKING

from winnow.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow.models.bind.binding import AttentionStep
    from winnow.models.bind.geometry import ModelGeometry
    from winnow.models.load.loaded import LoadedModel, PlainModel
    from winnow.models.load.loader import DEMO_MODEL, load_model, load_plain_model, pack_model

__all__ = [
    "DEMO_MODEL", "AttentionStep", "LoadedModel", "ModelGeometry", "PlainModel", "load_model",
    "load_plain_model", "pack_model",
]  # fmt: skip

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
