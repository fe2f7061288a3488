"""Parameters of a beam search, with vLLM's names."""

from dataclasses import dataclass

from winnow.errors import InvalidRequestError
from winnow.sampling.params import SamplingParams
from winnow.values.checks import check_integer


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`. Names as in vLLM; rules and scores as of transformers' `generate`.

    Attributes:
        beam_width: number of beams, and of answers.
        max_tokens: most tokens of an answer.
        ignore_eos: continue after the model's end-of-sequence token.
        temperature: 0; scores are the model's own logprobs.
        length_penalty: an answer's logprob is divided by its length to this power.
        include_stop_str_in_output: keep the text of the token that ended an answer.
        early_stopping: see `SamplingParams`.

    Raises:
        InvalidRequestError: a field is out of range; names field, value and limit.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, error=InvalidRequestError)
        check_integer("max_tokens", self.max_tokens, 1, error=InvalidRequestError)
        self.to_sampling_params()

    def to_sampling_params(self) -> SamplingParams:
        """Return the same search as parameters of a request."""
        return SamplingParams(
            n=self.beam_width,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )
