"""Many requests through a cache that is far too small for them, and each of them held to what it is owed.

    python benchmarks/soak.py [--requests 5000] [--trace FILE] [--kv-seqs 4] [--host-seqs 4] [--compare 1.0]
        [--check-every 1] [--preempt 0.1] [--seed 0]

Prompts begin alike, arrive with random priorities under several policies, some ask for more than one sample, some are
aborted. Every request must end exactly once; answers that ended by themselves must be those of the same request alone
in an engine with room for everything (float32, greedy); the engine's invariants are asserted after steps; at the end
nobody may hold a block or a byte of host memory. The model is a tiny Llama of random weights.

An answer that differs where the two best tokens of the unloaded run are closer than `--tie` in logprob is counted as a
tie, not as a fault: sums in float32 depend on who shares the batch.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from winnow import LLM, RequestOutput, SamplingParams
from winnow.bench.traces import TraceRequest, read_trace, scaled
from winnow.errors import InvalidRequestError
from winnow.eviction.presets import find_preset
from winnow.report.provenance import Machine

VOCAB = 97
LONGEST = 256
"""Tokens of a prompt and its answer, at most."""

POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"eviction": "batch-max", "kv_budget": 96},
    {"eviction": "kv-compress", "compression": 2.0},
    {"eviction": "kv-compress-pd", "kv_budget": 96},
    {"eviction": "kvzip", "compression": 2.0},
    {"eviction": "keydiff", "compression": 2.0},
    {"eviction": "streaming-shift", "kv_budget": 48},
)


@dataclass
class Tally:
    """What came of the requests so far.

    Attributes:
        faults: one line for each broken promise.
    """

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    compared: int = 0
    ties: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SoakRequest:
    """One request, drawn from a seed.

    Attributes:
        abort_after: tokens of its answer after which it is aborted; None: it may end by itself.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    abort_after: int | None


def tiny_llama(path: Path) -> Path:
    """Save a Llama of 2 layers, 4 query and 2 KV heads whose random weights are large enough for varied answers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * LONGEST,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForCausalLM(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(0, 0.3)
    model.save_pretrained(path)
    return path


def requests(count: int, trace: list[TraceRequest], seed: int) -> Iterator[SoakRequest]:
    """Draw `count` requests, the same for every run with that seed; their lengths are the trace's, in turn."""
    for index in range(count):
        random = Random(f"{seed} {index}")  # noqa: S311
        shape = trace[index % len(trace)]
        prompt = [3 + token for token in shape.prompt(VOCAB - 3, seed=index % 50)]
        # Every third begins as others do, also where the trace knows nothing of that.
        if index % 3 == 0:
            shared = Random(index % 4)  # noqa: S311
            prompt = ([shared.randrange(3, VOCAB) for _ in range(64)] + prompt)[: max(len(prompt), 65)]
        policy = random.choice(POLICIES)
        new_tokens = min(shape.output_tokens, LONGEST - len(prompt) - 1)
        params = SamplingParams(
            n=random.choice((1, 1, 1, 2, 3)),
            temperature=0.0,
            max_tokens=max(new_tokens, 1),
            detokenize=False,
            **policy,
        )
        abort_after = random.randrange(1, 20) if random.random() < 0.05 else None
        yield SoakRequest(f"soak-{index}", prompt, params, random.randrange(-2, 3), abort_after)


