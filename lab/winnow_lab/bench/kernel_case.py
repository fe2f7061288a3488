"""A paged cache as a running engine leaves it, and batches over it, for kernels to be measured on."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.attention import AttentionObserver, ReferenceBackend, Spans
from winnow.cache import CacheLayout, CacheSize, LocalCache, PagedCache
from winnow.cache.codec import PairCodec, codec_of
from winnow.cache.layout import ceil_div
from winnow.errors import ConfigError
from winnow.values.units import format_bytes
from winnow_lab.bench.kernel_config import KernelConfig

# All layers together are this many times the last-level cache, so that no pass finds data of the pass before.
_TIMES_CACHE = 4


@dataclass(frozen=True)
class KernelCase:
    """A filled cache. Its sequences end with a chunk of their prompt, whose last token serves as the decoding one.

    Attributes:
        q, k, v: [batch * chunk, heads, head_dim], for whatever batch needs a part of them.
    """

    config: KernelConfig
    local: LocalCache
    slots: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def build(cls, config: KernelConfig, last_level_cache: int) -> "KernelCase":
        """Fill as many layers as hold four times `last_level_cache` bytes, at least two.

        `config` has one `kv_cache_dtype`. Raises ConfigError where the device has not enough memory.
        """
        dtype, device = torch_dtype(config), torch_device(config)
        [kv_format] = config.kv_formats
        codec = codec_of(kv_format)
        layer_kvs = config.batch * config.context * config.kv_heads
        layer_bytes = layer_kvs * _kv_bytes(codec, config.head_dim)
        layout = kernel_layout(config, codec, max(2, ceil_div(_TIMES_CACHE * last_level_cache, layer_bytes)))
        pages = layout.pages_for(config.context)
        blocks = config.batch * layout.blocks_for(config.context)
        size = CacheSize(blocks, config.batch * pages, config.batch, pages)
        try:
            local = LocalCache(layout, size, device)
        except (RuntimeError, torch.OutOfMemoryError):
            needed = format_bytes(size.nbytes(layout))
            raise ConfigError(
                f"batch, context: {layout.num_layers} layers of KVs take {needed}, more than there is"
            ) from None
        generator = torch.Generator(device).manual_seed(config.seed)

        def random(heads: int) -> Tensor:
            shape = (config.batch * config.chunk, heads, config.head_dim)
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        case = cls(
            config,
            local,
            tuple(local.ledger.open() for _ in range(config.batch)),
            random(config.query_heads),
            random(config.kv_heads),
            random(config.kv_heads),
        )
        case._fill()
        return case

    @property
    def cache(self) -> PagedCache:
        return self.local.paged

    @property
    def layers(self) -> int:
        return self.cache.pool.layout.num_layers

    @property
    def lengths(self) -> NDArray[np.int32]:
        """KVs of every row, [batch, layers, heads]."""
        return self.local.ledger.lengths[list(self.slots)]

    @property
    def kv_bytes(self) -> int:
        """Key and value of one KV, in bytes; neither position nor score."""
        return _kv_bytes(self.cache.pool.layout.codecs[0], self.config.head_dim)

    def spans(
        self, decodes: int, prefills: int, observe: AttentionObserver | None = None, window: int = 0
    ) -> Spans:
        """A batch of the first sequences decoding one token each, and of the last ones prefilling a chunk each.

        Args:
            window: only the last `window` queries of a chunk count for scores; 0: all.
        """
        slots = [*self.slots[:decodes], *self.slots[self.config.batch - prefills :]]
        counts = [1] * decodes + [self.config.chunk] * prefills
        starts = [self.config.context - count for count in counts]
        spans = Spans.build(
            slots,
            starts,
            counts,
            self.cache.tables.longest(slots),
            device=self.q.device,
            observe=[observe] * len(slots),
        )
        if not window:
            return spans
        return replace(spans, observe_from=np.full(len(slots), self.config.context - window, dtype=np.int64))

    def moves(self, layer: int) -> tuple[Tensor, Tensor]:
        """Source and target of a compaction to half: flat slot numbers, int64 [n] each, over all rows of the layer.

        The back half's survivors, half of it, fill holes in the front.
        """
        half = int(self.lengths[:, layer].min()) // 2
        block_size = self.config.block_size
        device = self.q.device
        blocks = self.cache.tables.lookup(
            torch.tensor(self.slots, device=device), layer, ceil_div(2 * half, block_size)
        ).long()
        slots = (blocks[..., None] * block_size + torch.arange(block_size, device=device)).flatten(2)
        generator = torch.Generator(device).manual_seed(self.config.seed + layer)

        def choose(first: int) -> Tensor:
            """A random half of the slots first..first + half of each row, in their order."""
            order = torch.rand((*slots.shape[:2], half), generator=generator, device=device).argsort(dim=-1)
            return slots.gather(2, first + order[..., : half // 2].sort(dim=-1).values).flatten()

        return choose(half), choose(0)

    def _fill(self) -> None:
        """Write all but the last chunk of every sequence, shorten rows if they are to differ, write the last chunk."""
        config, ledger = self.config, self.local.ledger
        rng = np.random.default_rng(config.seed)
        if config.scatter:
            blocks = ledger.allocator.allocate(ledger.size.num_blocks)
            ledger.allocator.release(rng.permutation(blocks))
        context = config.context - config.chunk
        for slot in self.slots:
            for start in range(0, context, config.chunk):
                self._write(slot, start, min(config.chunk, context - start))
            if config.uneven:
                shape = (1, self.layers, config.kv_heads)
                ledger.shrink([slot], rng.integers(1, context, size=shape, dtype=np.int32, endpoint=True))
            self._write(slot, context, config.chunk)

    def _write(self, slot: int, start: int, count: int) -> None:
        self.local.append([slot], [count])
        lengths = self.cache.tables.longest([slot])
        spans = Spans.build([slot], [start], [count], lengths, device=self.q.device)
        first = slot % self.config.batch * self.config.chunk
        k, v = self.k[first : first + count], self.v[first : first + count]
        for layer in range(self.layers):
            ReferenceBackend().prepare(self.cache, spans).write(layer, k, v)


def torch_dtype(config: KernelConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def torch_device(config: KernelConfig) -> torch.device:
    """The device as torch names it; raises ConfigError where there is none such here."""
    try:
        device = torch.device(config.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device: {config.device!r} is not usable here: {reason}") from None
    return device


def kernel_layout(config: KernelConfig, codec: PairCodec, layers: int = 1) -> CacheLayout:
    return CacheLayout.even(
        layers, config.kv_heads, config.head_dim, config.block_size, codec, num_accumulators=1
    )


def _kv_bytes(codec: PairCodec, head_dim: int) -> int:
    return sum(field.slot_bytes for field in codec.fields(head_dim))
