"""Cells: what a task is run under, one square of its tables each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from winnow.errors import EvaluationError, known_names
from winnow.eviction import PRESETS, EvictionPolicy, concrete_preset, find_preset
from winnow.values.checks import check_choice
from winnow.values.eviction_request import OWN_AMOUNT, Amount
from winnow_lab.evaluate.variants import VARIANTS

FULL = "full"
AWARE, AGNOSTIC = "aware", "agnostic"
QUERIES = (AWARE, AGNOSTIC)


def amounts_of(compressions: Iterable[float] = (), kv_budgets: Iterable[int] = ()) -> tuple[Amount, ...]:
    return (*map(Amount, compressions), *(Amount(kv_budget=each) for each in kv_budgets))


@dataclass(frozen=True)
class Cell:
    """One preset at one amount, judging with the question or without it.

    Attributes:
        preset: a key of `winnow.eviction.PRESETS`, or the name of `own`.
        query: "aware": the policy judges the whole prompt, the question in it; "agnostic": it judges the context before
            the question is seen; None for the full cache, which knows no difference.
        own: policy behind a name that is no preset's.
    """

    preset: str
    amount: Amount
    query: str | None
    own: EvictionPolicy | None = None

    @property
    def is_full(self) -> bool:
        return self.preset == FULL

    @property
    def name(self) -> str:
        """The same in every run; tells cells of one evaluation apart."""
        return self.label if self.query is None else f"query-{self.query} {self.label}"

    @property
    def label(self) -> str:
        if self.is_full:
            return "full cache"
        return f"{self.preset} {self.amount.label}".rstrip()

    @property
    def asked(self) -> Amount:
        """The amount that a request asks for; none for the full cache."""
        return OWN_AMOUNT if self.is_full else self.amount

    @property
    def policy(self) -> EvictionPolicy:
        """The policy without rounds under pressure.

        Those depend on what else runs and on the KV memory, and would keep less than the cell's amount says.
        """
        if self.own is not None:
            return replace(self.own, when=self.own.when.alone)
        # What follows from the model, such as a pool as wide as some text, is the engine's to resolve.
        policy = find_preset(concrete_preset(self.preset, asked_later=self.query == AGNOSTIC)).policy
        return replace(policy, when=policy.when.alone)


FULL_CELL = Cell(FULL, Amount(1.0), None)


def plan_cells(
    presets: Sequence[str | EvictionPolicy],
    amounts: Iterable[Amount],
    queries: Sequence[str],
    controls: Sequence[str] = (),
) -> tuple[Cell, ...]:
    """The full cache, then in every query mode every preset at every amount but compression 1, and the
    controls beside them.

    A preset that decides itself how much it keeps gets one cell per query mode, and no controls. A policy that is no
    preset is called as its score's class is, with a number where there are several. Names of `VARIANTS` are presets.
    """
    own: dict[str, EvictionPolicy] = {}
    names = []
    for each in presets:
        name = each if isinstance(each, str) else type(each.score).__name__
        if isinstance(each, EvictionPolicy):
            name += f" {len(own) + 1}" * (name in own)
            own[name] = each
        names.append(name)
    own |= VARIANTS
    known = [*PRESETS, *own]
    for name in (*names, *controls):
        if name not in known:
            raise EvaluationError(f"no eviction preset {name!r}; {known_names(name, known)}")
    for query in queries:
        check_choice("query", query, QUERIES, EvaluationError)
    wanted = list(amounts)
    chosen = [(preset, amount) for preset in names for amount in _amounts(preset, wanted, own)]
    used = [amount for _, amount in chosen if amount != OWN_AMOUNT]
    chosen += [(preset, amount) for preset in controls for amount in _amounts(preset, used, own)]
    cells = (Cell(preset, amount, query, own.get(preset)) for query in queries for preset, amount in chosen)
    return (FULL_CELL, *dict.fromkeys(cells))


def engine_needs(cells: Iterable[Cell]) -> dict[str, Any]:
    policies = [cell.policy for cell in cells]
    return {
        "num_accumulators": max((policy.score.num_accumulators for policy in policies), default=0),
        "kv_bias": any(policy.compact is not None for policy in policies),
    }


def _amounts(preset: str, amounts: Sequence[Amount], own: Mapping[str, EvictionPolicy]) -> list[Amount]:
    if preset == FULL:
        return []
    policy = own.get(preset) or PRESETS[preset].policy
    if policy.budget.fixed is not None:
        return [OWN_AMOUNT]
    return sorted(set(amounts) - {FULL_CELL.amount}, key=lambda amount: amount.order)
