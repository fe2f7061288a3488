"""WHO computes: transformers' own model classes, loaded safely and bound to attention over the paged cache.

A layer has one of five forms; the first below that serves is taken, after a trial finds that it computes the same:

| form | serves | replaces |
|---|---|---|
| `fast.packed.decoder` | decoding on a CPU, all layers of Llama's shape | embedding, layers and head: one native call |
| `fast.packed` | models packed by `winnow pack` or the model cache | classes of transformers altogether |
| `fast.fused` | layers of Llama's shape, CPU kernels or Triton | a decoder layer: norms, projections, rotation, gate |
| `fast.packed_linear`, `.int8_linear`, `.experts` | any linear layer | its product |
| `bind.binding` alone | every class that attends by `AttentionInterface` | its attention |
"""

from typing import TYPE_CHECKING

from winnow.process.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow.models.load.loaded import LoadedModel, PlainModel
    from winnow.models.load.loader import DEMO_MODEL, load_model, load_plain_model, pack_model

__all__ = ["DEMO_MODEL", "LoadedModel", "PlainModel", "load_model", "load_plain_model", "pack_model"]

__getattr__ = lazy_exports(
    __name__,
    dict.fromkeys(("LoadedModel", "PlainModel"), "winnow.models.load.loaded")
    | dict.fromkeys(
        ("DEMO_MODEL", "load_model", "load_plain_model", "pack_model"), "winnow.models.load.loader"
    ),
)
