"""Compare the memory that three ways to allocate KVs hold and leave empty.

Requests have the lengths of a trace, a CSV file of Azure's named as the argument, or random ones without it.

16 sequences grow side by side, a token a step each behind their prompts, and the next request takes the place of one
that ends. KVs are written into memory: a buffer of the longest sequence for each, a buffer that doubles and is copied,
or blocks of one pool.
"""

import csv
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from winnow.cache.accounting.allocator import BlockAllocator

LONGEST, TOGETHER, BLOCK, WIDTH = 8192, 16, 16, 256
"""Tokens of the longest sequence, sequences at a time, tokens of a block, and numbers in a token's KV."""
KVs = NDArray[np.float16]


class Sequence(Protocol):
    used: int

    def append(self, kvs: KVs) -> None: ...
    def slots(self) -> int: ...
    def free(self) -> None: ...


class Buffer:
    """A buffer of `slots` tokens, which doubles where they do not suffice."""

    def __init__(self, slots: int) -> None:
        self.kvs, self.used = np.empty((slots, WIDTH), np.float16), 0

    def append(self, kvs: KVs) -> None:
        end, short = self.used + len(kvs), self.kvs
        if end > len(short):
            self.kvs = np.empty((1 << (end - 1).bit_length(), WIDTH), np.float16)
            self.kvs[: self.used] = short[: self.used]
        self.kvs[self.used : end] = kvs
        self.used = end

    def slots(self) -> int:
        return len(self.kvs)

    def free(self) -> None:
        pass


class Pool:
    """Blocks for all sequences, of which each has a table."""

    def __init__(self) -> None:
        self.kvs = np.empty((TOGETHER * LONGEST, WIDTH), np.float16)
        self.allocator = BlockAllocator([len(self.kvs) // BLOCK])


class Table:
    """A sequence's blocks of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.used, self.blocks = pool, 0, list[int]()

    def append(self, kvs: KVs) -> None:
        end = self.used + len(kvs)
        if missing := -(-end // BLOCK) - len(self.blocks):
            self.blocks += self.pool.allocator.allocate(missing).tolist()
        while self.used < end:
            block, at = divmod(self.used, BLOCK)
            part, kvs = kvs[: BLOCK - at], kvs[BLOCK - at :]
            place = self.blocks[block] * BLOCK + at
            self.pool.kvs[place : place + len(part)] = part
            self.used += len(part)

    def slots(self) -> int:
        return len(self.blocks) * BLOCK

    def free(self) -> None:
        self.pool.allocator.release(np.array(self.blocks, np.int32))


def serve(sizes: list[tuple[int, int]], new: Callable[[], Sequence]) -> tuple[float, float, int, float]:
    """Return the empty share of held memory, at the ends of sequences and over all steps; the peak of held memory in
    bytes; and the processor time in seconds."""
    waiting, running = deque(sizes), dict[int, tuple[Sequence, int]]()
    kvs, ends, steps, most = np.ones((LONGEST, WIDTH), np.float16), [0, 0], [0, 0], 0
    begun, number = time.process_time(), 0
    while waiting or running:
        while waiting and len(running) < TOGETHER:
            prompt, answer = waiting.popleft()
            running[number] = new(), prompt + answer
            running[number][0].append(kvs[:prompt])
            number += 1
        held = sum(each.slots() for each, _ in running.values())
        steps = [steps[0] + held, steps[1] + sum(each.used for each, _ in running.values())]
        most = max(most, held * WIDTH * kvs.itemsize)
        for name, (sequence, length) in list(running.items()):
            if sequence.used < length:
                sequence.append(kvs[:1])
            else:
                ends = [ends[0] + sequence.slots(), ends[1] + sequence.used]
                sequence.free()
                del running[name]
    return 1 - ends[1] / ends[0], 1 - steps[1] / steps[0], most, time.process_time() - begun


def read(trace: str) -> list[tuple[int, int]]:
    """Return the tokens of each 40th request's prompt and answer."""
    with open(trace, encoding="utf-8") as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    return [row for row in rows if sum(row) <= LONGEST][::40]


def draw(requests: int) -> list[tuple[int, int]]:
    """Return as many, most of them short."""
    tokens = np.random.default_rng(0).lognormal((6.5, 4.5), (1.0, 0.7), (requests, 2)).astype(int)
    return [(prompt, answer) for prompt, answer in np.clip(tokens, 1, LONGEST // 2).tolist()]


def main() -> None:
    sizes = read(sys.argv[1]) if sys.argv[1:] else draw(64)
    pool = Pool()
    kinds: dict[str, Callable[[], Sequence]] = {
        "whole buffers": lambda: Buffer(LONGEST),
        "buffers that double": lambda: Buffer(1),
        f"blocks of {BLOCK}": lambda: Table(pool),
    }
    found = {name: [serve(sizes, new) for _ in range(3)] for name, new in kinds.items()}
    base = min(seconds for *_, seconds in found["whole buffers"])
    print(f"{len(sizes)} requests, {sum(map(sum, sizes)):,} tokens, {TOGETHER} at a time")
    for name, runs in found.items():
        ends, steps, most, _ = runs[0]
        times = min(seconds for *_, seconds in runs) / base
        print(
            f"{name:20} empty at ends {ends:.1%}, over all steps {steps:.1%}, most {most / 2**20:.1f} MiB, {times:.2f}x"
        )


if __name__ == "__main__":
    main()