class Soak:
    """A loaded engine, an unloaded one, and the books of both.

    Args:
        in_flight: requests that are unfinished at a time, at most.
        compare: share of the answers that are compared with the unloaded engine's.
        check_every: steps from one assertion of the engine's invariants to the next.
        tie: difference of logprobs below which two tokens are as good as each other.
        preempt: share of the steps before which somebody gives way, whether memory is short or not.
    """

    def __init__(
        self,
        loaded: LLM,
        unloaded: LLM,
        *,
        in_flight: int = 48,
        compare: float = 1.0,
        check_every: int = 1,
        tie: float = 1e-3,
        preempt: float = 0.1,
    ) -> None:
        self.tally = Tally()
        self.steps = 0
        self._loaded, self._unloaded = loaded, unloaded
        self._in_flight, self._compare, self._check_every = in_flight, compare, check_every
        self._tie, self._preempt = tie, preempt
        self._scheduler = loaded._engine._scheduler  # type: ignore[attr-defined]
        self._running: dict[str, SoakRequest] = {}
        self._seen: set[str] = set()
        self._random = Random(0)  # noqa: S311

    def run(self, drawn: Iterator[SoakRequest], show: Any = None) -> Tally:
        """Serve all of them, and assert that nothing is left behind."""
        left = True
        while left or self._loaded.has_unfinished:
            for _ in range(self._random.randrange(4)):
                if left and len(self._running) < self._in_flight:
                    request = next(drawn, None)
                    left = request is not None
                    if request is not None:
                        self._submit(request)
            # Who is alone gives way to nobody: that would count as a request that fits nowhere.
            if len(self._scheduler.running) > 1 and self._random.random() < self._preempt:
                self._scheduler._preempt(self._random.choice(self._scheduler.running))
            for output in self._loaded.step():
                self._take(output)
            self.steps += 1
            if self.steps % self._check_every == 0:
                self._loaded.check_integrity()
            if show is not None:
                show(self.tally)
        for name in self._running:
            self.tally.faults.append(f"{name} never ended")
        self._loaded.check_integrity()
        if held := self._scheduler.ledger.allocator.num_used:
            self.tally.faults.append(f"{held} blocks are held by nobody")
        if held := self._loaded.stats().host_bytes_used:
            self.tally.faults.append(f"{held} bytes in host memory are nobody's")
        return self.tally

    def _submit(self, request: SoakRequest) -> None:
        self.tally.submitted += 1
        try:
            self._loaded.submit(
                request.prompt, request.params, request_id=request.name, priority=request.priority
            )
        except InvalidRequestError:  # such as a budget below what the policy protects of a short prompt
            self.tally.refused += 1
        else:
            self._running[request.name] = request

    def _take(self, output: RequestOutput) -> None:
        request = self._running.get(output.request_id)
        if request is None:
            self.tally.faults.append(f"{output.request_id} gave an output after its end")
            return
        if not output.finished:
            if request.abort_after is not None and len(output.outputs[0].token_ids) >= request.abort_after:
                last = self._loaded.abort(request.name)
                self.tally.aborted += 1
                del self._running[request.name]
                if last is None or not last.finished:
                    self.tally.faults.append(f"{request.name} was aborted and goes on")
                if self._loaded.abort(request.name) is not None:
                    self.tally.faults.append(f"{request.name} ended twice")
            return
        del self._running[request.name]
        self.tally.finished += 1
        reasons = {answer.finish_reason for answer in output.outputs}
        if not reasons <= {"stop", "length"}:
            self.tally.faults.append(f"{request.name} ended by {reasons}: {output.error}")
        elif self._random.random() < self._compare and self._is_comparable(request, output):
            self._check(request, output)

    def _is_comparable(self, request: SoakRequest, output: RequestOutput) -> bool:
        """Whether the same request alone would answer alike.

        Rounds that come by the load are another matter, and so is a compressed request that was computed again: its
        rounds see other tokens then.
        """
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
        # One that was swapped goes on as it was.
        return not by_load and output.metrics.recomputed_tokens == 0

    def _check(self, request: SoakRequest, output: RequestOutput) -> None:
        [alone] = self._unloaded.generate([request.prompt], request.params)
        self.tally.compared += 1
        for got, expected in zip(output.outputs, alone.outputs, strict=True):
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
        params = SamplingParams(
            n=request.params.n,
            temperature=0.0,
            max_tokens=place + 1,
            logprobs=2,
            detokenize=False,
            eviction=request.params.eviction,
            compression=request.params.compression,
            kv_budget=request.params.kv_budget,
        )
        [again] = self._unloaded.generate([request.prompt], params)
        logprobs = again.outputs[sample].logprobs
        there = (logprobs[place] if logprobs else None) or {}
        best = sorted((each.logprob for each in there.values()), reverse=True)
        return len(best) > 1 and best[0] - best[1] < self._tie


def open_pair(model: Path, kv_seqs: int, host_seqs: int = 0) -> tuple[LLM, LLM]:
    """An engine with KV memory for `kv_seqs` requests of the greatest length, and one with room for all.

    Args:
        host_seqs: requests of the greatest length that fit into the loaded engine's host tier.
    """
    common: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
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
    )
    return loaded, unloaded


def main() -> None:
    """Run, print what came of it, and exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None, allow_abbrev=False
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--trace", type=Path, help="lengths of requests (default: random lengths)")
    parser.add_argument("--kv-seqs", type=int, default=4, help="KV memory for so many requests of 256 tokens")
    parser.add_argument("--host-seqs", type=int, default=4, help="such requests that fit into host memory")
    parser.add_argument("--in-flight", type=int, default=48, help="unfinished requests at a time")
    parser.add_argument("--compare", type=float, default=1.0, help="share of answers that are compared")
    parser.add_argument("--check-every", type=int, default=1, help="steps between assertions of invariants")
    parser.add_argument("--tie", type=float, default=1e-3)
    parser.add_argument(
        "--preempt", type=float, default=0.1, help="share of steps before which one gives way"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    trace = (
        drawn_lengths(options.seed) if options.trace is None else fitted(read_trace(options.trace, 20_000))
    )
    console = Console()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        loaded, unloaded = open_pair(tiny_llama(Path(directory)), options.kv_seqs, options.host_seqs)
        with loaded, unloaded, Console(stderr=True).status("") as status:
            soak = Soak(
                loaded,
                unloaded,
                in_flight=options.in_flight,
                compare=options.compare,
                check_every=options.check_every,
                tie=options.tie,
                preempt=options.preempt,
            )
            tally = soak.run(
                requests(options.requests, trace, options.seed),
                lambda so_far: status.update(
                    f"{so_far.finished + so_far.aborted} of {options.requests} ended, "
                    f"{len(so_far.faults)} faults"
                ),
            )
            stats = loaded.stats()
    console.print(str(Machine.here()))
    console.print(
        f"{tally.submitted} requests, {tally.refused} refused, {tally.finished} finished, {tally.aborted} aborted; "
        f"{soak.steps} steps, {stats.num_preemptions} preemptions, {stats.cached_tokens} prompt tokens found; "
        f"{tally.compared} compared, {tally.ties} ties, {len(tally.faults)} faults; "
        f"{time.perf_counter() - start:.0f} s"
    )
    for fault in tally.faults[:20]:
        console.print(fault)
    sys.exit(bool(tally.faults))


def drawn_lengths(seed: int) -> list[TraceRequest]:
    """Lengths without a trace."""
    random = Random(seed)  # noqa: S311
    return [TraceRequest(0.0, random.randrange(1, 160), random.randrange(1, 60)) for _ in range(1000)]


def fitted(trace: list[TraceRequest]) -> list[TraceRequest]:
    """A trace whose median request has an eighth of the greatest length; longer ones than that are left out."""
    lengths = sorted(request.prompt_tokens + request.output_tokens for request in trace)
    return scaled(trace, tokens=LONGEST / 8 / lengths[len(lengths) // 2], longest=LONGEST - 66)


if __name__ == "__main__":
    main()
