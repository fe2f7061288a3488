"""What a soak serves: a tiny model, requests drawn from a seed, and failures that are drawn likewise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from winnow import LLM, SamplingParams
from winnow.values.tenants import Tenant, parse_tenants
from winnow_lab.bench.traces import TraceRequest, scaled
from winnow_lab.memory.reservation import VOCAB

LONGEST = 256
"""Tokens of a prompt and its answer, at most."""

POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"eviction": "batch-max", "kv_budget": 96},
    {"eviction": "kv-compress", "compression": 2.0},
    {"eviction": "kv-compress-pd", "kv_budget": 96},
    {"eviction": "kvzip", "compression": 2.0},
    {"eviction": "keydiff", "compression": 2.0},
    {"eviction": "streaming", "kv_budget": 48},
)

TENANTS: tuple[Tenant, ...] = parse_tenants(
    {
        "gold": {"weight": 2.0, "guarantee": 0.4},
        "bronze": {"limit": 0.6, "host_limit": 0.5},
        "*": {"host_limit": 0.8},
    }
)
_ACCOUNTS = (None, "gold", "bronze", "guest")


@dataclass(frozen=True)
class SoakRequest:
    """One request, drawn from a seed.

    Attributes:
        abort_after: tokens of its answer after which it is aborted; None: it may end by itself.
        fork_after: tokens of its answer after which another request continues from one of its samples; None: never.
        sample: which of the unloaded run's samples its answer should be; None: all of them.
        comparable: False for a fork of what would not have answered as it does alone.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    tenant: str | None
    abort_after: int | None
    fork_after: int | None
    sample: int | None = None
    comparable: bool = True


def requests(
    count: int, trace: list[TraceRequest], seed: int, tenants: bool = False
) -> Iterator[SoakRequest]:
    """Draw `count` requests, the same for every run with that seed; their lengths are the trace's, in turn."""
    for index in range(count):
        random = Random(f"{seed} {index}")
        shape = trace[index % len(trace)]
        prompt = [3 + token for token in shape.prompt(VOCAB - 3, seed=index % 50)]
        # Every third begins as others do, also where the trace knows nothing of that.
        if index % 3 == 0:
            shared = Random(index % 4)
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
        fork_after = None if random.random() < 0.6 else random.randrange(1, 20)
        yield SoakRequest(
            f"soak-{index}",
            prompt,
            params,
            random.randrange(-2, 3),
            random.choice(_ACCOUNTS) if tenants else None,
            abort_after,
            fork_after,
        )


def drawn_lengths(seed: int) -> list[TraceRequest]:
    random = Random(seed)
    return [TraceRequest(0.0, random.randrange(1, 160), random.randrange(1, 60)) for _ in range(1000)]


def fitted(trace: list[TraceRequest]) -> list[TraceRequest]:
    """A trace whose median request has an eighth of the greatest length; longer ones than that are left out."""
    lengths = sorted(request.prompt_tokens + request.output_tokens for request in trace)
    return scaled(trace, tokens=LONGEST / 8 / lengths[len(lengths) // 2], longest=LONGEST - 66)


class DamagedFiles:
    """Damage to files of a folder of prefixes, drawn from a seed: a bit is flipped, or the file is cut."""

    def __init__(self, folder: Path, share: float, seed: int) -> None:
        self.count = 0
        self._folder, self._share = folder, share
        self._random = Random(f"damage {seed}")

    def perhaps(self) -> None:
        if self._random.random() >= self._share:
            return
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            return
        path = self._random.choice(paths)
        try:
            content = bytearray(path.read_bytes())
            at = self._random.randrange(len(content) or 1)
            if content and self._random.random() < 0.5:
                content[at] ^= 1 << self._random.randrange(8)
            else:
                del content[at:]
            unfinished = path.with_suffix(".damaged")  # a file that is mapped is replaced, not shortened
            unfinished.write_bytes(content)
            unfinished.replace(path)
        except FileNotFoundError:  # it went for room meanwhile
            return
        self.count += 1


class InjectedError(RuntimeError):
    """A failure that was asked for."""


class Failures:
    """Failures of an engine's parts, drawn from a seed: copies to the host and back, steps, rounds.

    Args:
        copies: share of copies that fail.
        steps: share of steps, and of rounds of eviction, that raise, half of them after their work is done.

    Attributes:
        copies, steps: how many were injected so far.
    """

    def __init__(self, llm: LLM, seed: int, *, copies: float, steps: float) -> None:
        self.copies = self.steps = 0
        self._random = Random(f"failures {seed}")
        executor: Any = llm._engine._executor
        host = executor.cache.host
        if copies:
            host.save = self._failing(host.save, copies, "copies")
            host.load = self._failing(host.load, copies, "copies")
        if steps:
            executor.submit = self._failing(executor.submit, steps, "steps")
            executor.plan_evictions = self._failing(executor.plan_evictions, steps, "steps")

    def _failing(self, work: Callable[..., Any], share: float, kind: str) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            draw = self._random.random()
            after = kind == "steps" and draw < share / 2
            result = work(*args) if after or draw >= share else None
            if draw < share:
                setattr(self, kind, getattr(self, kind) + 1)
                raise InjectedError(f"injected, {'after' if after else 'before'} the work")
            return result

        return wrapped
