"""A closed `LLM` leaves no model behind."""

import contextlib
import multiprocessing
import warnings
from pathlib import Path

import pytest

PROGRAM = """
import gc, weakref
gc.disable()
from winnow import LLM, SamplingParams

llm = LLM(directory, kv_memory="8MiB", eviction="snapkv")
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
kinds = {"LlamaForCausalLM", "PagedCache", "KVPool"}
alive = [weakref.ref(each) for each in gc.get_objects() if type(each).__name__ in kinds]
assert len(alive) >= 2, alive
llm.close()
print([ref() for ref in alive if ref() is not None])
"""


GRAPHS = """
from winnow.attention import ReferenceBackend
from winnow.executor import torch_executor
from winnow.executor.step_graphs import StepGraphs

# On a CPU a step "captured" is computed again.
torch_executor.graph_capture = lambda device: lambda compute: compute
ReferenceBackend.capturable = lambda self, spans, heads: True
class Recorded(StepGraphs):
    def run(self, tokens, spans, wanted):
        try:
            return super().run(tokens, spans, wanted)
        finally:
            ran.append(len(self._graphs))
torch_executor.StepGraphs = Recorded

ran, alive = [], []
for _ in range(2):
    llm = LLM(directory, kv_memory="8MiB", attention_backend="reference", verify_model=False)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True))
    executor = llm._engine._executor
    alive += map(weakref.ref, (executor, executor.cache, executor._graphs, executor._model.model))
    del executor
    llm.close()
    del llm
    assert ran and ran[-1] == 1, ran
    assert not [ref() for ref in alive if ref() is not None], alive
print("freed")
"""


def run(directory: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    with out.open("w") as file, contextlib.redirect_stdout(file):
        exec(PROGRAM + GRAPHS, {"directory": directory})  # noqa: S102 (the texts above)


@pytest.fixture(scope="module")
def printed(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    # In a process of its own, where loading imports transformers: its frames are part of what could keep a model. It is
    # spawned, as errors of a forked process advise, so that this also shows that such a process can open an LLM.
    out = tmp_path_factory.mktemp("close") / "out"
    process = multiprocessing.get_context("spawn").Process(target=run, args=(directory, out))
    process.start()
    process.join()
    assert process.exitcode == 0
    return out.read_text().splitlines()


def test_models_and_caches_are_freed_without_the_garbage_collector(printed: list[str]) -> None:
    assert printed[:1] == ["[]"]


def test_engines_of_a_process_hold_no_more_than_one(printed: list[str]) -> None:
    """Graphs included: what captures them must not hold what holds them."""
    assert printed[1:] == ["freed"]
