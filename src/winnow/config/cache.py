"""Options of the KV cache."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from winnow.config.option import Effect, option
from winnow.errors import ConfigError
from winnow.values.checks import check_choice, check_integer, check_number, require
from winnow.values.kv_dtype import AUTO, KV_FORMATS, ROTATIONS, KVDtype, WideParts, check_group
from winnow.values.reuse import DOCUMENTS, EXACT, REUSES
from winnow.values.units import format_bytes, parse_bytes
from winnow.values.value_tier import ValueTier

KV_RESERVATIONS = ("on-demand", "prompt", "max")
PREFIX_DISK = ("prefix_cache_dir", "prefix_cache_disk")
"""Options of prefixes that go to disk by themselves, of which nothing but a served engine has any."""

_SIZES = ("kv_memory", "image_memory", "session_memory", "kv_offloading_size", "prefix_cache_disk")
_LEAST_OFFLOADING = 2**16


@dataclass(frozen=True)
class CacheConfig:
    """Options of the KVs' memory: how much of it, and in what pieces."""

    kv_memory: int = option(
        512 * 2**20,
        "all memory of the KV cache: keys, values, positions, accumulators and tables, such as 512MiB",
        parse=parse_bytes,
        effect=Effect.MEMORY,
    )
    gpu_memory_utilization: float | None = option(
        None,
        "part of a GPU's memory that may be in use once the model serves, weights included: kv_memory is what that "
        "leaves; left out: 0.9 where kv_memory is left out too; nothing where kv_memory is given, or on a CPU",
        effect=Effect.MEMORY,
    )
    block_size: int = option(16, "slots of one block; memory is handed out and given back in blocks")
    enable_prefix_caching: bool = option(
        True,
        "keep the KVs of prompts while memory lasts, and let later requests that begin alike take them",
        effect=Effect.BATCHES,
    )
    reuse: str = option(
        EXACT,
        "what requests take of KVs that others computed: exact: prefixes, as they were computed; documents: what a "
        "prompt marks as documents too, wherever they stand; anywhere: any run of 128 tokens too. All but prefixes is "
        "approximate. A request may ask for another",
        choices=REUSES,
    )
    reuse_share: float = option(
        0.15, "part of the tokens of reused documents that is computed again: those that change most"
    )
    reuse_separator: str | None = option(
        None,
        "text, such as ' # # ', between two of which a prompt that is no chat holds a document; the model reads it too",
    )
    documents: str | Path | None = option(
        None,
        "folder of texts that `winnow documents add` has computed: prompts that mark one as a document take it from "
        "there, as by reuse=documents, which this brings along",
    )
    prefix_store: str | Path | None = option(
        None,
        "directory of compressed prefixes that `winnow prefix save` wrote; prompts that begin so start from them, and "
        "the policy acts on the saved part alone",
    )
    prefix_cache_dir: str | Path | None = option(
        None,
        "directory, made if missing, or URL of an object store, such as s3://bucket/prefixes, to which the prefix "
        "cache writes what requests leave, in the background, and where later requests find it, also after a restart "
        "and in other processes of the same model",
        effect=Effect.BATCHES,
    )
    prefix_cache_disk: int = option(
        20 * 2**30,
        "bytes that the files in prefix_cache_dir may take; the least recently used go first",
        parse=parse_bytes,
        effect=Effect.BATCHES,
    )
    session_memory: int | None = option(
        None,
        "bytes of a conversation (session_id) beyond which its oldest turns are compressed while it waits, such as "
        "64MiB; the system prompt and the last turns stay whole; left out: none is compressed, and the least recently "
        "used give way as all prefixes do",
        parse=parse_bytes,
        effect=Effect.BATCHES,
    )
    kv_offloading_size: int | None = option(
        None,
        "host memory for the KVs of preempted requests, which come back as they were, such as 4GiB; left out: none, "
        "they are computed again",
        parse=parse_bytes,
        effect=Effect.BATCHES,
    )
    image_memory: int = option(
        256 * 2**20,
        "memory for what the vision tower makes of pictures, beside kv_memory: the same picture is not computed again",
        parse=parse_bytes,
        effect=Effect.NEVER,
    )
    kv_reservation: str = option(
        "on-demand",
        "blocks that a request holds from its start, as engines with contiguous caches do, to compare with: on-demand: "
        "those of its first tokens; prompt: for its prompt and max_tokens; max: for max_model_len. With the last two "
        "nothing is shared, and no prefix is kept",
        choices=KV_RESERVATIONS,
        effect=Effect.BATCHES,
    )
    kv_cache_dtype: str | None = option(
        None,
        f"format of stored KVs: {', '.join(KV_FORMATS)}; auto: as dtype; or one each for keys and values, such as "
        "k=int8,v=int4; left out: auto, or what keeps most in the bytes that compression says",
        aliases=("kv_dtype",),
    )
    kv_group: int | None = option(
        None,
        "channels that share a scale, which takes 2 bytes, or 4 at 4 bits and below; left out: a head at 8 bits, 32 "
        "(or the most below that divide a head) at 4 bits and below",
    )
    kv_rotate: str = option(
        "auto",
        "what a Hadamard transform spreads over the channels of a head before it is quantized: none, k (keys), kv; "
        "auto: keys of 4 bits and below",
        choices=ROTATIONS,
    )
    kv_bias: bool = option(
        False,
        "give every KV a bias of 2 bytes that attention adds to its logits, as policies need that fit what they keep; "
        "on where the engine's own policy is one of them",
    )
    kv_wide: str | None = option(
        None,
        "KVs that are kept in 16 bits beside narrow ones, such as layers=1,sinks=4,recent=64: first layers, and in the "
        "others first and last tokens; room for them is set aside for max_num_seqs sequences and for prefixes",
    )
    value_tier: str | None = option(
        None,
        "where the values of the upper layers lie, while all keys stay on the device, such as host:L=1,N=128 or "
        "disk:DIRECTORY:L=1,N=128: values of the first L layers stay on the device, and while decoding a query head "
        "reads the N values that it weighs most of the others, with weights scaled to the sum of all, or with "
        "as-softmaxed as they are; size=4GiB limits the bytes of values there, which do not count in kv_memory",
    )

    @property
    def shares_prefixes(self) -> bool:
        return self.enable_prefix_caching and self.kv_reservation == "on-demand"

    def __post_init__(self) -> None:
        check_choice("kv_reservation", self.kv_reservation, KV_RESERVATIONS)
        # "512MiB" is accepted wherever bytes are; a frozen dataclass is normalised once, here.
        typed = self.kv_offloading_size
        for name in _SIZES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        if self.gpu_memory_utilization is not None:
            part = self.gpu_memory_utilization
            number = isinstance(part, int | float) and not isinstance(part, bool)
            require(number and 0 < part <= 1, "gpu_memory_utilization", "above 0 and at most 1", part)
        if self.kv_offloading_size is not None:
            # In vLLM a bare 4 is 4 GiB; as a size it would be 4 bytes.
            what = f"a size of {format_bytes(_LEAST_OFFLOADING)} or more, with its unit, such as 4GiB"
            require(self.kv_offloading_size >= _LEAST_OFFLOADING, "kv_offloading_size", what, typed)
        for name in ("prefix_store", "prefix_cache_dir", "documents"):
            if getattr(self, name) is not None and not self.shares_prefixes:
                raise ConfigError(
                    f"{name} needs enable_prefix_caching and kv_reservation=on-demand, got {getattr(self, name)} with "
                    f"{self.enable_prefix_caching} and {self.kv_reservation}"
                )
        if self.prefix_cache_dir is not None and self.prefix_store is not None:
            same = Path(self.prefix_cache_dir).resolve() == Path(self.prefix_store).resolve()
            what = "another directory than prefix_store"
            require(not same, "prefix_cache_dir", what, self.prefix_cache_dir)
        check_integer("block_size", self.block_size, 1, 1024)
        check_choice("reuse", self.reuse, REUSES)
        check_number("reuse_share", self.reuse_share, 0, 1)
        require(self.reuse_separator != "", "reuse_separator", "text of at least 1 character", "")
        if self.reuse != EXACT and not self.shares_prefixes:
            raise ConfigError(
                f"reuse={self.reuse} needs enable_prefix_caching and kv_reservation=on-demand, got "
                f"{self.enable_prefix_caching} and {self.kv_reservation}"
            )
        check_group("kv_group", self.kv_group)
        check_choice("kv_rotate", self.kv_rotate, ROTATIONS)
        _ = self.kv_dtype, self.wide_parts
        if self.tier is not None and self.kv_wide is not None:
            raise ConfigError(f"value_tier does not go with kv_wide={self.kv_wide}, got {self.value_tier}")

    @property
    def usual_reuse(self) -> str:
        """The `reuse` of requests without one."""
        return DOCUMENTS if self.documents is not None and self.reuse == EXACT else self.reuse

    @cached_property
    def kv_dtype(self) -> KVDtype:
        """Formats of keys and values; `auto` is not resolved."""
        return KVDtype.parse(AUTO if self.kv_cache_dtype is None else self.kv_cache_dtype)

    @cached_property
    def wide_parts(self) -> WideParts:
        return WideParts.parse(self.kv_wide)

    @cached_property
    def tier(self) -> ValueTier | None:
        return ValueTier.parse(self.value_tier)
