"""The operations over the paged cache as launches of Triton kernels."""

from typing import Any

import torch
import triton
from torch import Tensor

from winnow.attention.gathered_rows import attend_split
from winnow.attention.interface import AttentionSpec, BackendStep, HeadRotation
from winnow.attention.reference import TorchBackend, TorchStep, write_rows
from winnow.attention.spans import Spans
from winnow.attention.triton.attend import Attend, Batch
from winnow.attention.triton.kernels.move import move_kvs, write_kvs
from winnow.attention.triton.kernels.rotate import rotate_and_write_heads
from winnow.attention.triton.launch import (
    CacheShape,
    Tuning,
    capability_of,
    padded,
    product_dtype,
    tuning_for,
    unit_stride,
)
from winnow.attention.triton.side_format import readable, side_formats
from winnow.cache import KVPool, PagedCache
from winnow.cache.codec import turned

_MOVES_PER_PROGRAM = 16


class TritonBackend(TorchBackend):
    """See `AttentionBackend`.

    `write`, `attend` and `compact` do not wait for the device, and no grid depends on its memory: kernels read the
    lengths of rows there, and the host's bounds only have to cover them. A sequence in slot -1 has empty rows and only
    pads the batch.

    Args:
        tuning: tile sizes; None: from the table, by head_dim and dtype.
    """

    def __init__(self, tuning: Tuning | None = None) -> None:
        self._tuning = tuning

    def prepare(self, cache: PagedCache, spans: Spans) -> BackendStep:
        return _TritonStep(cache, spans, self._tuning)

    def capturable(self, spans: Spans, query_heads: int) -> bool:
        return Batch.plan(spans, query_heads, tile_queries=1).uploads_nothing

    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        if not len(source):
            return
        if len(pool.kinds) > 1 or pool.kinds[0].tier is not None:
            pool.move(source, target)
            return
        [kind] = pool.kinds
        with torch.cuda.device_of(source):
            words, fields = kind.words, kind.fields_in_words
            move_kvs[(triton.cdiv(len(source), _MOVES_PER_PROGRAM),)](
                words, pool.position, pool.accumulators, source, target, len(source), pool.position.numel(),
                BLOCK_SIZE=pool.layout.block_size, BLOCK_WORDS=words.shape[1],
                FIELDS=tuple((offset, size, triton.next_power_of_2(size)) for offset, size in fields),
                NUM_ACCUMULATORS=pool.layout.num_accumulators, BLOCK_N=_MOVES_PER_PROGRAM, num_warps=4,
            )  # fmt: skip


class _TritonStep(TorchStep):
    def __init__(self, cache: PagedCache, spans: Spans, tuning: Tuning | None) -> None:
        super().__init__(cache, spans)
        self._tuning = tuning
        self._planned: dict[tuple[int, int], Batch] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        cache, spans = self.cache, self.spans
        pool = cache.pool.of_layer(layer)
        if pool.tier is not None:
            write_rows(cache, spans, layer, k, v)
            return
        codec = readable(pool.kind.codec)
        k = unit_stride(turned(k) if codec.rotate_keys else k)
        v = unit_stride(turned(v) if codec.rotate_values else v)
        with torch.cuda.device_of(k):
            write_kvs[(len(k),)](
                k, v, k_token_stride=k.stride(0), k_head_stride=k.stride(1), v_token_stride=v.stride(0),
                v_head_stride=v.stride(1), **self._writing(layer),
            )  # fmt: skip

    def rotate_and_write(self, layer: int, heads: Tensor, query_heads: int, rotation: HeadRotation) -> bool:
        pool, cos = self.cache.pool.of_layer(layer), rotation.cos
        codec, half = readable(pool.kind.codec), cos.shape[1] // 2
        if pool.tier is not None or codec.rotate_keys or codec.rotate_values or not len(heads):
            return False
        assert heads.stride(1) == 1 and cos.is_contiguous() and rotation.sin.is_contiguous()
        writing = self._writing(layer)
        query, key = rotation.query_norm, rotation.key_norm
        with torch.cuda.device_of(heads):
            rotate_and_write_heads[(len(heads), 1 + triton.cdiv(query_heads, writing["BLOCK_H"]))](
                heads, heads.stride(0), cos, rotation.sin, None if query is None else query.weight,
                None if key is None else key.weight, 0.0 if query is None else query.eps,
                0.0 if key is None else key.eps, QUERY_HEADS=query_heads, HALF=half,
                QUERY_ONE_PLUS=query is not None and query.one_plus,
                KEY_ONE_PLUS=key is not None and key.one_plus, BLOCK=triton.next_power_of_2(half),
                REST=triton.next_power_of_2(max(pool.kind.key_size - 2 * half, 1)), **writing,
            )  # fmt: skip
        return True

    def _writing(self, layer: int) -> dict[str, Any]:
        cache, spans = self.cache, self.spans
        pool, tables = cache.pool.of_layer(layer), cache.tables
        only_decodes = spans.num_decodes == len(spans.counts)
        return {
            "storage": pool.storage,
            "position_pool": pool.numbers.position,
            "accumulators": pool.numbers.accumulators,
            "pages": tables.pages,
            "page_table": tables.page_table,
            "lengths": tables.lengths,
            "token_slots": spans.device_slots if only_decodes else spans.token_slots,
            "tokens_after": None if only_decodes else spans.tokens_after,
            "position": spans.position,
            "layer": layer,
            "pool_slots": pool.numbers.position.numel(),
            "CACHE": CacheShape.of(cache),
            **side_formats(pool.kind),
            "HEAD_DIM": pool.kind.key_size,
            "NUM_ACCUMULATORS": len(pool.numbers.accumulators),
            "BLOCK_H": triton.next_power_of_2(cache.pool.layout.num_kv_heads),
            "BLOCK_D": padded(pool.kind.key_size),
            "num_warps": 4,
            "enable_fp_fusion": False,  # codes are the reference's, bit for bit
        }

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        cache, spans = self.cache, self.spans
        pool = cache.pool.of_layer(layer)
        if pool.tier is not None:
            return attend_split(cache, spans, layer, q, spec)
        codec = readable(pool.kind.codec)
        dtype, capability = product_dtype(q, codec), capability_of(q.device)
        tuning = self._tuning or tuning_for(padded(q.shape[2]), dtype, capability)
        queries = turned(q).to(q.dtype) if codec.rotate_keys else q
        # Summed values are turned back before they are rounded.
        out = q.new_empty(q.shape, dtype=torch.float32 if codec.rotate_values else q.dtype)
        call = Attend(cache, spans, layer, unit_stride(queries), out, spec, tuning)
        batch = self._launches(q.shape[1], call.tile_queries)
        with torch.cuda.device_of(q):
            for decodes in batch.decodes:
                call.decode(decodes)
            if batch.chunks is not None:
                call.prefill(batch.chunks)
        return turned(out).to(q.dtype) if codec.rotate_values else out

    def _launches(self, query_heads: int, tile_queries: int) -> Batch:
        found = self._planned.get((query_heads, tile_queries))
        if found is None:
            found = Batch.plan(self.spans, query_heads, tile_queries)
            self._planned[query_heads, tile_queries] = found
        return found
