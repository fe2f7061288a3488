"""The experiment, stage by stage: memory, accuracy, speed."""

import time
from functools import partial
from typing import Any

from winnow.errors import ConfigError
from winnow.llm import LLM
from winnow_lab.papers.batch_max.measure import (
    WAVE,
    Accuracy,
    Room,
    Run,
    largest_that_holds,
    measure_accuracy,
    run_requests,
)
from winnow_lab.papers.batch_max.methods import (
    CONTROL_RULE,
    EXTREME_DECODES,
    FULL_CACHE,
    BenchTask,
    Method,
    Options,
    batch_max,
    longest_prompts,
    make_tasks,
    mixed_prompts,
)
from winnow_lab.papers.batch_max.results import BatchMaxReport, Speed, TaskResult, Trial, distinct
from winnow_lab.study.journal import CellJournal

_MOST_SEQS = 64
_WARM_UP = 8


class BatchMaxBench:
    """Runs the protocol of section 4.1 once.

    A batch is static, as in the paper: its prompts are submitted together, take every step together, and the next batch
    begins when the last answer has ended. One engine with one pool serves every method. Its steps take all tokens that
    a batch brings, so ED and the full cache compute whole prompts in one step, and Batch-Max |kv| tokens of each in the
    first and 64 of each in those that follow.

    Args:
        journal: of what tasks came to, by name.
    """

    def __init__(
        self,
        config: Options,
        journal: CellJournal,
    ) -> None:
        self._config = config
        self._journal = journal
        self._seconds: dict[str, float] = {}
        self._most_kvs: dict[int, int | None] = {}
        # By rule: what held on the task before, where the search of the next one begins.
        self._guesses: dict[str, int] = {}

    def run(self) -> BatchMaxReport:
        """Do it all.

        Raises:
            ConfigError: the KV memory does not hold a single prompt, or the model's context no prompt and answer.
        """
        started = time.perf_counter()
        with self._open_static() as llm:
            self._check_context(llm.max_model_len)
            tasks = make_tasks(self._config, llm)
            room = Room(llm, longest_prompts(tasks), self._config.new_tokens)
            out_of_memory = room.first_batch_out_of_memory()
            batch = max(size for size in self._config.batch_sizes if size < out_of_memory)
            self._note("loading and memory", started)
            results = self._accuracy(tasks, room, batch)
            speeds = self._speeds(llm, tasks, batch, results)
            budget = llm.stats().kv_bytes_budget
        continuous = self._continuous(tasks, results)
        return BatchMaxReport(
            self._config,
            out_of_memory,
            results,
            speeds,
            continuous,
            kv_bytes_budget=budget,
            seconds=self._seconds,
        )

    def _check_context(self, most: int) -> None:
        prompt, new = self._config.prompt_tokens, self._config.new_tokens
        if prompt + new > most:
            raise ConfigError(
                f"prompt_tokens + new_tokens must be at most the model's {most}, got {prompt + new}"
            )

    # -- engines -------------------------------------------------------------------------------------------------

    def _open_static(self) -> LLM:
        longest = self._config.prompt_tokens + self._config.new_tokens
        return self._open(
            max_num_seqs=_MOST_SEQS, max_num_batched_tokens=_MOST_SEQS * longest, prefill_chunk=None
        )

    def _open(self, **options: Any) -> LLM:
        common: dict[str, Any] = {
            "kv_memory": self._config.kv_memory,
            "dtype": self._config.dtype,
            "kv_floor": 1,
            "enable_prefix_caching": False,  # the paper has none
        }
        return LLM(self._config.model, **common | options)

    # -- accuracy ------------------------------------------------------------------------------------------------

    def _accuracy(self, tasks: tuple[BenchTask, ...], room: Room, batch: int) -> tuple[TaskResult, ...]:
        results = []
        with self._open(kv_memory=2**30, max_num_seqs=WAVE) as llm:
            for task in tasks:
                if task.name not in self._journal.rows:
                    self._journal.add(task.name, self._judge(llm, task, room, batch).to_json())
                results.append(TaskResult.from_json(self._journal.rows[task.name][0]))
        self._seconds["accuracy"] = sum(result.seconds for result in results)
        return tuple(results)

    def _judge(self, llm: LLM, task: BenchTask, room: Room, batch: int) -> TaskResult:
        started = time.perf_counter()
        full = self._measure(llm, task, FULL_CACHE, bar=0.0)
        bar = (1 - self._config.within / 100) * full.mean
        trials: list[Trial] = []
        controls: dict[int, Accuracy] = {}
        larger = [size for size in self._config.batch_sizes if batch < size <= _MOST_SEQS]
        fitting = [size for size in larger if self._kvs(room, size) is not None]
        for rule in self._config.rules:
            tried: dict[int, Accuracy] = {}

            def reaches(
                least: float, size: int, rule: str = rule, tried: dict[int, Accuracy] = tried
            ) -> bool:
                kvs = self._kvs(room, size)
                assert kvs is not None, "asked of fitting sizes only"
                if size not in tried:
                    method = batch_max(rule, kvs)
                    tried[size] = self._measure(llm, task, method, bar)
                    held = tried[size].complete and tried[size].mean >= bar
                    trials.append(Trial(rule, method, size, tried[size], held))
                return tried[size].complete and tried[size].mean >= least

            size = largest_that_holds(fitting, partial(reaches, bar), self._guesses.get(rule))
            if fitting:
                self._guesses[rule] = fitting[0] if size is None else size
            within = [each for each in fitting if size is not None and each <= size]
            for best in (size, largest_that_holds(within, partial(reaches, full.mean), size)):
                kvs = None if best is None else self._kvs(room, best)
                if kvs is not None and kvs not in controls:
                    controls[kvs] = self._measure(llm, task, batch_max(CONTROL_RULE, kvs), bar)
        extreme = tuple(self._measure(llm, task, method, 0.0) for method in EXTREME_DECODES)
        seconds = time.perf_counter() - started
        return TaskResult(
            task.name, task.metric, task.longest, full, tuple(trials), controls, bar, seconds, extreme
        )

    def _kvs(self, room: Room, size: int) -> int | None:
        if size not in self._most_kvs:
            self._most_kvs[size] = room.most_kvs(size)
        return self._most_kvs[size]

    def _measure(self, llm: LLM, task: BenchTask, method: Method, bar: float) -> Accuracy:
        found = measure_accuracy(llm, task.asks, method, bar)
        print(f"accuracy: {task.name}, {method.label}: {found.mean:.3f}", flush=True)
        return found

    # -- speed ---------------------------------------------------------------------------------------------------

    def _speeds(
        self, llm: LLM, tasks: tuple[BenchTask, ...], batch: int, results: tuple[TaskResult, ...]
    ) -> tuple[Speed, ...]:
        rows = [(method, batch) for method in (*EXTREME_DECODES, FULL_CACHE)]
        rows += [(trial.method, trial.batch) for trial in distinct(self._found(results))]
        return self._interleave(llm, tasks, rows, "speed")

    def _found(self, results: tuple[TaskResult, ...]) -> list[Trial]:
        """What held on some task, the smallest batches first."""
        best = [
            task.best(rule, least)
            for rule in self._config.rules
            for task in results
            for least in (task.bar, task.full.mean)
        ]
        return sorted(
            (trial for trial in best if trial is not None), key=lambda trial: (trial.rule, trial.batch)
        )

    def _continuous(self, tasks: tuple[BenchTask, ...], results: tuple[TaskResult, ...]) -> tuple[Speed, ...]:
        """The same memory under Winnow's own scheduler: ED, and the largest batch of each rule."""
        number = self._config.requests
        rows = [(EXTREME_DECODES[-1], number)]
        for rule in self._config.rules:
            methods = [trial.method for trial in self._found(results) if trial.rule == rule]
            rows += [(method, number) for method in methods[-1:]]
        with self._open() as llm:
            return self._interleave(llm, tasks, rows, "speed, Winnow's own scheduler")

    def _interleave(
        self, llm: LLM, tasks: tuple[BenchTask, ...], rows: list[tuple[Method, int]], stage: str
    ) -> tuple[Speed, ...]:
        started = time.perf_counter()
        prompts = mixed_prompts(tasks)
        run_requests(llm, prompts[:1], FULL_CACHE, _WARM_UP)
        runs: list[list[Run]] = [[] for _ in rows]
        for _ in range(self._config.repeats):
            for (method, batch), done in zip(rows, runs, strict=True):
                some = [prompts[number % len(prompts)] for number in range(batch)]
                done.append(run_requests(llm, some, method, self._config.new_tokens))
                print(f"{stage}: {method.label}, batch {batch}: {done[-1].rate:.1f} tokens/s", flush=True)
        self._note(stage, started)
        return tuple(
            Speed(method, batch, tuple(done)) for (method, batch), done in zip(rows, runs, strict=True)
        )

    def _note(self, stage: str, started: float) -> None:
        self._seconds[stage] = time.perf_counter() - started
