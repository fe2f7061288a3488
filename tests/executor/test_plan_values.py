"""A plan is a value: an executor elsewhere, which gets it as JSON, computes the same step."""

import ast
import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llama import VOCAB

import winnow.engine
from winnow import LLM, SamplingParams
from winnow.attention import open_backend
from winnow.cache import BlockCopies, CacheUpdate
from winnow.cache.update import CopyDiscarded, RowLengths, RowsRestored, RowsSaved
from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.plan import NewSequence, PlannedEviction, PlannedSequence, StepPlan
from winnow.eviction import EvictionPolicy, ReplayPass, SequenceEviction
from winnow.executor.torch_executor import TorchExecutor

VALUES = {
    cls.__name__: cls
    for cls in (
        BlockCopies,
        CacheUpdate,
        CopyDiscarded,
        NewSequence,
        PlannedEviction,
        PlannedSequence,
        ReplayPass,
        RowLengths,
        RowsRestored,
        RowsSaved,
        SamplingParams,
        SequenceEviction,
        StepPlan,
    )
}


class Wire:
    """Values as JSON and back. Policies are configuration, which both ends know: they go by number."""

    def __init__(self) -> None:
        self.policies: list[EvictionPolicy] = []

    def send(self, value: Any) -> Any:
        return self._decode(json.loads(json.dumps(self._encode(value))))

    def _encode(self, value: Any) -> Any:
        if isinstance(value, EvictionPolicy):
            if value not in self.policies:
                self.policies.append(value)
            return {"policy": self.policies.index(value)}
        if dataclasses.is_dataclass(value):
            fields = {
                field.name: self._encode(getattr(value, field.name))
                for field in dataclasses.fields(value)
                if field.init
            }
            return {"class": type(value).__name__, "fields": fields}
        if isinstance(value, np.ndarray):
            return {"array": value.tolist(), "dtype": value.dtype.name, "shape": value.shape}
        if isinstance(value, tuple):
            return {"tuple": [self._encode(each) for each in value]}
        if isinstance(value, list):
            return [self._encode(each) for each in value]
        assert value is None or type(value) in (int, float, str, bool), f"{value!r} is no plain value"
        return value

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "policy" in value:
            return self.policies[value["policy"]]
        if "array" in value:
            return np.array(value["array"], dtype=value["dtype"]).reshape(value["shape"])
        if "tuple" in value:
            return tuple(self._decode(each) for each in value["tuple"])
        fields = {name: self._decode(each) for name, each in value["fields"].items()}
        return VALUES[value["class"]](**fields)


class Mirrored:
    """An executor, and a second one over memory of its own that follows it by JSON alone."""

    def __init__(self, first: TorchExecutor, second: TorchExecutor) -> None:
        self.first, self.second, self.wire = first, second, Wire()
        self.num_steps = self.num_rounds = self.num_copied = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first, name)

    def prepare(self, policy: EvictionPolicy) -> None:
        self.first.prepare(policy)
        self.second.prepare(policy)

    def fork(self, slot: int, child: NewSequence) -> None:
        self.first.fork(slot, child)
        self.second.fork(slot, self.wire.send(child))

    def apply(self, update: CacheUpdate) -> None:
        self.num_copied += len(update.copies)
        self.first.apply(update)
        self.second.apply(self.wire.send(update))

    def submit(self, plan: StepPlan) -> Any:
        self.num_steps += 1
        self.num_copied += len(plan.update.copies)
        return self.first.submit(plan), self.second.submit(self.wire.send(plan))

    def collect(self, handles: Any) -> Any:
        result, again = self.first.collect(handles[0]), self.second.collect(handles[1])
        assert again == result
        return result

    def plan_evictions(self, planned: list[PlannedEviction]) -> Any:
        self.num_rounds += 1
        copy = self.wire.send(planned)
        lengths = self.first.plan_evictions(planned)
        assert np.array_equal(self.second.plan_evictions(copy), lengths)
        return lengths

    def compact(self) -> None:
        self.first.compact()
        self.second.compact()

    def check_integrity(self, ledger: Any) -> None:
        self.first.check_integrity(ledger)
        self.second.check_integrity(ledger)


