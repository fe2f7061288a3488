"""Answers in bfloat16 that depend on no other request, to the last bit."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, SamplingParams
from winnow.errors import ConfigError
from winnow.process.native import is_installed

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0, detokenize=False)
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "block_size": 4, "threads": 1, "enable_prefix_caching": False}


def prompts() -> list[list[int]]:
    chance = Random(0)
    return [[chance.randrange(3, VOCAB) for _ in range(count)] for count in (5, 60, 33, 97, 16, 70, 41, 88)]


def answers(llm: LLM, group: list[list[int]]) -> list[list[tuple[int, float]]]:
    found = [output.outputs[0] for output in llm.generate(group, GREEDY)]
    return [
        [(t, each[t].logprob) for t, each in zip(x.token_ids, x.logprobs or (), strict=True)] for x in found
    ]


@pytest.mark.skipif(not is_installed(), reason="needs the kernels: make setup")
def test_an_answer_depends_on_no_other(tmp_path: Path) -> None:
    """Beside none, beside all, in steps of few tokens, and where memory takes answers away and gives them back."""
    save_tiny_llama(tmp_path, 0)
    options = {**OPTIONS, "prefill_chunk": 16, "batch_invariant": True}
    with LLM(tmp_path, kv_memory="4MiB", **options) as llm:
        alone = [answers(llm, [each])[0] for each in prompts()]
        assert answers(llm, prompts()) == alone
        room = 3 * llm.kv_bytes(100) + 72 * 1024  # and tables
    with LLM(tmp_path, kv_memory="4MiB", max_num_batched_tokens=19, max_num_seqs=4, **options) as llm:
        assert answers(llm, prompts()[::-1])[::-1] == alone
    with LLM(tmp_path, kv_memory=room, **options) as llm:
        assert answers(llm, prompts()) == alone
        assert llm.stats().recomputed_tokens > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching false"),
        ({"prefill_chunk": None}, "prefill_chunk must be at most 1985 with batch_invariant"),
        ({"attention_backend": "reference"}, "needs attention_backend native"),
        (
            {"speculative_config": {"method": "ngram"}},
            "speculative_config must be left out with batch_invariant",
        ),
    ],
)
def test_what_would_change_the_order_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(**{**OPTIONS, "batch_invariant": True, **options})
