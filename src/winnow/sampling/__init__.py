"""How the next token is chosen, how probable it was, and how tokens become text."""

from winnow.sampling.logprobs import Logprob, prompt_logprobs
from winnow.sampling.params import SamplingParams
from winnow.sampling.sampler import Sampler, SamplerOutput
from winnow.sampling.text import TextStream

__all__ = ["Logprob", "Sampler", "SamplerOutput", "SamplingParams", "TextStream", "prompt_logprobs"]
