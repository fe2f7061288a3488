"""What Winnow keeps, held against what NVIDIA's kvpress keeps of the same prompts under the same weights.

`peers/kvpress.json` says which positions each press keeps; `peers/record_kvpress.py` says how that was recorded. Here
the real engine runs the policy whose definition agrees, and every row must hold the very same positions. kvpress splits
a budget over layers and over heads by rules of its own: they are written down below as budgets that a user could have
added, and Winnow's own are compared besides. Run as a script, this file prints the table of docs/eviction-rules.md.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from winnow import LLM, SamplingParams
from winnow.attention import Group, Smoothing
from winnow.eviction import (
    AdaptiveHeads,
    Average,
    Budget,
    EqualHeads,
    EvictionPolicy,
    Keep,
    KeyDifference,
    KeyNorm,
    LastQuery,
    LayerSplit,
    Pyramid,
    Recency,
    Scorer,
    When,
    Window,
)
from winnow.eviction.costs import Ranking, RowCosts

PEERS = Path(__file__).parent / "peers"
PAGE = Path(__file__).parents[2] / "docs" / "eviction-rules.md"
RECORDED: dict[str, Any] = json.loads((PEERS / "kvpress.json").read_text())
PROMPTS: list[list[int]] = RECORDED["prompts"]
CASES: list[dict[str, Any]] = RECORDED["cases"]

# Positions of each layer and KV head, ascending.
Positions = list[list[list[int]]]

# How much of a policy is kvpress's.
RULES = {
    "kvpress": "all as kvpress defines it",
    "winnow": "what may never go, and how the budget is split, as Winnow's preset defines it",
    "unguarded": "heads compete as in Winnow, without a floor: the same where the safeguard of kvpress never bites",
}

# How Winnow computes must not matter: one request at a time and prompts whole, or all at once and in pieces.
ENGINES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1, "block_size": 16, "prefill_chunk": None},
    "together": {"max_num_seqs": 64, "block_size": 5, "prefill_chunk": 48},
}


@dataclass(frozen=True)
class KvpressPyramid(LayerSplit):
    """PyramidKVPress: budgets include the window, steps are not whole numbers, and steep pyramids become flat."""

    beta: int
    ratio: float

    def budgets(self, costs: RowCosts) -> Tensor:
        lengths, windows = costs.round.tokens.tolist(), costs.round.recent.tolist()
        return torch.tensor(
            [self._split(*each, costs.num_layers) for each in zip(lengths, windows, strict=True)]
        )

    def _split(self, length: int, window: int, layers: int) -> list[int]:
        mean = length * (1 - self.ratio)
        least, most = mean / self.beta, 2 * mean - mean / self.beta
        if most >= length - window:
            least, most = 2 * mean - (length - window), length - window
        if not length >= most >= least >= window:
            return [max(1, round(mean))] * layers
        return [round(most - layer * (most - least) / (layers - 1)) for layer in range(layers)]


@dataclass(frozen=True)
class KvpressHeads(Budget):
    """AdaKVPress: a share of the budget is safe in every head, and the layer's best others fill the rest exactly."""

    share: float

    def costs(self, ranking: Ranking) -> RowCosts:
        return RowCosts.of(ranking, ranking.sorted_score)

    def allot(self, costs: RowCosts) -> Tensor:
        assert costs.cost is not None
        budget = costs.round.budget
        safe = (budget.double() * self.share).long().clamp_min(1)[:, None, None, None]
        place = torch.arange(costs.cost.shape[-1])
        cost = costs.cost.masked_fill(place >= costs.length[..., None] - safe, torch.inf)
        gone = (costs.length - budget[:, None, None]).sum(dim=2)
        last_to_go = cost.flatten(2).sort(dim=-1).values.gather(2, gone[..., None] - 1)
        return costs.length - (cost <= last_to_go[..., None]).sum(dim=-1)


def score_and_keep(press: str, parameters: dict[str, Any]) -> tuple[Scorer, Keep]:
    if press in ("SnapKVPress", "PyramidKVPress"):
        pool = Smoothing(parameters["kernel_size"], "average", per_query_head=True, skip_window=True)
        window = parameters["window_size"]
        return Window(window, pool=pool, group=Group.MEAN), Keep(recent=window)
    if press == "TOVAPress":
        return LastQuery(), Keep(recent=1)
    if press == "StreamingLLMPress":
        return Recency(), Keep(sinks=parameters["n_sink"])
    scores = {
        "KnormPress": KeyNorm(),
        "KeyDiffPress": KeyDifference(),
        "ObservedAttentionPress": Average(group=Group.MEAN),
    }
    return scores[press], Keep()


