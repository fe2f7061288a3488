"""BATON: dynamic re-batching of a padded batch, for any causal model that transformers runs.

The engine behind `LLM(model, engine="padded", ...)`. The model is not patched: it is called with `input_ids`,
`attention_mask`, `position_ids` and a cache. Paper: "BATON: Enhancing Batch-wise Inference Efficiency for Large
Language Models via Dynamic Re-batching".

Usage and statistics:

    with LLM(path, engine="padded", padded_mode="embedding", max_num_seqs=8, kv_memory="2GiB") as llm:
        llm.submit(prompt, params, priority=1)     # greater is served first; the default is 0
        while llm.has_unfinished:
            for output in llm.step():              # a pass of the batch, or the first tokens of a prefilled group
                ...                                # `output.finished` is True in the last one of a request
            stats = llm.stats()                    # `PaddedStats`: `EngineStats` plus figures of the padded batch
        stats.idle_share                           # padded or idle positions over all positions computed
        stats.column_share                         # columns held over max(live length), summed over passes
        stats.kv_bytes_used, stats.kv_bytes_peak   # of the batch's tensors, free columns included
        stats.counters.positions, .idle, .passes, .prefills, .joins, .parks, .drops
        stats.counters.prefill_seconds, .decode_seconds, .overlapped_seconds

`padded_mode` is one of the paper's four (5.1). `embedding` is the one to use; the others are for comparison:

    static     batches run to completion: the paper's "Benchmark"
    pd         queries are prefilled in groups of similar length, then batches run to completion: "PD"
    shaping    a query joins in a pass of the batch, in which the others are padded: "BATON" (4.1)
    embedding  queries are prefilled apart and their KVs embedded into the batch: "BATON-PD" (4.2)

`max_num_seqs` is the batch size. All modes give the same tokens.
"""

from typing import TYPE_CHECKING

from winnow.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow_lab.padded.build import build_padded_engine
    from winnow_lab.padded.stats import PaddedStats

__all__ = ["PaddedStats", "build_padded_engine"]

__getattr__ = lazy_exports(
    __name__,
    {"PaddedStats": "winnow_lab.padded.stats", "build_padded_engine": "winnow_lab.padded.build"},
)
