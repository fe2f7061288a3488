"""A closed `LLM` leaves no model behind."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
gc.disable()
from winnow import LLM, SamplingParams

llm = LLM(kv_memory="8MiB", eviction={eviction!r}, engine={engine!r})
llm.generate(["some words"], SamplingParams(max_tokens=2))
alive = [weakref.ref(each) for each in gc.get_objects() if type(each).__name__ in {kinds!r}]
assert len(alive) >= 2, alive
llm.close()
print([ref() for ref in alive if ref() is not None])
"""


def left_alive(eviction: str | None, engine: str, kinds: set[str]) -> str:
    # In a process of its own, where loading imports transformers: its frames are part of what could keep a model.
    program = PROGRAM.format(eviction=eviction, engine=engine, kinds=kinds)
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_model_and_cache_are_freed_without_the_garbage_collector() -> None:
    assert left_alive("snapkv", "paged", {"LlamaForCausalLM", "PagedCache", "KVPool"}) == "[]"


def test_and_those_of_the_padded_engine() -> None:
    assert left_alive(None, "padded", {"LlamaForCausalLM", "PaddedEngine"}) == "[]"