def policy_like(case: dict[str, Any], rule: str) -> EvictionPolicy:
    """The policy that agrees with a press by one of the `RULES`."""
    parameters, press = case["parameters"], case["press"]
    score, keep = score_and_keep(scorer(press), parameters.get("press", parameters))
    budget: Budget = EqualHeads()
    if press.startswith("AdaKVPress"):
        share = parameters["alpha_safeguard"]
        budgets = {
            "kvpress": KvpressHeads(share),
            "winnow": AdaptiveHeads(share),
            "unguarded": AdaptiveHeads(0.0),
        }
        budget = budgets[rule]
    elif press == "PyramidKVPress":
        beta, ratio = parameters["beta"], parameters["compression_ratio"]
        budget = EqualHeads(KvpressPyramid(beta, ratio) if rule == "kvpress" else Pyramid(beta))
    elif press == "TOVAPress" and rule == "winnow":
        keep = Keep()
    return EvictionPolicy(score, budget, keep, When(after_prefill=True))


def scorer(press: str) -> str:
    return press.removeprefix("AdaKVPress(").removesuffix(")")


def rules_for(case: dict[str, Any]) -> list[str]:
    """Which of the `RULES` say something of their own about a case."""
    if case["press"].startswith("AdaKVPress"):
        safe = max(1, int(n_kept(case) * case["parameters"]["alpha_safeguard"]))
        bites = min(min(layer) for layer in case["n_kept"]) <= safe
        return ["kvpress", "winnow"] if bites else ["kvpress", "winnow", "unguarded"]
    return ["kvpress", "winnow"] if case["press"] in ("PyramidKVPress", "TOVAPress") else ["kvpress"]


def n_kept(case: dict[str, Any]) -> int:
    """KVs that a row keeps on average; PyramidKVPress rounds otherwise."""
    return max(1, int(len(PROMPTS[case["prompt"]]) * (1 - case["compression_ratio"])))


# Case and rule.
Run = tuple[int, str]
RUNS: list[Run] = [
    (index, rule) for rule in RULES for index, case in enumerate(CASES) if rule in rules_for(case)
]
ALIKE = [run for run in RUNS if run[1] != "winnow"]
UNPROTECTED = [run for run in RUNS if run[1] == "winnow" and CASES[run[0]]["press"] == "TOVAPress"]
SPLIT_OTHERWISE = [run for run in RUNS if run[1] == "winnow" and run not in UNPROTECTED]


def name(run: Run) -> str:
    case = CASES[run[0]]
    return f"{case['name']}-{case['compression_ratio']}-prompt{case['prompt']}-{run[1]}"


# -- what Winnow keeps ------------------------------------------------------------------------------------------------


def run_all(**options: Any) -> dict[Run, Positions]:
    """What the engine keeps after the prompt."""
    kept = {}
    with LLM(PEERS / RECORDED["model"], kv_memory="16MiB", dtype="float32", device="cpu", **options) as llm:
        runs = {submit(llm, run): run for run in RUNS}
        while llm.has_unfinished:
            for output in llm.step():
                # The round falls between the first token and the second.
                if len(output.outputs[0].token_ids) == 2:
                    kept[runs[output.request_id]] = rows_of(llm, output.request_id)
                    llm.abort(output.request_id)
        assert llm.stats().num_preemptions == 0
    return {run: kept[run] for run in RUNS}


def submit(llm: LLM, run: Run) -> str:
    case = CASES[run[0]]
    params = SamplingParams(
        temperature=0,
        max_tokens=3,
        ignore_eos=True,
        eviction=policy_like(case, run[1]),
        kv_budget=n_kept(case),
    )
    return llm.submit(PROMPTS[case["prompt"]], params)


