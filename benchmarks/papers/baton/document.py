"""What the page of results says besides its tables."""

TITLE = "BATON: four ways to batch"
NOTES = """\
- **seconds to complete**: from the first submission, all queries at once, to the last token; medians where a cell was
  run more than once. Prompts are passages of prose, answers greedy. The end of text does not end them, a drawn length
  does, so that all modes compute the same. As in the paper a set is not replenished: at its end batches run empty.
- **passes**: forward passes of the running batch. **by passes**: static's passes over these: the gain if all took the
  same time. **at most**: the same if every row of every pass were of use, which no order of the queries can pass.
- **idle**: positions that were padding or belonged to nobody, of all computed, prefills included.
- **columns**: columns that the batch held over its longest unfinished query, summed over passes; 1 is the bound.
- **KV peak**: most memory of KVs after a step: tensors with their free columns, and KVs that wait outside the batch.
- **differ**: answers whose tokens are not static's.
- **shaping-gaps** is shaping as in the paper (4.1): a query that joins leaves its width of padding in the others' rows,
  which every later pass attends to (before their tokens here, between them there). `shaping` is what Winnow makes of
  it: rows end together, and no padding is kept. The paper's 1.75x and 1.29x are embedding over the former.
- Table 2 names its method as Table 1 names the one without P&D (`shaping-gaps`); its gains stand beside both. At batch
  4 it prints 1.89x, its seconds give 1.87x.
- Answers of a to b tokens let a batch of n need at most nb / (b + (n - 1)a) times fewer passes, in the order that
  favours it most: 1.79x at batch 2 with 24 to 200. 1.94x there takes passes that are themselves slower in the baseline.
  Here static batches share cache, kernels and steps with the other modes.
"""
