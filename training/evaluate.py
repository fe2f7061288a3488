"""Score a demo model with its full KV cache on held-out books: greedy answers, one question per prompt.

Prints one table: a row per category, a column per prompt length in tokens (answer included), and the loss on plain
held-out text in nats per token.
"""

import argparse
import random
import time
from pathlib import Path

import corpus
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from winnow_lab.evaluate.demo_tasks import CATEGORIES, DemoSample, Haystack, make_sample
from winnow_lab.evaluate.metrics import score

# Tokens that may follow beyond the length of the right answer: a wrong answer must not be cut to the right one.
ANSWER_ROOM = 8
PLAIN_SAMPLES = 16


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, sample: DemoSample) -> str:
    """The model's greedy answer to one prompt, without the end token."""
    prompt = tokenizer(sample.prompt, return_tensors="pt")
    expected = len(tokenizer(" " + sample.answer, add_special_tokens=False).input_ids)
    output = model.generate(**prompt, max_new_tokens=expected + ANSWER_ROOM, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


@torch.inference_mode()
def plain_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, haystack: Haystack, length: int, seed: int
) -> float:
    """Mean cross-entropy in nats per token over texts of `length` tokens."""
    losses = []
    for number in range(PLAIN_SAMPLES):
        text = " ".join(haystack.passage(random.Random(f"{seed}/plain/{number}"), length - 1))
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    return sum(losses) / len(losses)


def mean_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    haystack: Haystack,
    category: str,
    length: int,
    arguments: argparse.Namespace,
) -> float:
    """Mean over the samples of one category and length."""
    total = 0.0
    for number in range(arguments.samples):
        rng = random.Random(f"{arguments.seed}/{category}/{length}/{number}")
        sample = make_sample(
            category,
            rng,
            haystack,
            lambda text: len(tokenizer(text, add_special_tokens=False).input_ids),
            length - ANSWER_ROOM,
        )
        prediction = answer(model, tokenizer, sample)
        total += score(sample.metric, prediction, [sample.answer])
        if arguments.show > number:
            print(f"  {category} {length}: {sample.question!r}: {prediction!r}, right: {sample.answer!r}")
    return total / arguments.samples


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with weights and tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder with the held-out books")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="in tokens")
    parser.add_argument("--categories", nargs="+", choices=list(CATEGORIES), default=list(CATEGORIES))
    parser.add_argument("--samples", type=int, default=50, help="prompts for each category and length")
    parser.add_argument("--show", type=int, default=0, help="print this many answers of each")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses")
    parser.add_argument("--seed", type=int, default=77, help="of the samples")
    return parser.parse_args()


def main() -> None:
    """Command line; see --help."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    haystack = Haystack.build(
        corpus.sentences(corpus.held_out_files(arguments.data)),
        lambda text: len(tokenizer(text, add_special_tokens=False).input_ids),
    )
    print(f"| category | metric | {' | '.join(str(length) for length in arguments.lengths)} |")
    print("|---|---|" + "---:|" * len(arguments.lengths), flush=True)
    for category in arguments.categories:
        shares = [
            mean_score(model, tokenizer, haystack, category, length, arguments)
            for length in arguments.lengths
        ]
        columns = " | ".join(f"{share:.2f}" for share in shares)
        print(f"| {category} | {CATEGORIES[category].metric} | {columns} |", flush=True)
    losses = (plain_loss(model, tokenizer, haystack, length, arguments.seed) for length in arguments.lengths)
    print(f"| plain text | loss | {' | '.join(f'{loss:.2f}' for loss in losses)} |")
    print(f"{arguments.samples} samples each, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
