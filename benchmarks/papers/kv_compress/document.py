"""What the page of results says besides its tables."""

from benchmarks.papers.kv_compress.paper import BATCHES, BEST_GAIN, UNTOLD

TITLE = "KV-Compress: throughput, batch and accuracy against compression"
NOTES = f"""\
- **gain**: total tokens per second beside the full cache within the same KV memory.
- **bound**: the gain if decoding took no time, from the time of the same prompts with one new token each, no eviction.
  Compression after the prompt cannot pass it. P&D can: its prompts attend to what was kept and at most 512 tokens more,
  so that prefill itself is faster. **own**: the bound with P&D's own prefill, where that was measured.
- **batch**, **most**, **mean**: requests that got a token in one step; the most, and the mean over the steps.
- **reached**: tokens for each KV held at an answer's end. The floor (`--kv-floor`) keeps it below what was asked for,
  and so do the answer's own tokens where no rounds come while decoding. Compressions whose budget lies below the floor
  are the same work: where they differ, the machine did.
- **score**: where prompts are tasks, the mean over the very answers that were timed, cut at the model's end of text.
  The question stands last. A round after the prompt has seen it (query-aware). P&D's rounds within the prompt have not,
  and the question cannot bring back what they took.
- **spread**: most less least tokens per second over the runs, beside the median. **KV peak**: the most in use between
  two steps.

The paper's best gain is {BEST_GAIN:g}x; {BATCHES}. It does not tell {UNTOLD}.
"""
