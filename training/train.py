"""Train the demo model: a small Llama that looks things up in a few thousand tokens of prose.

The schedule follows the clock: --minutes is the whole training time, a busy machine takes fewer steps in it and still
ends with its learning rate decayed. Progress goes to standard output; every few minutes the run is saved in --out
(one run-RANK.safetensors per worker) together with an export for transformers (--out/export). Start again with --resume
and the same number of workers to resume.

One process per core is fastest: torchrun --nproc-per-node 2 training/train.py --data DIR ...
"""

import argparse
import json
import random
import time
from pathlib import Path

import corpus
import torch
import torch.nn.functional as F
from batches import MIX, Batch, RowMaker
from checkpoint import export, load_run, save_run
from model import LlamaShape, TrainingLlama
from probe import Probe
from tokenizers import Tokenizer
from torch import Tensor
from workers import Workers

from winnow_lab.evaluate.demo_tasks import Haystack

# Up to this part of the time, rows have these lengths with these odds.
CURRICULUM: tuple[tuple[float, dict[int, float]], ...] = (
    (0.20, {128: 1.0}),
    (0.32, {256: 0.8, 128: 0.2}),
    (0.50, {512: 0.8, 256: 0.2}),
    (0.65, {1024: 0.75, 512: 0.25}),
    (1.00, {2048: 0.50, 1024: 0.20, 512: 0.10, 4096: 0.20}),
)
# From this part of the time on, short rows also cover far positions. From the start on, with half of the rows, nothing
# was looked up after 460 steps; without, the first lookups came within 100.
FAR_FROM = 0.5
WARM_UP, DECAY_FROM, LAST = 0.015, 0.65, 0.03


def rate(progress: float) -> float:
    """Learning rate as a part of its peak: a short rise, a plateau, a straight line down."""
    if progress < WARM_UP:
        return max(0.02, progress / WARM_UP)
    if progress < DECAY_FROM:
        return 1.0
    return max(LAST, 1.0 - (1.0 - LAST) * (progress - DECAY_FROM) / (1.0 - DECAY_FROM))


def row_length(rng: random.Random, progress: float) -> int:
    """Tokens in each row of the next step."""
    odds = next(odds for until, odds in CURRICULUM if progress <= until or until == 1.0)
    return rng.choices(list(odds), list(odds.values()))[0]


