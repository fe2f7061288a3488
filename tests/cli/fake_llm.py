"""An engine without a model: answers a prompt with its letters reversed, in an order of its own."""

import random
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from winnow.config import EngineConfig
from winnow.errors import CapacityError, ContextLengthError
from winnow.llm import LLM
from winnow.outputs import AgreementRecord, CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from winnow.prompt.chat import TokenizedPrompt
from winnow.sampling import Logprob, SamplingParams

CONTEXT = 200


class FakeLLM:
    """One request finishes per step, picked at random; text is a token per letter."""

    device = SimpleNamespace(type="fake")
    max_model_len = CONTEXT
    sampling_defaults: Mapping[str, Any] = MappingProxyType({"temperature": 1.0})
    conversation_defaults = LLM.conversation_defaults
    tokenizer = None
    weight_bytes, program_bytes = 3 * 2**20, 2**30
    dtype, weight_dtype, stored_kind = torch.bfloat16, "auto", "Q4_1"
    interrupted_after: int | None = None
    """Ctrl-C comes in the step after so many."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_options({"model": model, **options})
        self.submitted: list[str] = []
        self.params: dict[str, SamplingParams] = {}
        self.accounts: dict[str, tuple[str | None, int]] = {}
        self.most_waiting = 0
        self._steps = 0
        self._waiting: dict[str, list[int]] = {}
        self._random = random.Random(len(options))
        self._prompt_tokens = self._generated_tokens = 0

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._waiting.clear()

    def tokenize(self, prompt: Any) -> TokenizedPrompt:
        is_text = isinstance(prompt, str)
        tokens = [ord(letter) for letter in prompt] if is_text else list(prompt)
        if len(tokens) > CONTEXT:
            raise ContextLengthError(f"prompt must be at most {CONTEXT} tokens, got {len(tokens)}")
        return TokenizedPrompt(prompt if is_text else None, tokens)

    def tokenize_chat(self, messages: Any, template: Any = None, tenant: Any = None) -> TokenizedPrompt:
        text = "".join(message["content"] for message in messages)
        return TokenizedPrompt(text, [ord(letter) for letter in text])

    def new_request(
        self, prompt: TokenizedPrompt, params: Any, request_id: str | None = None, **options: Any
    ) -> Any:
        return SimpleNamespace(prompt=prompt, params=params, request_id=request_id, **options)

    def submit_all(self, requests: Any) -> None:
        for each in requests:
            if each.prompt.text == "huge":
                raise CapacityError("the request needs more than kv_memory")
            self.submitted.append(each.request_id)
            self.params[each.request_id] = each.params
            self.accounts[each.request_id] = each.tenant, each.priority
            self._waiting[each.request_id] = each.prompt.token_ids
            self.most_waiting = max(self.most_waiting, len(self._waiting))

    def stream(self, prompt: str, params: SamplingParams) -> Any:
        self.params["stream"] = params
        answer = prompt[::-1]
        for end in range(1, len(answer) + 1):
            yield self._output("stream", [ord(letter) for letter in prompt], answer[:end], params)

    def stream_chat(self, messages: Any, params: SamplingParams, session_id: str | None = None) -> Any:
        return self.stream("".join(f"<{m['role']}>{m['content']}" for m in messages), params)

    def step(self) -> list[RequestOutput]:
        if self._steps == self.interrupted_after:
            raise KeyboardInterrupt
        self._steps += 1
        name = self._random.choice(sorted(self._waiting))
        tokens = self._waiting.pop(name)
        answer = "".join(map(chr, reversed(tokens)))
        self._prompt_tokens += len(tokens)
        self._generated_tokens += len(tokens)
        return [self._output(name, tokens, answer, self.params[name])]

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def implementation(self) -> dict[str, str]:
        return {"layers": "Fake", "attention": "NoBackend", "KVs": "int8"}

    def kv_bytes(self, num_kvs: int) -> int:
        return 1024 * num_kvs

    def check_answers(self) -> AgreementRecord:
        return AgreementRecord(checked=20, equal=18, tokens=400, agreed=390, lines=["line-7", "line-31"])

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._waiting),
            kv_bytes_peak=2048,
            kv_bytes_budget=4096,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=3,
        )

    def _output(self, name: str, prompt: list[int], answer: str, params: SamplingParams) -> RequestOutput:
        token_ids = [ord(letter) for letter in answer]
        logprobs = None
        if params.logprobs is not None:
            logprobs = [
                {t: Logprob(-0.5, 1, chr(t)), t + 1: Logprob(float("-inf"), 2, chr(t + 1))} for t in token_ids
            ]
        outputs = [
            CompletionOutput(index, answer, token_ids, -0.5 * len(token_ids), logprobs, "stop")
            for index in range(params.n)
        ]
        return RequestOutput(name, None, prompt, outputs, True, RequestMetrics(arrival_time=0.0))