def rows_of(llm: LLM, request_id: str) -> Positions:
    """The positions of the prompt that the rows of a request hold; besides them each holds the answer's first token."""
    [sequence] = llm._engine.requests[request_id].sequences
    tables, pool = llm._engine._executor.cache.tables, llm._engine._executor.cache.pool
    num_tokens = len(sequence.request.prompt_token_ids)
    held: Positions = []
    for layer, lengths in enumerate(tables.host_lengths[sequence.kv.slot].tolist()):
        blocks = -(-max(lengths) // pool.layout.block_size)
        table = tables.lookup(torch.tensor([sequence.kv.slot]), layer, blocks)[0].long()
        position = pool.position[table].flatten(1).tolist()
        held.append([sorted(row[:length]) for row, length in zip(position, lengths, strict=True)])
    assert all(row[-1] == num_tokens for layer in held for row in layer)
    return [[row[:-1] for row in layer] for layer in held]


@pytest.fixture(scope="module", params=ENGINES)
def kept(request: pytest.FixtureRequest) -> dict[Run, Positions]:
    return run_all(**ENGINES[request.param])


# -- how it compares --------------------------------------------------------------------------------------------------


def rows(ours: Positions, theirs: Positions) -> Iterator[tuple[set[int], set[int]]]:
    for our_layer, their_layer in zip(ours, theirs, strict=True):
        for our_row, their_row in zip(our_layer, their_layer, strict=True):
            yield set(our_row), set(their_row)


@pytest.mark.parametrize("run", ALIKE, ids=name)
def test_keeps_what_kvpress_keeps(run: Run, kept: dict[Run, Positions]) -> None:
    assert kept[run] == CASES[run[0]]["kept"]


@pytest.mark.parametrize("run", SPLIT_OTHERWISE, ids=name)
def test_where_only_the_split_differs_a_row_keeps_more_or_less_of_the_same(
    run: Run, kept: dict[Run, Positions]
) -> None:
    for ours, theirs in rows(kept[run], CASES[run[0]]["kept"]):
        assert ours <= theirs or theirs <= ours


@pytest.mark.parametrize("run", UNPROTECTED, ids=name)
def test_without_protection_tova_gives_up_the_last_token_alone(run: Run, kept: dict[Run, Positions]) -> None:
    last = len(PROMPTS[CASES[run[0]]["prompt"]]) - 1
    for ours, theirs in rows(kept[run], CASES[run[0]]["kept"]):
        assert len(ours) == len(theirs)
        assert theirs - ours <= {last}


def test_every_case_is_compared() -> None:
    assert {index for index, _ in ALIKE} == set(range(len(CASES)))


def table(kept: dict[Run, Positions]) -> list[str]:
    """The first columns of the page's table, a line for each press and policy.

    Press; policy; cases; those with all sets identical; rows with identical sets; KVs kept by kvpress that Winnow keeps
    too; the largest difference in length of a row.
    """
    groups: dict[tuple[str, str], list[tuple[Positions, Positions]]] = {}
    for (index, rule), ours in sorted(kept.items()):
        case = CASES[index]
        group = f"`{case['press']}`", label(policy_like(case, rule))
        groups.setdefault(group, []).append((ours, case["kept"]))
    return [f"| {' | '.join(group)} | {numbers(found)} |" for group, found in groups.items()]


def label(policy: EvictionPolicy) -> str:
    """Score, what splits the budget, and what may never go."""
    budget = policy.budget
    split = budget.layers if isinstance(budget, EqualHeads) and budget != EqualHeads() else budget
    floor = "(floor=0)" if budget == AdaptiveHeads(0.0) else ""
    keep = ", ".join(f"{field}={count}" for field, count in asdict(policy.keep).items() if count)
    return f"`{type(policy.score).__name__}`, `{type(split).__name__}{floor}`, `Keep({keep})`"


def numbers(found: list[tuple[Positions, Positions]]) -> str:
    pairs = [pair for ours, theirs in found for pair in rows(ours, theirs)]
    same = sum(ours == theirs for ours, theirs in found)
    same_rows = sum(ours == theirs for ours, theirs in pairs)
    common = sum(len(ours & theirs) for ours, theirs in pairs) / sum(len(theirs) for _, theirs in pairs)
    widest = max(abs(len(ours) - len(theirs)) for ours, theirs in pairs)
    return f"{len(found)} | {same} | {same_rows} of {len(pairs)} | {100 * common:.1f} % | {widest}"


def test_the_page_says_what_is_measured(kept: dict[Run, Positions]) -> None:
    page = PAGE.read_text().splitlines()
    assert [line for line in table(kept) if not any(found.startswith(line) for found in page)] == []


if __name__ == "__main__":
    sys.stdout.write("\n".join(table(run_all(**ENGINES["alone"]))) + "\n")
