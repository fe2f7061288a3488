"""The model that lm_eval sees: its requests as Winnow's, scored and answered under eviction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from winnow.errors import EvaluationError
from winnow.eviction import resolve_policy
from winnow.sampling import SamplingParams
from winnow.values.eviction_request import OWN_AMOUNT, Amount
from winnow_lab.bench.answering import run_all
from winnow_lab.evaluate.likelihood import Keeping, Likelihood, Pair, loglikelihoods, rolling_pairs
from winnow_lab.evaluate.lm_eval.generation import sampling_for

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from winnow.llm import LLM

_MAX_TOKENS = 256  # of an answer, where a task says nothing: lm_eval's own default


@register_model("winnow")
class WinnowLM(TemplateLM):
    """A Winnow engine as a model of lm_eval.

    A continuation is scored by forced decoding after its context was computed and cut, so that policies show: a policy
    judges the context given, and never sees the continuation. Contexts that several continuations share, as in multiple
    choice, are computed once.

    Args:
        llm: needs a tokenizer. Its scheduler forms the batches; batch sizes of lm_eval mean nothing here.
        keeping: what stays of each context; None: what the engine was opened with.
        rolling_context: tokens of context before each stretch of a text that is scored as a whole
            (`loglikelihood_rolling`), which is as long; None: half of what the model takes.
    """

    backend = "causal"

    def __init__(
        self,
        llm: "LLM",
        keeping: Keeping | None = None,
        rolling_context: int | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        if llm.tokenizer is None:
            raise EvaluationError("lm_eval gives text: the model's directory has no tokenizer")
        self.llm = llm
        self.tokenizer: Any = llm.tokenizer
        self._on_step = on_step
        self._keeping = keeping or _engine_keeping(llm)
        most = self.max_length // 2
        self._rolling_context = most if rolling_context is None else rolling_context
        if not 1 <= self._rolling_context <= most:
            raise EvaluationError(f"rolling_context must be between 1 and {most}, got {rolling_context}")

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Self:
        """Create a model from `model_args`: options of `winnow.LLM`, such as model, eviction, compression, kv_memory.

        Of `additional_config` a device is taken, as in lm_eval's other models.
        """
        from winnow.llm import LLM

        options = {name: value for name, value in arg_dict.items() if name != "rolling_context"}
        device = (additional_config or {}).get("device")
        if device is not None:
            options.setdefault("device", device)
        return cls(LLM(**options), rolling_context=arg_dict.get("rolling_context"))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """Do as `create_from_arg_obj` does, from "name=value,name=value"."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # -- what lm_eval asks about the model -------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context."""
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self.llm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special tokens as the tokenizer puts them, unless the text begins with its own already."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = bos is None or not string.startswith(bos)  # chat templates write it
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if not self.tokenizer.chat_template:
            raise EvaluationError("the model has no chat template: leave --apply-chat-template out")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                enable_thinking=False,  # templates that know it not ignore it
            )
        )

    # -- what lm_eval asks of the model ----------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Each continuation's logprob, and whether it is greedy; a context that is too long loses its front."""
        pairs = [self._fit(context, continuation) for _, context, continuation in requests]
        results = [(each.total, each.is_greedy) for each in self._score(pairs)]
        for (texts, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        """The logprob of each text as a whole, in stretches after a context each; see `rolling_pairs`."""
        cut = [self._stretches(request.args[0]) for request in requests]
        found = iter(self._score([pair for pairs in cut for pair in pairs]))
        results = [sum(next(found).total for _ in pairs) for pairs in cut]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Answers' text, up to the first of the task's stop strings; a prompt too long loses its front."""
        texts: dict[int, str] = {}
        submitted = (
            (self.llm.submit(*self._ask(*request.args), final_only=True), index)
            for index, request in enumerate(requests)
        )
        for index, output in run_all(self.llm, submitted, self._on_step):
            texts[index] = output.outputs[0].text
            self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
        return [texts[index] for index in range(len(requests))]

    def _score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        return loglikelihoods(self.llm, pairs, self._keeping, on_step=self._on_step)

    def _ask(self, context: str, asked: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
        keeping = self._keeping
        default = min(_MAX_TOKENS, self.max_length - 1)
        params = sampling_for(asked, default, eviction=keeping.policy, **vars(keeping.amount))
        assert params.max_tokens is not None, "a task's own, or the default"
        room = self.max_length - params.max_tokens
        if room < 1:
            raise EvaluationError(
                f"max_gen_toks must be below the model's context of {self.max_length} tokens, got {params.max_tokens}"
            )
        return (self.tok_encode(context) or [self.prefix_token_id])[-room:], params

    def _fit(self, context: list[int], continuation: list[int]) -> Pair:
        room = self.max_length - len(continuation)
        if room < 1:
            raise EvaluationError(
                f"a continuation must leave room for a context within {self.max_length} tokens (max_model_len), "
                f"got {len(continuation)}"
            )
        return Pair(tuple(context[-room:]), tuple(continuation))

    def _stretches(self, text: str) -> list[Pair]:
        tokens = self.tok_encode(text, add_special_tokens=False)
        return rolling_pairs(tokens, self.prefix_token_id, self._rolling_context)


def _engine_keeping(llm: "LLM") -> Keeping:
    """What the engine was opened with, less rounds that depend on what else runs."""
    own = resolve_policy(llm.config.eviction)
    policy = replace(own.policy, when=own.policy.when.alone)
    amount = Amount(kv_budget=own.default_budget) if own.amount == OWN_AMOUNT else own.amount
    return Keeping(policy, amount)
