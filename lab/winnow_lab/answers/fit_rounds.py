"""What is lost where KVs are fitted again and again: one round, or up to eight, to the same number of KVs.

A context of C tokens comes in R steps of (C - B) / R behind the first B = C / compression; after each, rows are cut to
B KVs. Two kinds of tables, for R = 1, 2, 4, 8, with what stays fitted or only chosen:

- text: the policy `winnow-seen`, fitted or not, in rounds within the prompt; nats a token of what follows the context;
- outputs: each row by itself keeps the KVs that a replay's queries look at most, and is fitted to every other one of
  these queries. Printed is the error of its outputs at the rest of them, as a share of their square, median over rows.

Run: python -m winnow_lab.answers.fit_rounds --model models/SmolLM2-135M-Instruct.Q4_1.gguf --dtype bfloat16
"""

import argparse
import math
import platform
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from winnow import LLM, SamplingParams
from winnow.eviction import PRESETS, EvictionPolicy, Fit, When
from winnow.eviction.compact import queries_of_head
from winnow.eviction.fit import RowKVs, RowQueries, fit_row, shares_of
from winnow.eviction.references import ReferenceProbe
from winnow_lab.checkout import ROOT

ROUNDS = (1, 2, 4, 8)
SINKS = 4
DOCS = ROOT / "docs"


def context_rows(llm: LLM, context: list[int]) -> list[tuple[RowKVs, RowQueries]]:
    """Each row of a context, and the queries of a replay of it."""
    executor, rows = llm._engine._executor, []
    compact = executor.compact

    def grab() -> None:
        [planned] = executor._planned_rounds
        held = planned.ranking.rows
        for index, layer in enumerate(held.layers):
            reference = executor._signals.probe(ReferenceProbe).of(layer, planned.slots[0])
            pool, heads = executor.cache.pool.of_layer(layer), held.length.shape[-1]
            for head, length in enumerate(held.length[index, 0].tolist()):
                block = held.block[index, 0, head]
                position = held.position[index, 0, head, :length].long()
                order = position.argsort()
                kvs = RowKVs(
                    pool.keys_of(block)[order],
                    pool.values_of(block)[order],
                    position[order],
                    torch.zeros(length),
                )
                rows.append((kvs, queries_of_head(reference, head, heads)))
        compact()

    executor.compact = grab
    llm.generate(
        [context], SamplingParams(max_tokens=2, ignore_eos=True, eviction="winnow-fit", compression=4.0)
    )
    executor.compact = compact
    return rows


def output_error(kvs: RowKVs, queries: RowQueries, rounds: int, budget: int, fit: Fit | None) -> float:
    """Error of a row's outputs after its rounds, at the queries that it was not fitted to."""
    known, held_out = (
        queries._replace(q=queries.q[part::2], position=queries.position[part::2]) for part in (0, 1)
    )
    total, row = len(kvs.k), RowKVs(*(part[:budget] for part in kvs))
    for index in range(rounds):
        start, end = (budget + (total - budget) * each // rounds for each in (index, index + 1))
        row = RowKVs(*(torch.cat([old, new[start:end]]) for old, new in zip(row, kvs, strict=True)))
        whole = shares_of(known, row, torch.arange(len(row.k)))
        score = whole.kept.amax(dim=0)
        score[row.position < SINKS] = torch.inf
        kept = score.topk(budget).indices.sort().values
        bias, values = torch.zeros(budget), row.v[kept]
        if fit is not None:
            shares = whole._replace(kept=whole.kept[:, kept])
            bias, values = fit_row(fit, shares, values, row.position[kept] < SINKS)
        row = RowKVs(row.k[kept], values, row.position[kept], row.bias[kept] + bias)
    wanted, found = (shares_of(held_out, each, torch.arange(1)).output for each in (kvs, row))
    return float((wanted - found).square().sum() / wanted.square().sum())


def nats(
    llm: LLM, context: list[int], text: list[int], policy: EvictionPolicy | str, compression: float | None
) -> float:
    """Nats a token of the text behind a context that a policy has compressed."""
    params = SamplingParams(
        max_tokens=1, prompt_logprobs=0, context_tokens=len(context), eviction=policy, compression=compression
    )
    [output] = llm.generate([context + text], params)
    logprobs = (output.prompt_logprobs or [])[len(context) :]
    return -statistics.fmean(
        entry[token].logprob for token, entry in zip(text, logprobs, strict=True) if entry
    )


def contexts(llm: LLM, number: int, context: int, text: int) -> Iterator[tuple[list[int], list[int]]]:
    """Contexts and what follows them, from this project's documentation."""
    pages = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    ids = llm.tokenizer.encode(pages, add_special_tokens=False)
    if len(ids) < number * (context + text):
        raise SystemExit(f"error: the documentation has {len(ids)} tokens, {number} contexts need more")
    for start in range(0, number * (context + text), context + text):
        part = ids[start : start + context + text]
        yield part[:context], part[context:]


def print_table(
    title: str, compression: float, cells: dict[tuple[str, int], list[float]], names: list[str]
) -> None:
    print(f"\n{title}, {compression:g}x\n\n| rounds | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    for rounds in ROUNDS:
        values = [cells[name, rounds] for name in names]
        print(f"| {rounds} | {' | '.join(f'{statistics.fmean(each):.3f}' for each in values)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--text", type=int, default=256)
    parser.add_argument("--compressions", type=float, nargs="+", default=[4.0, 16.0])
    arguments = parser.parse_args()
    print(
        f"{Path(arguments.model).name}, {arguments.dtype}, {arguments.contexts} contexts of {arguments.tokens} tokens; "
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    seen, kept = PRESETS["winnow-seen-fit"].policy, ["fitted", "chosen"]
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        kv_memory="512MiB",
        kv_bias=True,
        kv_floor=1,
        num_accumulators=1,
        enable_prefix_caching=False,
    )
    parts = list(contexts(llm, arguments.contexts, arguments.tokens, arguments.text))
    full = [nats(llm, context, text, "full", None) for context, text in parts]
    print(f"\nfull cache: {statistics.fmean(full):.3f} nats a token")
    for compression in arguments.compressions:
        budget = math.ceil(arguments.tokens / compression)
        cells: dict[tuple[str, int], list[float]] = {}
        for context, text in parts:
            for rounds in ROUNDS:
                step = math.ceil((arguments.tokens - budget) / rounds)
                for name in kept:
                    policy = replace(
                        seen,
                        when=When(after_prefill=True, prefill_every=step),
                        compact=seen.compact if name == "fitted" else None,
                    )
                    cells.setdefault((name, rounds), []).append(nats(llm, context, text, policy, compression))
        print_table("text, nats a token", compression, cells, kept)
    rows = context_rows(llm, parts[0][0])
    for compression in arguments.compressions:
        budget = math.ceil(arguments.tokens / compression)
        errors: dict[tuple[str, int], list[float]] = {}
        with torch.inference_mode():
            for rounds in ROUNDS:
                for name, fit in zip(kept, (Fit(), None), strict=True):
                    each = [output_error(*row, rounds, budget, fit) for row in rows]
                    errors[name, rounds] = [statistics.median(each)]
        print_table("outputs, median error of a row", compression, errors, kept)
    llm.close()


if __name__ == "__main__":
    main()
