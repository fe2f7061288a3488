"""BATON: dynamic re-batching of a padded batch, for any causal model that transformers runs (docs/how-a-step-works.md).

The engine behind `LLM(model, engine="padded:mode=embedding", max_num_seqs=8, kv_memory="2GiB")`. The model is
not patched: it is called with `input_ids`, `attention_mask`, `position_ids` and a cache. All modes give the same
tokens. Numbers in brackets are sections of the paper, "BATON: Enhancing Batch-wise Inference Efficiency for Large
Language Models via Dynamic Re-batching".
"""

from typing import TYPE_CHECKING

from winnow.process.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow_lab.padded.build import build_padded_engine
    from winnow_lab.padded.stats import PaddedStats

__all__ = ["PaddedStats", "build_padded_engine"]

__getattr__ = lazy_exports(
    __name__, {"PaddedStats": "winnow_lab.padded.stats", "build_padded_engine": "winnow_lab.padded.build"}
)
