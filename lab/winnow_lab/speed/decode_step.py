"""A decode step of 32 sequences: Winnow beside transformers' own `generate`, interleaved in one run.

    python -m winnow_lab.speed.decode_step [--model DIR] [--dtype bfloat16] [--load-format dummy] [--sequences 32]
                                     [--prompt 512] [--steps 48] [--rounds 5]

Both run the same weights on the same random prompts, greedy, end of text ignored. transformers' step is the
difference of two `generate` calls, so its prefill does not count; Winnow's is the median of its decode steps.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from winnow import LLM, SamplingParams
from winnow.config import LOAD_FORMATS
from winnow.models import DEMO_MODEL


def transformers_model(path: Path, dtype: torch.dtype, load_format: str) -> PreTrainedModel:
    if load_format == "auto":
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype).eval()


def transformers_step(model: PreTrainedModel, prompts: torch.Tensor, steps: int) -> float:
    """Seconds per decode step."""
    seconds = []
    for tokens in (1, steps + 1):
        start = time.perf_counter()
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / steps


def winnow_step(llm: LLM, prompts: torch.Tensor, steps: int) -> float:
    """Median seconds of a step in which every sequence decodes."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    for prompt in prompts.tolist():
        llm.submit(prompt, params)
    seconds = []
    while llm.has_unfinished:
        before = llm.stats().generated_tokens, llm.stats().prompt_tokens
        start = time.perf_counter()
        llm.step()
        elapsed = time.perf_counter() - start
        stats = llm.stats()
        if (stats.generated_tokens - before[0], stats.prompt_tokens - before[1]) == (len(prompts), 0):
            seconds.append(elapsed)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="model directory (default: the demo model)"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--load-format", default="auto", choices=LOAD_FORMATS, help="dummy: random weights from config.json"
    )
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens of each sequence")
    parser.add_argument("--steps", type=int, default=48, help="decode steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    model = transformers_model(arguments.model, getattr(torch, arguments.dtype), arguments.load_format)
    generator = torch.Generator().manual_seed(arguments.seed)
    shape = (arguments.sequences, arguments.prompt)
    prompts = torch.randint(3, model.config.vocab_size, shape, generator=generator)
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"{arguments.sequences} sequences, {arguments.prompt} prompt tokens, {arguments.steps} steps, {arguments.dtype}"
    )
    ratios = []
    with LLM(
        arguments.model,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        kv_memory="1GiB",
        max_num_seqs=arguments.sequences,
        enable_prefix_caching=False,  # every round repeats the prompts
    ) as llm:
        for round_number in range(arguments.rounds):
            theirs = transformers_step(model, prompts, arguments.steps)
            ours = winnow_step(llm, prompts, arguments.steps)
            ratios.append(ours / theirs)
            print(
                f"round {round_number + 1}: transformers {theirs * 1e3:6.1f} ms, winnow {ours * 1e3:6.1f} ms, "
                f"ratio {ratios[-1]:.2f}"
            )
    print(f"median ratio {statistics.median(ratios):.2f} (winnow / transformers)")


if __name__ == "__main__":
    main()
