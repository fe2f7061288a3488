"""A codec that stores no plain vectors, for tests of what holds for any codec."""

from torch import Tensor

from winnow.cache.codec import PairCodec
from winnow.cache.formats import Field, PlainFormat, VectorFormat


class ScaledFormat(VectorFormat):
    """int8 with a scale for each vector."""

    suffixes = ("", "_scale")
    name = "scaled"

    def fields(self, side: str, head_dim: int) -> tuple[Field, ...]:
        return Field(side, "int8", head_dim), Field(f"{side}_scale", "float16", 1)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        scale = (x.float().abs().amax(dim=-1, keepdim=True) / 127).half()
        return (x.float() / scale.float()).round().clamp(-127, 127), scale

    def decode(self, *fields: Tensor) -> Tensor:
        return fields[0].float() * fields[1].float()


class ScaledKeys(PairCodec):
    """Scaled keys, values as they are: three fields of three dtypes, in odd sizes."""

    def __init__(self) -> None:
        super().__init__(ScaledFormat(), PlainFormat("float32"))

    @property
    def name(self) -> str:
        return "scaled"

    def __str__(self) -> str:
        return self.name