@pytest.mark.parametrize("name", ["full", "snapkv", "kv-compress", "kvzip"])
def test_an_executor_elsewhere_computes_the_same(directory: Path, name: str) -> None:
    """With preemption, samples that share blocks, penalties and logprobs."""
    rng = random.Random(name)
    options: dict[str, Any] = {
        "kv_memory": 600_000,
        "max_num_seqs": 16,
        "prefill_chunk": 48,
        "num_accumulators": 2,
        "kv_floor": 1,
        "kv_offloading_size": "1MiB",
    }
    with LLM(directory, **options) as llm:
        engine: Any = llm._engine
        backend = open_backend("auto", engine._executor._model.device)
        mirrored = Mirrored(
            engine._executor,
            TorchExecutor(
                engine._executor._model, llm.config, backend, engine._executor.layout, engine._executor.size
            ),
        )
        engine._executor = engine.scheduler.memory._executor = engine.scheduler.rounds._executor = mirrored
        preemption = engine.scheduler.memory.swap
        preemption._executor, preemption.costs = mirrored, SwapCosts(1e-15, 1.0)
        for index in range(8):
            length = rng.randint(90, 140)
            amount = {} if name == "full" else {"compression": rng.choice([2.0, 2.5])}
            params = SamplingParams(
                n=3 if index % 3 == 0 else 1,
                temperature=rng.choice([0.0, 1.0]),
                seed=index,
                max_tokens=rng.randint(1, 40),
                ignore_eos=True,
                repetition_penalty=1.1,
                logprobs=2,
                prompt_logprobs=rng.choice([None, 1]),
                eviction=name,
                **amount,
            )
            llm.submit([rng.randint(3, VOCAB - 1) for _ in range(length)], params)
        while llm.has_unfinished:
            llm.step()
            llm.check_integrity()
            if mirrored.num_steps % 9 == 0 and engine.scheduler.running:
                # By a copy in host memory as a rule, else by computing again.
                engine.scheduler.ledger.host.limit = rng.choice([0, 2**20, 2**20])
                engine.scheduler.running.preempt(rng.choice(engine.scheduler.running))
                engine.scheduler.ledger.host.limit = 2**20
        assert mirrored.num_steps > 20
        assert mirrored.num_copied > 0
        assert llm.stats().num_swaps > 0 and llm.stats().swap_bytes_in > 0
        assert (mirrored.num_rounds > 0) == (name != "full")


ENGINE = Path(winnow.engine.__file__).parent
LEDGER = [*sorted((ENGINE.parent / "cache/accounting").glob("*.py")), ENGINE.parent / "cache/update.py"]


def _imported(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but for what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _imported(node)


@pytest.mark.parametrize("path", [*sorted(ENGINE.rglob("*.py")), *LEDGER], ids=lambda path: path.stem)
def test_what_plans_imports_no_model_and_no_kernel(path: Path) -> None:
    walls = [
        "torch",
        "transformers",
        "winnow.models",
        "winnow.executor",
        "winnow.process.native",
        "winnow._native",
    ]
    if path in LEDGER:
        walls += ["winnow.attention", "winnow.eviction", "winnow.engine", "winnow.sampling"]
    for node in _imported(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            assert not any(name == wall or name.startswith(f"{wall}.") for wall in walls), f"imports {name}"


def test_nor_does_what_it_imports() -> None:
    walls = {
        "winnow.cache.accounting.ledger": ("torch", "transformers", "winnow.attention", "winnow._native"),
        # Policies and parameters, which plans name, know of the CPU kernels; attention and models stay out.
        "winnow.engine.engine": (
            *("transformers", "winnow.models", "winnow.executor", "winnow.attention.native"),
        ),
    }
    code = "import sys\n" + "".join(
        f"import {module}; print([m for m in sys.modules if m.startswith({names!r})])\n"
        for module, names in walls.items()
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["[]", "[]"]
