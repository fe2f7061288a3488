"""BATON: dynamic re-batching of a padded batch, for every causal model that transformers runs, as it is.

The engine behind `LLM(model, engine="padded", ...)`. Nothing of the model is patched: it is called with `input_ids`,
`attention_mask`, `position_ids` and a cache. Paper: "BATON: Enhancing Batch-wise Inference Efficiency for Large
Language Models via Dynamic Re-batching".

How to drive and to measure it:

    with LLM(path, engine="padded", padded_mode="embedding", max_num_seqs=8, kv_memory="2GiB") as llm:
        llm.submit(prompt, params, priority=1)     # greater is more urgent; the default is 0
        while llm.has_unfinished:
            for output in llm.step():              # a pass of the batch, or the first tokens of a prefilled group
                ...                                # an output is `finished` in the step that ends it
            stats = llm.stats()                    # `PaddedStats`: `EngineStats` and what only a padded batch has
        stats.idle_share                           # padded or dead positions over all positions computed
        stats.column_share                         # columns held over max(live length), summed over passes
        stats.kv_bytes_used, stats.kv_bytes_peak   # of the batch's tensors, free columns included
        stats.counters.positions, .idle, .passes, .prefills, .joins, .parks, .drops
        stats.counters.prefill_seconds, .decode_seconds, .overlapped_seconds

`padded_mode` is one of the paper's four (5.1):

    static     run to completion: the paper's "Benchmark"
    pd         prefill in groups of similar length, then batches run to completion: "PD"
    shaping    a query joins in a pass of the batch, the others padded: "BATON" (4.1)
    embedding  a query is prefilled apart and its KVs embedded: "BATON-PD" (4.2)

`max_num_seqs` is the batch size. All modes give the same tokens.
"""

from typing import TYPE_CHECKING

from winnow.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow.padded.build import build_padded_engine
    from winnow.padded.stats import PaddedStats

__all__ = ["PaddedStats", "build_padded_engine"]

__getattr__ = lazy_exports(
    __name__,
    {"PaddedStats": "winnow.padded.stats", "build_padded_engine": "winnow.padded.build"},
)
