"""One LLM for several threads, several LLMs for several threads, and processes that fork."""

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import VOCAB

from winnow import LLM, RequestOutput, SamplingParams
from winnow.errors import ClosedError, ForkedError, InvalidRequestError, ReentryError
from winnow.eviction import PRESETS
from winnow.process import fork as process_fork
from winnow.process.fork import require_usable_torch

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
NUM_THREADS = 8


def prompt(seed: int, length: int = 40) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


@pytest.fixture(scope="module")
def llm(engine_name: str, directory: Path) -> Iterator[LLM]:
    with LLM(directory, kv_memory="4MiB", engine=engine_name) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The answer to the prompt of each thread, computed alone."""
    return [tokens(llm.generate(prompt(seed), GREEDY))[0] for seed in range(NUM_THREADS)]


class TestOneEngine:
    def test_generate_from_many_threads(self, llm: LLM, expected: list[list[int]]) -> None:
        def work(seed: int) -> None:
            for _ in range(3):
                assert tokens(llm.generate([prompt(seed), prompt(seed)], GREEDY)) == [expected[seed]] * 2

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(work, range(NUM_THREADS)))
        assert not llm.has_unfinished
        llm.check_integrity()

    def test_they_are_batched(self, llm: LLM, expected: list[list[int]]) -> None:
        """Requests of threads that come at the same time share steps."""
        before = llm.stats().num_steps
        start = threading.Barrier(NUM_THREADS)

        def work(seed: int) -> list[RequestOutput]:
            start.wait()
            return llm.generate(prompt(seed), GREEDY)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            outputs = [each for found in pool.map(work, range(NUM_THREADS)) for each in found]
        assert tokens(outputs) == expected
        alone = NUM_THREADS * GREEDY.max_tokens
        assert llm.stats().num_steps - before < alone / 2

    def test_all_other_calls_beside_generate(self, llm: LLM, expected: list[list[int]]) -> None:
        ended = threading.Event()

        def generate(seed: int) -> None:
            for _ in range(4):
                assert tokens(llm.generate(prompt(seed), GREEDY)) == [expected[seed]]

        def stream(seed: int) -> None:
            for _ in range(4):
                outputs = list(llm.stream(prompt(seed), GREEDY))
                assert [len(each.outputs[0].token_ids) for each in outputs] == [*range(1, 25)]
                assert outputs[-1].outputs[0].token_ids == expected[seed]

        def leave(seed: int) -> None:
            for _ in range(8):
                next(llm.stream(prompt(seed), GREEDY))

        def abort(seed: int) -> None:
            for _ in range(8):
                output = llm.abort(llm.submit(prompt(seed), GREEDY))
                assert output is not None
                assert output.outputs[0].finish_reason == "abort"

        def watch() -> None:
            while not ended.is_set():
                assert llm.stats().num_running <= 64
                llm.check_integrity()

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            watcher = pool.submit(watch)
            work = [pool.submit(each, seed) for seed, each in enumerate([generate, generate, stream, stream])]
            work += [pool.submit(each, 4 + seed) for seed, each in enumerate([leave, abort])]
            for each in work:
                each.result()
            ended.set()
            watcher.result()
        llm.step()
        assert not llm.has_unfinished
        llm.check_integrity()

    def test_submit_and_step_lose_and_double_nothing(self, llm: LLM, expected: list[list[int]]) -> None:
        def work(seed: int) -> tuple[str, list[RequestOutput]]:
            request_id = llm.submit(prompt(seed), GREEDY, final_only=True)
            found = []
            while llm.has_unfinished:
                found += llm.step()
            return request_id, found + llm.step()

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            results = list(pool.map(work, range(NUM_THREADS)))
        outputs = [output for _, found in results for output in found]
        assert len(outputs) == NUM_THREADS
        by_id = {output.request_id: output for output in outputs}
        assert tokens([by_id[request_id] for request_id, _ in results]) == expected

    def test_asyncio(self, llm: LLM, expected: list[list[int]]) -> None:
        async def answer_all() -> list[list[RequestOutput]]:
            calls = [asyncio.to_thread(llm.generate, prompt(seed), GREEDY) for seed in range(NUM_THREADS)]
            return await asyncio.gather(*calls)

        assert [tokens(each)[0] for each in asyncio.run(answer_all())] == expected

    def test_one_threads_bad_prompt_is_its_own(self, llm: LLM, expected: list[list[int]]) -> None:
        def bad() -> None:
            for _ in range(50):
                with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: prompt token ids"):
                    llm.generate([prompt(0), [VOCAB]], GREEDY)

        with ThreadPoolExecutor(2) as pool:
            failing = pool.submit(bad)
            while not failing.done():
                assert tokens(llm.generate(prompt(1), GREEDY)) == [expected[1]]
            failing.result()
        assert not llm.has_unfinished

    def test_who_comes_later_is_served_and_a_waiting_thread_is_told_of_an_abort(self, llm: LLM) -> None:
        """A thread that steps on and on lets others in between two steps."""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(
                lambda: list(
                    llm.stream(prompt(1), SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
                )
            )
            wait_until(lambda: llm.stats().num_running == 1)
            llm.generate(prompt(2), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            assert not waiting.done()
            [request_id] = list(llm._engine.requests)
            output = llm.abort(request_id)
            assert output is not None
            last = waiting.result(timeout=60)[-1]
            assert last.finished
            assert last.outputs[0].finish_reason == "abort"


class TestFailures:
    def test_a_step_that_asks_for_another_is_refused(
        self, llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would wait for itself."""
        calls = [lambda: llm.generate(prompt(1), GREEDY), lambda: llm.stats(), lambda: llm.step()]
        for call in calls:
            with monkeypatch.context() as patch:
                patch.setattr(llm._engine, "step", call)
                with pytest.raises(ReentryError, match="in the middle of a step of the same thread"):
                    llm.generate(prompt(0), GREEDY)
        assert tokens(llm.generate(prompt(0), GREEDY)) == [expected[0]]
        assert not llm.has_unfinished

    def test_a_failing_step_fails_one_thread_and_the_others_go_on(
        self, llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, failures = llm._engine.step, iter([7, 9])
        calls, failing = 0, next(failures)

        def fails() -> list[RequestOutput]:
            nonlocal calls, failing
            calls += 1
            if calls == failing:
                failing = next(failures, -1)
                raise MemoryError("no luck")
            return step()

        monkeypatch.setattr(llm._engine, "step", fails)
        start = threading.Barrier(NUM_THREADS)

        def work(seed: int) -> list[list[int]] | None:
            start.wait()
            try:
                return tokens(llm.generate(prompt(seed), GREEDY))
            except MemoryError:
                return None

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            found = list(pool.map(work, range(NUM_THREADS)))
        assert found.count(None) == 2
        assert all(each is None or each == [expected[seed]] for seed, each in enumerate(found))
        assert not llm.has_unfinished
        llm.check_integrity()

    @pytest.mark.slow
    def test_interrupts_of_the_main_thread(self, llm: LLM, expected: list[list[int]]) -> None:
        """Ctrl-C at any moment, while another thread waits for its own: nothing of that is lost."""
        rng = random.Random(0)
        ended = threading.Event()
        interrupts, armed = 0, False

        def receive(*_: object) -> None:
            """As Python's own handler, but only within the call: the test itself is not torn."""
            nonlocal interrupts, armed
            if armed:
                interrupts, armed = interrupts + 1, False
                raise KeyboardInterrupt

        def work(seed: int) -> int:
            rounds = 0
            while not ended.is_set():
                assert tokens(llm.generate(prompt(seed), GREEDY)) == [expected[seed]]
                rounds += 1
            return rounds

        def interrupt() -> None:
            for _ in range(20):
                time.sleep(rng.uniform(0.002, 0.04))
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            ended.set()

        before = signal.signal(signal.SIGINT, receive)
        try:
            with ThreadPoolExecutor(3) as pool:
                workers = [pool.submit(work, seed) for seed in (1, 2)]
                interrupter = pool.submit(interrupt)
                while not ended.is_set():
                    with contextlib.suppress(KeyboardInterrupt):
                        armed = True
                        llm.generate(prompt(0), GREEDY)
                        armed = False
                interrupter.result()
                assert all(worker.result(timeout=60) for worker in workers)
        finally:
            signal.signal(signal.SIGINT, before)
        assert interrupts > 7
        assert tokens(llm.generate(prompt(0), GREEDY)) == [expected[0]]
        assert not llm.has_unfinished
        llm.check_integrity()


class TestClose:
    @pytest.fixture
    def own(self, directory: Path) -> LLM:
        return LLM(directory, kv_memory="4MiB")

    def test_every_method_says_so(self, own: LLM) -> None:
        stream = own.stream(prompt(1), GREEDY)
        next(stream)
        own.close()
        own.close()
        calls: list[Callable[[], Any]] = [
            lambda: own.generate([], GREEDY),
            lambda: own.generate(prompt(1), GREEDY),
            lambda: own.generate("text", GREEDY),
            lambda: own.chat([{"role": "user", "content": "x"}]),
            lambda: own.stream(prompt(1)),
            lambda: own.stream_chat([{"role": "user", "content": "x"}]),
            lambda: own.inspect(prompt(1)),
            lambda: own.submit(prompt(1)),
            lambda: own.submit_chat([{"role": "user", "content": "x"}]),
            lambda: own.step(),
            lambda: own.abort("request-0"),
            lambda: own.has_unfinished,
            lambda: own.stats(),
            lambda: own.kv_bytes(1),
            lambda: own.check_integrity(),
            lambda: next(stream),
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="this LLM is closed"):
                call()

    def test_threads_that_wait_are_told(self, own: LLM) -> None:
        long = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(own.generate, prompt(seed), long) for seed in range(3)]
            waiting.append(pool.submit(lambda: list(own.stream(prompt(3), long))))
            wait_until(lambda: own.stats().num_running == 4)
            own.close()
            for each in waiting:
                assert isinstance(each.exception(timeout=60), ClosedError)


