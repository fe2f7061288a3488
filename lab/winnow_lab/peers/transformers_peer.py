"""transformers on one piece of work, static or continuous batches; runs in that peer's environment.

Options: `dtype`, and either `batch` (prompts that `generate` answers together) or `kv_pages` (of `page_size` tokens,
in all layers) for `generate_batch`, which batches continuously.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from protocol import Answer, Tokens, Work, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel


def generation(new_tokens: int) -> GenerationConfig:
    """Greedy, and no token ends an answer."""
    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)


def in_batches(model: PreTrainedModel, prompts: Tokens, new_tokens: int, batch: int) -> Tokens:
    """Answer `batch` prompts at a time; all are equally long."""
    answers: Tokens = []
    for first in range(0, len(prompts), batch):
        inputs = torch.tensor(prompts[first : first + batch])
        outputs = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=generation(new_tokens)
        )
        answers += outputs[:, inputs.shape[1] :].tolist()
    return answers


def continuously(model: PreTrainedModel, prompts: Tokens, new_tokens: int, options: dict[str, Any]) -> Tokens:
    """Hand in all prompts at once."""
    config = ContinuousBatchingConfig(
        page_size=options["page_size"], num_blocks=options["kv_pages"], allow_block_sharing=False
    )
    # -1 is no token: the manager wants an id that ends an answer.
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=config,
    )
    by_request = sorted(outputs.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
    errors = [output.error for output in by_request if output.error]
    if errors:
        raise RuntimeError(errors[0])
    return [list(output.generated_tokens) for output in by_request]


@contextmanager
def opened(work: Work) -> Iterator[Answer]:
    """The loaded model."""
    torch.set_num_threads(work.threads)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.options["dtype"]))
    model.eval()

    def answer(asked: Work) -> Tokens:
        if "batch" in work.options:
            return in_batches(model, asked.prompts, asked.new_tokens, work.options["batch"])
        return continuously(model, asked.prompts, asked.new_tokens, work.options)

    yield answer


if __name__ == "__main__":
    serve(opened, packages=["transformers", "torch"])
