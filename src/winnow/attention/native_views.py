"""Views of a paged cache for the CPU kernels: addresses of its tensors. None outlives what it points at."""

from torch import Tensor

from winnow import native
from winnow.attention.observer import AttentionObserver
from winnow.attention.spans import Spans
from winnow.cache import PagedCache
from winnow.cache.codec import BIAS, KVCodec, PairCodec, PlainCodec, rotation_block
from winnow.cache.formats import VectorFormat
from winnow.cache.kind_pool import KindPool
from winnow.cache.layout import PAGE_ENTRIES
from winnow.cache.wide import WideWindow
from winnow.errors import ConfigError


def native_cache(cache: PagedCache, pool: KindPool, heads: int) -> native.Cache:
    """Return the cache with the blocks of one kind, in layers of a number of heads."""
    layout, tables = cache.pool.layout, cache.tables
    _check_reads(pool.kind.codec)
    return native.Cache(
        native_pool(pool), pages=tables.pages.data_ptr(), page_table=tables.page_table.data_ptr(),
        lengths=tables.lengths.data_ptr(), num_layers=layout.num_layers, num_heads=heads,
        table_heads=layout.num_kv_heads, page_entries=PAGE_ENTRIES,
        pages_per_seq=tables.page_table.shape[1],
        windows=[_native_window(window) for window in cache.windows],
    )  # fmt: skip


def native_batch(spans: Spans) -> native.Batch:
    """Return the batch as the kernels see it."""
    # By identity: sequences of a policy share theirs, and to hash each one's costs more than equals would.
    kinds = {id(kind): kind for kind in spans.observe if kind is not None}
    number = {kind: i for i, kind in enumerate(kinds)}
    return native.Batch(
        slots=spans.slots.tolist(), counts=spans.counts.tolist(), starts=spans.starts.tolist(),
        position=spans.position.data_ptr(), num_tokens=len(spans.position),
        observer=[-1 if kind is None else number[id(kind)] for kind in spans.observe],
        observe_from=spans.observe_from.tolist(),
        observers=[_native_observer(kind) for kind in kinds.values()], temporary=spans.temporary.tolist(),
    )  # fmt: skip


def _native_observer(observer: AttentionObserver) -> native.AttentionObserver:
    smoothing = observer.smoothing
    return native.AttentionObserver(
        terms=[native.Term[term.name.lower()] for term in observer.terms],
        group=native.Group[observer.group.name.lower()],
        exclude_first=observer.exclude_first,
        replace=observer.replace,
        smoothing_size=smoothing.size if smoothing else 0,
        smoothing_max=smoothing is not None and smoothing.kind == "max",
        smoothing_per_query_head=smoothing is not None and smoothing.per_query_head,
        smoothing_skip_window=smoothing is not None and smoothing.skip_window,
    )


def reads(*codecs: KVCodec) -> bool:
    """Return whether the kernels read KVs that the codecs store."""
    return all(
        isinstance(codec, PairCodec)
        and all(
            form.name in native.FORMATS or form.name == "int4-outlier" for form in (codec.key, codec.value)
        )
        for codec in codecs
    )


def native_pool(pool: KindPool) -> native.Pool:
    """Return the pool as the kernels see it; it points at its tensors.

    Where the kernels do not read its codec they still move its KVs, which takes the fields alone.
    """
    kind, numbers = pool.kind, pool.numbers
    codec = kind.codec
    plain = isinstance(codec, PlainCodec)
    keys = values = None
    if isinstance(codec, PairCodec) and not plain:
        keys = _coded_vectors(pool, "k", codec.key, codec.rotate_keys)
        values = _coded_vectors(pool, "v", codec.value, codec.rotate_values)
    return native.Pool(
        fields=[_native_field(x, pool.first) for x in pool.fields.values()],
        k=_address(pool.k, pool.first) if plain else 0, v=_address(pool.v, pool.first) if plain else 0,
        position=numbers.position.data_ptr(), accumulators=numbers.accumulators.data_ptr(),
        num_slots=numbers.position.numel(), num_accumulators=len(numbers.accumulators),
        block_size=kind.size, block_stride=pool.k.stride(0) if plain else 0, head_dim=kind.key_size,
        dtype=native.native_dtype(pool.k.dtype) if plain else native.DType.f32, keys=keys, values=values,
        bias=_native_field(pool.fields[BIAS.name], pool.first) if pool.has_bias else None,
    )  # fmt: skip


def key_rows(pool: KindPool, slot: Tensor, length: Tensor) -> native.KeyRows:
    """Return the keys of rows for the kernels, where they lie in the pool. It points at all three arguments.

    Args:
        slot: int64 [..., N], dense, the slots of each row; length: int32 [...], dense, how many of them count.
    """
    _check_reads(pool.kind.codec)
    return native.KeyRows(
        pool=native_pool(pool),
        slot=slot.data_ptr(),
        length=length.data_ptr(),
        rows=length.numel(),
        stride=slot.shape[-1],
    )


def _check_reads(codec: KVCodec) -> None:
    """Refuse what the kernels do not read.

    Raises:
        ConfigError: names the codec.
    """
    if not reads(codec):
        raise ConfigError(
            f"attention_backend native reads KVs stored as one of {', '.join(native.FORMATS)}, got {codec.name}"
        )


def _native_field(field: Tensor, first: int) -> native.Field:
    """Return a field of the blocks from `first` on, [num_blocks, block_size, length], as bytes."""
    size = field.itemsize
    return native.Field(_address(field, first), field.stride(1) * size, field.stride(0) * size)


def _address(field: Tensor, first: int) -> int:
    """Return where block 0 would lie, from which the kernels count, of a field of the blocks from `first` on."""
    return field.data_ptr() - first * field.stride(0) * field.itemsize


def _native_window(window: WideWindow) -> native.WideWindow:
    """Return what is kept wide of some layers; it points at the window's tensors."""
    _, num_layers, num_heads, _, head_dim = window.k.shape
    return native.WideWindow(
        first_layer=window.layers.start, num_layers=num_layers, num_heads=num_heads, head_dim=head_dim,
        sinks=window.sinks, recent=window.recent, dtype=native.native_dtype(window.k.dtype),
        k=window.k.data_ptr(), v=window.v.data_ptr(), position=window.position.data_ptr(),
    )  # fmt: skip


def _coded_vectors(pool: KindPool, side: str, form: VectorFormat, rotated: bool) -> native.CodedVectors:
    """Return how the kernels read one side of the KVs; `side` is "k" or "v"."""
    nowhere = native.Field(0, 0, 0)
    found = {suffix: _native_field(pool.fields[f"{side}{suffix}"], pool.first) for suffix in form.suffixes}
    head_dim = pool.kind.key_size if side == "k" else pool.kind.value_size
    scale, outlier = pool.fields.get(f"{side}_scale"), pool.fields.get(f"{side}_outlier")
    return native.CodedVectors(
        format=native.FORMATS[form.name.removesuffix("-outlier")], code=found[""],
        group=head_dim if scale is None else head_dim // scale.shape[-1],
        scale=found.get("_scale", nowhere), min=found.get("_min", nowhere),
        num_outliers=0 if outlier is None else outlier.shape[-1], outlier=found.get("_outlier", nowhere),
        channel=found.get("_channel", nowhere), rotation=rotation_block(head_dim) if rotated else 1,
    )  # fmt: skip