class TestSeveralEngines:
    def test_two_llms_in_two_threads(self, engine_name: str, directory: Path) -> None:
        """Loaded and used at the same time, in two number formats."""

        def work(dtype: str) -> list[list[int]]:
            with LLM(directory, kv_memory="4MiB", engine=engine_name, dtype=dtype) as llm:
                return tokens(llm.generate([prompt(seed) for seed in range(6)], GREEDY))

        expected = {dtype: work(dtype) for dtype in ("float32", "bfloat16")}
        with ThreadPoolExecutor(2) as pool:
            assert dict(zip(expected, pool.map(work, expected), strict=True)) == expected
        assert torch.get_default_dtype() == torch.float32

    def test_torchs_default_dtype_changes_no_answer(self, engine_name: str, directory: Path) -> None:
        """Loading a model changes it for a while, in all threads."""
        sampled = SamplingParams(temperature=0.8, seed=1, top_p=0.9, top_k=20, min_p=0.01, logprobs=2)
        params, options = [GREEDY, sampled], {}
        if engine_name == "paged":
            names = [name for name, preset in PRESETS.items() if preset.policy.compact is None]
            params += [SamplingParams(temperature=0.0, max_tokens=24, eviction=name) for name in names]
            options = {"num_accumulators": 2, "kv_floor": 100}
        prompts = [prompt(seed, 200) for seed in range(len(params))]
        with LLM(directory, kv_memory="32MiB", engine=engine_name, **options) as llm:
            expected = tokens(llm.generate(prompts, params))
            torch.set_default_dtype(torch.bfloat16)
            try:
                assert tokens(llm.generate(prompts, params)) == expected
            finally:
                torch.set_default_dtype(torch.float32)


