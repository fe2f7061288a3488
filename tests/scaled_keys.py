"""A codec that stores no plain vectors, for tests of what holds for any codec."""

from collections.abc import Mapping

from torch import Tensor

from winnow.cache import KVCodec
from winnow.cache.formats import Field


class ScaledKeys(KVCodec):
    """Keys as int8 with a scale for each, values as they are: three fields of three dtypes, in odd sizes."""

    name = "scaled"

    def __str__(self) -> str:
        return self.name

    def key_fields(self, head_dim: int) -> tuple[Field, ...]:
        return Field("k", "int8", head_dim), Field("k_scale", "float16", 1)

    def value_fields(self, head_dim: int) -> tuple[Field, ...]:
        return (Field("v", "float32", head_dim),)

    def encode_keys(self, k: Tensor) -> dict[str, Tensor]:
        scale = (k.float().abs().amax(dim=-1, keepdim=True) / 127).half()
        return {"k": (k.float() / scale.float()).round().clamp(-127, 127), "k_scale": scale}

    def encode_values(self, v: Tensor) -> dict[str, Tensor]:
        return {"v": v}

    def keys(self, fields: Mapping[str, Tensor]) -> Tensor:
        return fields["k"].float() * fields["k_scale"].float()

    def values(self, fields: Mapping[str, Tensor]) -> Tensor:
        return fields["v"].float()