def make_optimisers(
    model: TrainingLlama, workers: Workers, peak: float, decay: float
) -> tuple[list[torch.nn.Parameter], list[torch.optim.Optimizer]]:
    """The matrices inside the blocks, and the optimisers: Muon for this worker's share of them, AdamW for the rest."""
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    others = [model.embedding, *(weight for weight in model.parameters() if weight.ndim == 1)]
    return matrices, [
        torch.optim.Muon(
            workers.own(matrices), lr=peak, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(
    model: TrainingLlama, tokens: Tensor, positions: Tensor, chosen: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Weighted mean cross-entropy at the chosen positions."""
    losses = F.cross_entropy(model(tokens, positions, chosen), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def tensors_of(batch: Batch) -> tuple[Tensor, ...]:
    """The batch's arrays as tensors, in the order that `loss_of` takes them."""
    arrays = (batch.tokens, batch.positions, batch.chosen, batch.targets, batch.weights)
    return tuple(torch.from_numpy(array) for array in arrays)


def haystack(paths: list[Path], tokenizer: Tokenizer) -> Haystack:
    """The clean sentences of some files."""
    return Haystack.build(
        corpus.sentences(paths), lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the text_* folders of the corpus"
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="tokenizer.json, written by tokenizer.py"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; made if missing")
    parser.add_argument(
        "--minutes", type=float, default=75.0, help="training time by the clock, compiling included"
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the checkpoints in --out, their clock included"
    )
    parser.add_argument(
        "--mix", type=json.loads, default={}, help='shares to change, as JSON: {"passage": 3}'
    )
    parser.add_argument("--tokens-per-step", type=int, default=8192, help="rows times length of one step")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate, of both optimisers")
    parser.add_argument(
        "--weight-decay", type=float, default=0.1, help="of the matrices; embeddings have none"
    )
    parser.add_argument("--save-minutes", type=float, default=5.0, help="time between checkpoints")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and of every batch")
    return parser.parse_args()


class Trainer:
    """A model with its optimisers, batches and clock, from the first step or from the checkpoints in `--out`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.workers = arguments, Workers()
        longest = max(length for _, odds in CURRICULUM for length in odds)
        if arguments.tokens_per_step < longest * self.workers.count:
            raise SystemExit(f"--tokens-per-step must hold a row of {longest} tokens for each worker")
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
        training, held_out = corpus.training_files(arguments.data), corpus.held_out_files(arguments.data)
        self.maker = RowMaker(tokenizer, haystack(training, tokenizer), MIX | arguments.mix)
        self.probe = Probe(RowMaker(tokenizer, haystack(held_out, tokenizer), MIX), arguments.seed)
        self.model = TrainingLlama(LlamaShape(vocab_size=tokenizer.get_vocab_size()))
        self.parameters = list(self.model.parameters())
        self.matrices, self.optimisers = make_optimisers(
            self.model, self.workers, arguments.peak, arguments.weight_decay
        )
        self.loss = torch.compile(loss_of, dynamic=False)
        self.file = arguments.out / f"run-{self.workers.rank}.safetensors"
        self.steps, self.tokens, elapsed = 0, 0, 0.0
        if arguments.resume:
            self.steps, self.tokens, elapsed = load_run(self.file, self.model, self.optimisers)
        self.start = time.monotonic() - elapsed

    def say(self, text: str) -> None:
        """Prints in the first worker only."""
        if self.workers.rank == 0:
            print(text, flush=True)

    def elapsed(self) -> float:
        """Seconds of training so far, earlier runs included; the same in all workers."""
        return self.workers.agree(time.monotonic() - self.start)

    def step(self, progress: float) -> tuple[int, float]:
        """One update at `progress` of the time; returns the length of its rows and this worker's loss."""
        arguments, workers = self.arguments, self.workers
        length = row_length(random.Random(f"{arguments.seed}/{self.steps}"), progress)
        rng = random.Random(f"{arguments.seed}/{self.steps}/{workers.rank}")
        share = arguments.tokens_per_step // workers.count
        reach = self.model.shape.max_positions if progress > FAR_FROM else length
        batch = self.maker.batch(rng, share // length, length, share // 3, reach)
        loss = self.loss(self.model, *tensors_of(batch))
        loss.backward()
        workers.average_gradients(self.parameters)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = arguments.peak * rate(progress)
            optimiser.step()
        workers.exchange(self.matrices)
        self.model.zero_grad()
        self.steps, self.tokens = self.steps + 1, self.tokens + arguments.tokens_per_step
        return length, loss.item()

    def save(self, length: int) -> None:
        """Checkpoints of all workers and an export; prints the accuracy on held-out documents of `length` tokens."""
        seconds = time.monotonic() - self.start
        save_run(self.file, self.model, self.optimisers, self.steps, self.tokens, seconds)
        if self.workers.rank == 0:
            export(self.arguments.out / "export", self.model, torch.bfloat16)
            self.say(f"  saved at step {self.steps}; held out: {self.probe.report(self.model, length)}")

    def run(self) -> None:
        """Trains until the time is over."""
        self.say(f"{sum(weight.numel() for weight in self.parameters):,} weights, from step {self.steps} on")
        saved = reported = self.elapsed()
        tokens_then, losses = self.tokens, list[float]()
        while (now := self.elapsed()) < 60 * self.arguments.minutes:
            progress = now / (60 * self.arguments.minutes)
            length, loss = self.step(progress)
            losses.append(loss)
            if self.steps % 25 == 0:
                speed = (self.tokens - tokens_then) / (now - reported + 1e-9)
                self.say(
                    f"step {self.steps} {now / 60:.1f} min, length {length}, loss {sum(losses) / len(losses):.3f}, "
                    f"rate {rate(progress):.2f}, {self.tokens / 1e6:.1f}M tokens, {speed:.0f} tokens/s"
                )
                reported, tokens_then, losses = now, self.tokens, []
            if now - saved > 60 * self.arguments.save_minutes:
                self.save(min(length, 2048))
                saved = now
        self.save(2048)
        self.say(f"finished: {self.steps} steps, {self.tokens:,} tokens, {self.elapsed() / 60:.1f} minutes")
        self.workers.close()


def main() -> None:
    """Command line; see --help."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    torch._dynamo.config.recompile_limit = 64
    arguments.out.mkdir(parents=True, exist_ok=True)
    Trainer(arguments).run()


if __name__ == "__main__":
    main()