def _use_inherited(llm: LLM, results: Any) -> None:
    errors = []
    for call in (lambda: llm.generate(prompt(1), GREEDY), lambda: llm.stats(), lambda: llm.submit(prompt(1))):
        try:
            call()
        except ForkedError as error:
            errors.append(str(error))
    llm.close()
    results.put(errors)


def _use_own(directory: Path, results: Any) -> None:
    with LLM(directory, kv_memory="4MiB") as llm:
        results.put(tokens(llm.generate([prompt(seed, 400) for seed in range(4)], GREEDY)))


def _in_child(target: Callable[..., None], *arguments: Any) -> Any:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=target, args=(*arguments, results))
    process.start()
    try:
        return results.get(timeout=120)
    finally:
        process.kill()
        process.join()


def test_what_a_fork_leaves_unusable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        require_usable_torch("cpu")
        with pytest.raises(ForkedError, match=r"device=auto .* begun to use CUDA.* spawn"):
            require_usable_torch("auto")
    monkeypatch.setattr(process_fork, "_PAUSE", None)
    require_usable_torch("cpu")
    monkeypatch.setattr(process_fork, "_IMPORTED_BY", os.getpid() + 1)
    with pytest.raises(ForkedError, match=r"cannot be created in a forked process here: .* spawn"):
        require_usable_torch("cpu")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs Linux")
class TestFork:
    def test_the_childs_copy_says_what_to_do(self, llm: LLM) -> None:
        """Also of an LLM that another thread of the parent is using: its locks may be held."""
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                llm.generate(prompt(1), GREEDY)

        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(work)
            try:
                errors = _in_child(_use_inherited, llm)
            finally:
                ended.set()
            busy.result()
        assert len(errors) == 3
        assert all(f"belongs to process {os.getpid()}" in error and "spawn" in error for error in errors)
        assert tokens(llm.generate(prompt(1), GREEDY)), "the parent continues"

    def test_a_child_opens_its_own(self, directory: Path) -> None:
        """After the parent has computed with several threads of OpenMP, which the child does not have."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            torch.ones(2_000_000).exp().sum()
            with LLM(directory, kv_memory="4MiB") as llm:
                prompts = [prompt(seed, 400) for seed in range(4)]
                expected = tokens(llm.generate(prompts, GREEDY))
                assert _in_child(_use_own, directory) == expected
                assert tokens(llm.generate(prompts, GREEDY)) == expected, "the parent continues"
        finally:
            torch.set_num_threads(num_threads)
