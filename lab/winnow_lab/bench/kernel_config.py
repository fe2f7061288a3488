"""Configuration of `winnow bench kernel`."""

from dataclasses import dataclass

from winnow.cache.codec import WITH_BIAS
from winnow.config import ATTENTION_BACKENDS, DTYPES, option, optional_int
from winnow.errors import ConfigError
from winnow.values.checks import check_choice, check_counts, check_names, require
from winnow.values.kv_dtype import KV_FORMATS, KVDtype
from winnow_lab.bench.lists import names

_DTYPES = DTYPES[1:]
_PREFILLS = 4


@dataclass(frozen=True)
class KernelConfig:
    """The shape of a batch over the paged cache, and who computes it."""

    attention_backend: str = option(
        "auto", f"backends to compare, commas between them; of {', '.join(ATTENTION_BACKENDS)}"
    )
    dtype: str = option("bfloat16", "number format of queries and new KVs", choices=_DTYPES)
    kv_cache_dtype: str = option(
        "auto",
        f"how KVs are stored, to compare, commas between them; of {', '.join(KV_FORMATS)}, or such as k=int8,v=int4; "
        f"auto: in the dtype of queries; with {WITH_BIAS} behind it each KV has a bias",
    )
    device: str = option("cpu", "torch device, such as cpu or cuda:0")
    batch: int = option(32, "sequences that decode together")
    query_heads: int = option(12, "query heads; a multiple of the KV heads")
    kv_heads: int = option(4, "KV heads")
    head_dim: int = option(64, "numbers in a key and in a value")
    context: int = option(2048, "KVs in every row")
    chunk: int = option(512, "prompt tokens of one sequence in a prefill step, the last of its context")
    prefills: int | None = option(
        None,
        f"sequences that prefill together; left out: {_PREFILLS}, or a smaller batch",
        parse=optional_int,
    )
    block_size: int = option(16, "slots of one block")
    scatter: bool = option(True, "blocks of a row lie all over the pool, as after long use, not side by side")
    uneven: bool = option(
        False,
        "rows differ in length, between the last chunk and the whole context, as after eviction per head",
    )
    repeats: int = option(7, "times that everything is measured; the median counts")
    threads: int | None = option(None, "threads of torch; left out: as many as it takes", parse=optional_int)
    seed: int = option(0, "of KVs, lengths and the order of blocks")

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, _DTYPES)
        check_counts(self, zero=("seed",))
        check_names("attention_backend", self.backends, ATTENTION_BACKENDS)
        formats = self.kv_formats
        require(
            len(set(formats)) == len(formats), "kv_cache_dtype", "formats that differ", self.kv_cache_dtype
        )
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"query_heads must be a multiple of kv_heads ({self.kv_heads}), got {self.query_heads}"
            )
        if self.chunk > self.context // 2:
            raise ConfigError(
                f"chunk must be at most half the context ({self.context // 2}), got {self.chunk}"
            )
        if self.prefill_batch > self.batch:
            raise ConfigError(f"prefills must be at most batch ({self.batch}), got {self.prefills}")

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends, in the order typed."""
        return names(self.attention_backend)

    @property
    def prefill_batch(self) -> int:
        """Sequences that prefill together."""
        return min(_PREFILLS, self.batch) if self.prefills is None else self.prefills

    @property
    def kv_formats(self) -> tuple[str, ...]:
        """Names of the formats, in the order typed.

        Raises:
            ConfigError: one of them is none.
        """
        formats: list[str] = []
        for name in names(self.kv_cache_dtype):
            if name.startswith("v=") and formats and formats[-1].startswith("k=") and "," not in formats[-1]:
                formats[-1] += f",{name}"
            else:
                formats.append(name)
        return tuple(
            str(KVDtype.parse(name.removesuffix(WITH_BIAS)).resolved(self.dtype))
            + WITH_BIAS * name.endswith(WITH_BIAS)
            for name in formats
        )

    @property
    def layer_kvs(self) -> int:
        """Number of KVs in one layer with full rows."""
        return self.batch * self.context * self.kv_heads
