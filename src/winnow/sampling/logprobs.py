"""Log probabilities of tokens, reported from raw logits, before any penalty, bias or temperature."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from winnow.sampling.rows import clean_rows, row_blocks, sound_rows
from winnow.sampling.token_table import TokenTable
from winnow.values.logprob import Logprob


def logprob_table(logprobs: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Return what a report needs, as numbers of one type, so that they can leave the device together.

    Args:
        logprobs: [R, V] float32.
        tokens: [R] int64, reported whatever their rank.
        top: how many of the most probable tokens to add, at most V.

    Returns:
        [R, 3 + 2 * top] float64: the token, its logprob and rank, then the top logprobs, descending, and their tokens.
    """
    chosen = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > chosen).sum(1, keepdim=True) + 1
    columns = [tokens[:, None], chosen, rank]
    if top:
        columns += logprobs.topk(top, dim=1)
    return torch.cat([column.double() for column in columns], dim=1)


def read_logprobs(row: Sequence[float], top: int) -> dict[int, Logprob]:
    """Return one row of `logprob_table`, the reported token first, then `top` of the most probable."""
    token, chosen, rank = int(row[0]), row[1], int(row[2])
    report = {token: Logprob(chosen, rank)}
    listed = (len(row) - 3) // 2
    rank = 0
    for index in range(top):
        value = row[3 + index]
        if index == 0 or value < row[2 + index]:
            rank = index + 1
        report.setdefault(int(row[3 + listed + index]), Logprob(value, rank))
    return report


def decode_logprobs(
    tokens: TokenTable, logprobs: Mapping[int, Logprob], *, skip_special_tokens: bool, first: bool = False
) -> dict[int, Logprob]:
    """Add the tokens' texts and bytes: none of special tokens that the answer's text leaves out. If `first`, nothing
    stands before them."""
    decoded = {}
    for token, entry in logprobs.items():
        if skip_special_tokens and token in tokens.special:
            text, own = tokens.special[token], b""
        else:
            text, own = tokens.text_of(token), tokens.bytes_of(token, first)
        decoded[token] = replace(entry, decoded_token=text, token_bytes=own)
    return decoded


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], top: int) -> list[dict[int, Logprob]]:
    """Return how probable each token of a prompt was, given those before it.

    Works in blocks of rows: never makes a float32 copy of all logits.

    Args:
        logits: [N, V], any float type; row i was computed from the tokens up to i.
        next_token_ids: [N], the token that follows row i.
        top: how many of the most probable tokens to report beside it, of equally probable ones those of `torch.topk`.

    Returns:
        N dicts, token id -> `Logprob`, the following token first; all NaN in rows whose logits are NaN or infinite.
    """
    num_rows, vocab_size = logits.shape
    assert num_rows == len(next_token_ids), "one following token for each row"
    if not num_rows:
        return []
    top = min(top, vocab_size)
    following = torch.tensor(next_token_ids, dtype=torch.int64, device="cpu").to(logits.device)
    tables = []
    for first, end in row_blocks(num_rows, vocab_size):
        own = logits[first:end]
        logprobs = clean_rows(own).log_softmax(1)
        logprobs[~sound_rows(own)] = torch.nan
        tables.append(logprob_table(logprobs, following[first:end], top))
    return [read_logprobs(row, top) for row in torch.cat(tables).tolist()]
