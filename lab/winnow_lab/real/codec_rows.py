"""Codecs by the text that names them, and what each scored."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from winnow.errors import ConfigError
from winnow_lab.evaluate.perplexity import Perplexity
from winnow_lab.real.rows import Row


def read_codecs(text: str) -> tuple[str, ...]:
    """Return the names of codecs, which semicolons part."""
    return tuple(name.strip() for name in text.split(";") if name.strip())


@dataclass(frozen=True)
class Codec:
    """One codec of the tables, by the text that named it."""

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options of `LLM` that ask for it.

        Raises:
            ConfigError: the text is no format with group=, rotate= and wide=.
        """
        dtype, *others = self.name.split()
        options: dict[str, Any] = {"kv_cache_dtype": dtype}
        for each in others:
            key, _, value = each.partition("=")
            if key not in ("group", "rotate", "wide"):
                raise ConfigError(f"--codecs: a codec has group=, rotate= and wide=, got {each!r}")
            options[f"kv_{key}"] = int(value) if key == "group" else value
        return options

    @property
    def folder(self) -> str:
        """A name for files."""
        return "".join(c if c.isalnum() or c in "-_=" else "_" for c in self.name)


@dataclass(frozen=True)
class Measured:
    """What one codec scored.

    Attributes:
        token_bytes: bytes of blocks per token in all layers, of long sequences.
        perplexities: by tokens of a window, by forced decoding; the full cache first.
        rows: of tasks, under the full cache and under policies.
    """

    codec: Codec
    token_bytes: float
    perplexities: dict[int, list[Perplexity]]
    rows: list[Row]

    def full(self) -> dict[str, Row]:
        """The full cache's row of each work."""
        return {row.work: row for row in self.rows if row.query is None}

    def to_json(self) -> dict[str, Any]:
        """Every number."""
        return {
            "codec": self.codec.name,
            "token_bytes": self.token_bytes,
            "perplexity": {
                str(n): [each.to_json() for each in found] for n, found in self.perplexities.items()
            },
            "rows": [asdict(row) for row in self.rows],
        }


def equal_compressions(
    shares: Iterable[float], token_bytes: float, reference_bytes: float
) -> tuple[tuple[float, float], ...]:
    """What a codec compresses by to hold `1 / share` of the reference's bytes, beside each share.

    Shares that the codec's own bytes reach without eviction are left out.

    Args:
        shares: times fewer bytes than the reference's full cache.
        token_bytes: of the codec.
        reference_bytes: of the format that is compared with.
    """
    pairs = ((share, round(share * token_bytes / reference_bytes, 2)) for share in shares)
    return tuple((share, amount) for share, amount in pairs if amount > 1.0)


def at_share(each: Measured, share: float, reference_bytes: float, method: str) -> dict[str, Row]:
    """Rows by work at one share of the bytes: the full cache's where the codec is narrow enough by itself."""
    amounts = dict(equal_compressions([share], each.token_bytes, reference_bytes))
    if share not in amounts:
        return each.full()
    return {row.work: row for row in each.rows if row.method == method and row.compression == amounts[share]}
