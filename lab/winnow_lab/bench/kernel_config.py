"""Options of `winnow bench kernel`."""

from dataclasses import dataclass

from winnow.cache.codec import WITH_BIAS
from winnow.config import ATTENTION_BACKENDS, DTYPES
from winnow.values.checks import check_names, require
from winnow.values.kv_dtype import KV_FORMATS, KVDtype
from winnow_lab.study import StudyOptions, flag

_PREFILLS = 4


@dataclass(frozen=True)
class KernelConfig(StudyOptions):
    attention_backend: tuple[str, ...] = flag(("auto",), f"of {', '.join(ATTENTION_BACKENDS)}")
    dtype: str = flag("bfloat16", "number format of queries and new KVs", choices=DTYPES[1:])
    kv_cache_dtype: tuple[str, ...] = flag(
        ("auto",),
        f"how KVs are stored, to compare; of {', '.join(KV_FORMATS)}, or such as k=int8,v=int4; auto: in the dtype of "
        f"queries; with {WITH_BIAS} behind it each KV has a bias",
    )
    device: str = flag("cpu", "torch device, such as cpu or cuda:0")
    batch: int = flag(32, "sequences that decode together", least=1)
    query_heads: int = flag(12, "query heads; a multiple of the KV heads", least=1)
    kv_heads: int = flag(4, "KV heads", least=1)
    head_dim: int = flag(64, "numbers in a key and in a value", least=1)
    context: int = flag(2048, "KVs in every row", least=1)
    chunk: int = flag(512, "prompt tokens of a sequence in a prefill step, the last ones", least=1)
    prefills: int | None = flag(None, f"that prefill together (default: {_PREFILLS}, or the batch)", least=1)
    block_size: int = flag(16, "slots of one block", least=1)
    scatter: bool = flag(True, "blocks of a row lie all over the pool, as after long use, not side by side")
    uneven: bool = flag(False, "rows differ in length, as after eviction per head")
    repeats: int = flag(7, "times that everything is measured; the median counts", least=1)
    threads: int | None = flag(None, "of torch (default: as many as it takes)", least=1)
    seed: int = flag(0, "of KVs, lengths and the order of blocks", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        formats = self.kv_formats
        require(
            len(set(formats)) == len(formats), "kv_cache_dtype", "formats that differ", self.kv_cache_dtype
        )
        half, kv_heads = self.context // 2, self.kv_heads
        require(
            not self.query_heads % kv_heads,
            "query_heads",
            f"a multiple of kv_heads ({kv_heads})",
            self.query_heads,
        )
        require(self.chunk <= half, "chunk", f"at most half the context ({half})", self.chunk)
        require(self.prefill_batch <= self.batch, "prefills", f"at most batch ({self.batch})", self.prefills)

    @property
    def prefill_batch(self) -> int:
        return min(_PREFILLS, self.batch) if self.prefills is None else self.prefills

    @property
    def kv_formats(self) -> tuple[str, ...]:
        """Names of the formats, in the order typed; raises ConfigError where one of them is none."""
        formats: list[str] = []
        for name in self.kv_cache_dtype:
            if name.startswith("v=") and formats and formats[-1].startswith("k=") and "," not in formats[-1]:
                formats[-1] += f",{name}"
            else:
                formats.append(name)
        return tuple(
            str(KVDtype.parse(name.removesuffix(WITH_BIAS)).resolved(self.dtype))
            + WITH_BIAS * name.endswith(WITH_BIAS)
            for name in formats
        )
