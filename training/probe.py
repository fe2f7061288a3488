"""A cheap look at a model in training: which answers it would give, read off one forward pass per document."""

import random

import torch
from batches import RowMaker
from model import TrainingLlama

from winnow_lab.evaluate.demo_tasks import CATEGORIES


class Probe:
    """Held-out documents with known answers. An answer counts when each of its tokens is the likeliest after the right
    ones before it, so the share is what greedy decoding reaches on those questions."""

    def __init__(self, maker: RowMaker, seed: int, documents: int = 6) -> None:
        self.maker, self.seed, self.documents = maker, seed, documents

    @torch.no_grad()
    def accuracy(self, model: TrainingLlama, category: str, length: int) -> float:
        """Share of right answers over documents of `length` tokens."""
        rng = random.Random(f"probe/{self.seed}/{category}/{length}")
        right = total = 0
        for _ in range(self.documents * (1 if length > 512 else 3)):
            row = self.maker.document(rng, category, length)
            tokens = torch.tensor([row.tokens])
            ahead = torch.tensor([index for index, answer in enumerate(row.is_answer) if answer])
            logits = model(tokens, torch.arange(tokens.shape[1])[None], ahead - 1)
            hits = logits.argmax(-1) == tokens[0, ahead]
            starts = torch.cat([torch.tensor([True]), ahead[1:] != ahead[:-1] + 1])
            answer = starts.cumsum(0) - 1
            wrong = torch.zeros(int(answer[-1]) + 1).index_add_(0, answer, (~hits).float())
            right, total = right + int((wrong == 0).sum()), total + len(wrong)
        return right / max(1, total)

    def report(self, model: TrainingLlama, length: int) -> str:
        """One line: every category's share at `length` tokens."""
        shares = (f"{category} {self.accuracy(model, category, length):.2f}" for category in CATEGORIES)
        return f"{length} tokens: " + ", ".join(shares)
