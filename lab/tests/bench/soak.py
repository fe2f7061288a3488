"""Many requests through a cache that is far too small for them, and each of them held to what it is owed.

    python lab/tests/bench/soak.py --requests 5000 --tenants --scheduling-policy fair --fail-steps 0.01

Prompts begin alike, arrive with random priorities under several policies, some ask for more than one sample,
some are forked in the middle of their answers, some are aborted. Every request must end exactly once;
answers that ended by themselves must be those of the same request alone in an engine with room for everything (float32,
greedy), a fork's those of the request that it came from; the engine's invariants are asserted after steps; at the end
no block and no byte of host memory may be held, also on no tenant's account. The model is a tiny Llama of random
weights.

With `--disk`, prefixes go to a folder that is too small for them, too: `--follow` of the requests are the next turn of
a conversation, in `--idle` of the steps all requests end and memory forgets what it knew, as after a restart, before
`--damage` of the steps a file is damaged, and `--processes` share the folder. At the end nothing may wait to be
written, and the folder may hold no more than its limit.

An answer that differs where the two best tokens of the unloaded run are closer than `--tie` in logprob is counted as a
tie, not as a fault: sums in float32 depend on who shares the batch.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from soak_load import (
    LONGEST,
    TENANTS,
    DamagedFiles,
    Failures,
    InjectedError,
    SoakRequest,
    drawn_lengths,
    fitted,
    requests,
)

from winnow import LLM, RequestOutput
from winnow.config import SCHEDULING_POLICIES
from winnow.errors import InvalidRequestError
from winnow.eviction.presets import find_preset
from winnow_lab.bench.traces import read_trace
from winnow_lab.memory.reservation import tiny_llama
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study


@dataclass
class Tally:
    """Counts of requests, forks included, by outcome. `faults` describes each violation."""

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    forked: int = 0
    compared: int = 0
    compared_forks: int = 0
    ties: int = 0
    failed_steps: int = 0
    followed: int = 0
    idles: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Options(StudyOptions):
    requests: int = flag(5000, least=1)
    trace: Path | None = flag(None, "lengths of requests (default: random lengths)")
    kv_seqs: int = flag(4, "KV memory, in requests of 256 tokens", least=1)
    host_seqs: int = flag(4, "such requests that fit into host memory", least=0)
    in_flight: int = flag(48, "unfinished requests at a time; forks come on top", least=1)
    compare: float = flag(1.0, "share of answers that are compared with the unloaded engine's")
    check_every: int = flag(1, "steps between assertions of invariants", least=1)
    tie: float = flag(1e-3, "difference of logprobs below which two tokens are as good as each other")
    preempt: float = flag(0.1, "share of steps before which one gives way")
    tenants: bool = flag(False, "requests run on accounts with shares and limits")
    scheduling_policy: str = flag("priority", choices=SCHEDULING_POLICIES)
    kv_cache_dtype: str = flag("auto", "format of stored KVs in both engines")
    fail_copies: float = flag(0.0, "share of host copies that fail")
    fail_steps: float = flag(0.0, "share of steps and rounds that raise")
    disk: str | None = flag(None, "bytes of prefixes on disk, such as 512KiB (default: none)")
    cache: Path | None = flag(None, "folder of these (default: a temporary one)")
    follow: float = flag(0.0, "share of requests that are a next turn")
    idle: float = flag(0.0, "share of steps after which all requests end and memory forgets prefixes")
    damage: float = flag(0.0, "share of steps before which a file is damaged")
    processes: int = flag(1, "that share the folder, each with such a load", least=1)
    seed: int = flag(0)


class Soak:
    """A loaded engine, an unloaded one, and the books of both."""

    def __init__(
        self, loaded: LLM, unloaded: LLM, options: Options, each_step: Callable[[], None] = lambda: None
    ) -> None:
        self.tally, self.steps = Tally(), 0
        self._loaded, self._unloaded = loaded, unloaded
        self._options, self._each_step = options, each_step
        self._scheduler = loaded._engine.scheduler
        self._running: dict[str, SoakRequest] = {}
        self._ended: list[list[int]] = []
        self._random = Random(0)

    def run(self, drawn: Iterator[SoakRequest], show: Any = None) -> Tally:
        """Serve all of them, and assert that nothing is left behind."""
        left, ends = True, False
        while left or self._loaded.has_unfinished:
            self._each_step()
            ends = (ends or self._random.random() < self._options.idle) and self._loaded.has_unfinished
            if ends and len(self._running) == 1:
                self.tally.idles += 1
            elif self._options.idle and not self._running:
                self._scheduler.ledger.prefixes.clear()
            for _ in range(self._random.randrange(4)):
                if left and not ends and len(self._running) < self._options.in_flight:
                    request = next(drawn, None)
                    left = request is not None
                    if request is not None:
                        self._submit(self._perhaps_next_turn(request))
            if self._scheduler.running and self._random.random() < self._options.preempt:
                victim = self._random.choice(self._scheduler.running)
                # A request alone is not preempted: that would count as a request that fits nowhere.
                if len(self._scheduler.running) > 1:
                    self._scheduler.running.preempt(victim)
            try:
                for output in self._loaded.step():
                    self._take(output)
            except InjectedError:
                self.tally.failed_steps += 1
            self.steps += 1
            if self.steps % self._options.check_every == 0:
                self._loaded.check_integrity()
                self._check_accounts()
            if show is not None:
                show(self.tally)
        for name in self._running:
            self.tally.faults.append(f"{name} never ended")
        self._loaded.check_integrity()
        self._check_left()
        return self.tally

    # -- the books -----------------------------------------------------------------------------------------------

    def _check_accounts(self) -> None:
        """What tenants hold on the host is what is held there."""
        held, used = self._scheduler.memory.swap.host_bytes, self._loaded.stats().host_bytes_used
        if held.total() != used or min(held.values(), default=0) < 0:
            self.tally.faults.append(
                f"step {self.steps}: tenants hold {dict(held)} of {used} bytes on the host"
            )

    def _check_left(self) -> None:
        stats, faults = self._loaded.stats(), self.tally.faults
        if held := self._scheduler.ledger.allocator.num_used:
            faults.append(f"{held} blocks are held by no request")
        if stats.host_bytes_used:
            faults.append(f"{stats.host_bytes_used} bytes in host memory are of no request")
        faults += [
            f"{held} bytes in host memory are on the account of {tenant or 'no tenant'}"
            for tenant, held in self._scheduler.memory.swap.host_bytes.items()
            if held
        ]
        self._scheduler.memory.files.write(all_of_it=True)
        if (disk := self._scheduler.memory.files.cached) is not None:
            disk.wait()
            found = disk.stats()
            if disk.pending_bytes or found.bytes_used > found.bytes_budget or not found.is_writing:
                faults.append(f"the disk tier ends with {disk.pending_bytes} bytes to write, as {found}")
        for name, tenant in stats.tenants.items():
            for each in ("num_running", "num_waiting", "blocks", "borrowed_blocks", "host_bytes"):
                if left := getattr(tenant, each):
                    faults.append(f"{name or 'no tenant'} has {each} {left} at the end")

    # -- requests ------------------------------------------------------------------------------------------------

    def _submit(self, request: SoakRequest) -> None:
        self.tally.submitted += 1
        try:
            self._loaded.submit(
                request.prompt,
                request.params,
                request_id=request.name,
                priority=request.priority,
                tenant=request.tenant,
            )
        except InvalidRequestError:  # such as a budget below what the policy protects of a short prompt
            self.tally.refused += 1
        else:
            self._running[request.name] = request

    def _perhaps_next_turn(self, request: SoakRequest) -> SoakRequest:
        """Return the request, or one that asks the same as the next turn of a conversation."""
        if not self._ended or self._random.random() >= self._options.follow:
            return request
        before = self._ended.pop(self._random.randrange(len(self._ended)))
        room = LONGEST - len(before) - (request.params.max_tokens or 1) - 1
        if room < 1:
            return request
        self.tally.followed += 1
        return replace(request, prompt=before + request.prompt[-min(room, 20) :])

    def _take(self, output: RequestOutput) -> None:
        request = self._running.get(output.request_id)
        if request is None:
            self.tally.faults.append(f"{output.request_id} gave an output after its end")
            return
        if not output.finished:
            answered = len(output.outputs[0].token_ids)
            if request.abort_after is not None and answered >= request.abort_after:
                self._abort(request)
            elif request.fork_after is not None and answered >= request.fork_after:
                self._fork(request, output)
            return
        del self._running[request.name]
        self.tally.finished += 1
        if self._options.follow:
            self._ended.append(request.prompt + list(output.outputs[0].token_ids))
            del self._ended[:-200]
        reasons = {answer.finish_reason for answer in output.outputs}
        if not reasons <= {"stop", "length"}:
            self.tally.faults.append(f"{request.name} ended by {reasons}: {output.error}")
        elif self._random.random() < self._options.compare and self._is_comparable(request, output):
            self._check(request, output)

    def _abort(self, request: SoakRequest) -> None:
        last = self._loaded.abort(request.name)
        self.tally.aborted += 1
        del self._running[request.name]
        if last is None or not last.finished:
            self.tally.faults.append(f"{request.name} was aborted and still runs")
        if self._loaded.abort(request.name) is not None:
            self.tally.faults.append(f"{request.name} ended twice")

    def _fork(self, request: SoakRequest, output: RequestOutput) -> None:
        """Let another request continue from one of the samples that are unfinished."""
        self._running[request.name] = replace(request, fork_after=None)
        going_on = [answer.index for answer in output.outputs if answer.finish_reason is None]
        sample = self._random.choice(going_on)
        name = f"{request.name}-fork"
        try:
            self._loaded.fork(request.name, new_request_id=name, index=sample)
        except InvalidRequestError as error:
            self.tally.faults.append(f"{request.name} sample {sample} could not be forked: {error}")
            return
        self.tally.submitted += 1
        self.tally.forked += 1
        # One whose parent waits computes its tokens itself, under a policy with rounds that see other tokens.
        shares = any(sequence.request.request_id == name for sequence in self._scheduler.running)
        self._running[name] = replace(
            request,
            name=name,
            fork_after=None,
            abort_after=None,
            sample=sample,
            comparable=self._is_comparable(request, output) and (shares or request.params.eviction is None),
        )

    # -- comparison ----------------------------------------------------------------------------------------------

    def _is_comparable(self, request: SoakRequest, output: RequestOutput) -> bool:
        """Whether the same request alone would answer alike.

        Rounds that come by the load are another matter, and so is a compressed request that was computed again: its
        rounds see other tokens then.
        """
        if not request.comparable:
            return False
        if request.params.eviction is None:
            return True
        when = find_preset(str(request.params.eviction)).policy.when
        by_load = (
            when.every_steps
            or when.uncompressed_tokens
            or when.pressure
            or when.join_prefill
            or when.make_room
        )
        # One that was swapped continues as it was.
        return not by_load and output.metrics.recomputed_tokens == 0

    def _check(self, request: SoakRequest, output: RequestOutput) -> None:
        [alone] = self._unloaded.generate([request.prompt], request.params)
        self.tally.compared += 1
        self.tally.compared_forks += request.sample is not None
        answers = alone.outputs if request.sample is None else [alone.outputs[request.sample]]
        for got, expected in zip(output.outputs, answers, strict=True):
            if got.token_ids == expected.token_ids:
                continue
            pairs = zip(got.token_ids, expected.token_ids, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if place is not None and self._is_tie(request, expected.index, place):
                self.tally.ties += 1
                continue
            self.tally.faults.append(
                f"{request.name} sample {got.index} under {request.params.eviction or 'full'} differs from the "
                f"unloaded run at token {place}"
            )

    def _is_tie(self, request: SoakRequest, sample: int, place: int) -> bool:
        params = replace(request.params, max_tokens=place + 1, logprobs=2)
        [again] = self._unloaded.generate([request.prompt], params)
        logprobs = again.outputs[sample].logprobs
        there = (logprobs[place] if logprobs else None) or {}
        best = sorted((each.logprob for each in there.values()), reverse=True)
        return len(best) > 1 and best[0] - best[1] < self._options.tie


def open_pair(
    model: Path, kv_seqs: int, host_seqs: int = 0, *, tenants: bool = False, **options: Any
) -> tuple[LLM, LLM]:
    """An engine with KV memory for `kv_seqs` requests of the greatest length, and one with room for all.

    Args:
        host_seqs: requests of the greatest length that fit into the loaded engine's host tier.
        tenants: whether the loaded engine knows `TENANTS`.
        options: of the loaded engine; kv_cache_dtype: of both.
    """
    common: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "kv_cache_dtype": options.pop("kv_cache_dtype", "auto"),
        "max_model_len": 2 * LONGEST,
        "num_accumulators": 2,
        "kv_floor": 1,
        "block_size": 8,  # what a round keeps depends on it
        "prefill_chunk": 48,
    }
    unloaded = LLM(**common, kv_memory="64MiB", enable_prefix_caching=False)
    per_seq = unloaded.kv_bytes(LONGEST)
    loaded = LLM(
        **common,
        kv_memory=kv_seqs * per_seq,
        max_num_seqs=16,
        kv_offloading_size=host_seqs * per_seq if host_seqs else None,
        tenants=TENANTS if tenants else (),
        **options,
    )
    return loaded, unloaded


def study(options: Options) -> Result:
    """Serve, in several processes if asked; not ok where a promise was broken."""
    with tempfile.TemporaryDirectory() as directory:
        cache = options.cache or Path(directory) / "cache"
        own = [*sys.argv[1:], "--cache", str(cache), "--processes", "1"]
        command = [sys.executable, __file__, *own]
        others = [
            subprocess.Popen([*command, "--seed", str(options.seed + number)])
            for number in range(1, options.processes)
        ]
        result = _serve(options, Path(directory), cache if options.disk else None)
        ended = [process.wait() == 0 for process in others]
        return replace(result, ok=result.ok and all(ended))


def _serve(options: Options, directory: Path, cache: Path | None) -> Result:
    lengths = (
        drawn_lengths(options.seed) if options.trace is None else fitted(read_trace(options.trace, 20_000))
    )
    start, on_disk = time.perf_counter(), {"prefix_cache_dir": cache, "prefix_cache_disk": options.disk}
    loaded, unloaded = open_pair(
        tiny_llama(directory),
        options.kv_seqs,
        options.host_seqs,
        tenants=options.tenants,
        kv_cache_dtype=options.kv_cache_dtype,
        scheduling_policy=options.scheduling_policy,
        **({} if cache is None else on_disk),
    )
    with loaded, unloaded, Console(stderr=True).status("") as status:
        failures = Failures(loaded, options.seed, copies=options.fail_copies, steps=options.fail_steps)
        damaged = DamagedFiles(cache or directory, options.damage if cache else 0.0, options.seed)
        soak = Soak(loaded, unloaded, options, damaged.perhaps)
        tally = soak.run(
            requests(options.requests, lengths, options.seed, options.tenants),
            lambda so_far: status.update(
                f"{so_far.finished + so_far.aborted} of {options.requests} ended, {len(so_far.faults)} faults"
            ),
        )
        stats = loaded.stats()
    counted = asdict(tally) | {
        "faults": len(tally.faults),
        "steps": soak.steps,
        "preemptions": stats.num_preemptions,
        "swaps": stats.num_swaps,
        "cached_tokens": stats.cached_tokens,
        "failed_copies": failures.copies,
        "damaged_files": damaged.count,
        "seconds": round(time.perf_counter() - start),
    }
    if (disk := stats.disk_tier) is not None:
        counted |= {"loaded_tokens": disk.loaded_tokens, "found_damaged": disk.num_damaged}
        counted |= {
            "dropped": disk.num_dropped,
            "disk_bytes": disk.bytes_used,
            "disk_budget": disk.bytes_budget,
        }
    columns: dict[str, Callable[[int], str]] = {"count": lambda value: f"{value:,}"}
    table = TextTable.of("Soak", "", counted, columns)
    return Result("A soak", [table], tally.faults[:20], numbers=counted, ok=not tally.faults)


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
