"""CTranslate2's `Generator` on one piece of work; runs in that peer's environment.

Options: `compute_type` (int8, bfloat16, float32), `batch` (prompts answered together).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ctranslate2
from protocol import Answer, Work, serve


def answer(
    generator: ctranslate2.Generator, prompts: list[list[str]], new_tokens: int, batch: int
) -> list[list[int]]:
    """Answer all prompts, greedily, `batch` at a time."""
    results = generator.generate_batch(
        prompts,
        max_batch_size=batch,
        batch_type="examples",
        beam_size=1,
        sampling_topk=1,
        min_length=new_tokens,
        max_length=new_tokens,
        include_prompt_in_result=False,
        cache_static_prompt=False,
    )
    return [list(result.sequences_ids[0]) for result in results]


@contextmanager
def opened(work: Work) -> Iterator[Answer]:
    """The loaded model."""
    vocabulary = json.loads((Path(work.model) / "vocabulary.json").read_text(encoding="utf-8"))
    generator = ctranslate2.Generator(
        work.model,
        device="cpu",
        compute_type=work.options["compute_type"],
        intra_threads=work.threads,
        inter_threads=1,
    )

    def in_names(asked: Work) -> list[list[int]]:
        prompts = [[vocabulary[token] for token in prompt] for prompt in asked.prompts]
        return answer(generator, prompts, asked.new_tokens, asked.options["batch"])

    yield in_names


if __name__ == "__main__":
    serve(opened, packages=["ctranslate2"])
