"""Choice of the next token, its probability, and the way from tokens to text."""

from typing import TYPE_CHECKING

from winnow.process.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow.sampling.logprobs import prompt_logprobs
    from winnow.sampling.params import SamplingParams
    from winnow.sampling.sampler import Sampler
    from winnow.sampling.sampler_output import SamplerOutput
    from winnow.sampling.text import TextStream
    from winnow.values.logprob import Logprob

__all__ = ["Logprob", "Sampler", "SamplerOutput", "SamplingParams", "TextStream", "prompt_logprobs"]

__getattr__ = lazy_exports(
    __name__,
    {
        "Logprob": "winnow.values.logprob",
        "Sampler": "winnow.sampling.sampler",
        "SamplerOutput": "winnow.sampling.sampler_output",
        "SamplingParams": "winnow.sampling.params",
        "TextStream": "winnow.sampling.text",
        "prompt_logprobs": "winnow.sampling.logprobs",
    },
)
