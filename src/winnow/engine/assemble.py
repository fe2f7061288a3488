"""Assembly of a paged engine around an executor, real or simulated, and the words of its replays."""

from collections.abc import Callable
from functools import cached_property, lru_cache

from winnow.config import EngineConfig
from winnow.engine.admission import Admission
from winnow.engine.engine import Engine
from winnow.engine.executor import Executor, ServedModel
from winnow.engine.memory.memory import Memory
from winnow.engine.scheduling.drafts import DraftSource
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.errors import InvalidRequestError
from winnow.eviction import Instruction, Replay
from winnow.prompt.chat import Tokenizer, apply_template


def assemble(
    executor: Executor,
    model: ServedModel,
    config: EngineConfig,
    clock: Callable[[], float],
    rows: int = 1,
    draft_source: DraftSource | None = None,
) -> Engine:
    """Set up memory, scheduler and admission; a row of the executor's cache stands for `rows` of the model."""
    most = config.eviction.max_round_kvs
    round_kvs = None if most is None else max(most // rows, 1)
    memory = Memory(executor, clock, config.scheduler, config.cache, model.prefix_format, rows)
    scheduler = Scheduler(config.scheduler, executor, clock, memory, round_kvs, draft_source)
    instruct = (lambda *_: Instruction()) if model.tokenizer is None else Instructor(model.tokenizer)
    admission = Admission(memory, scheduler.accounts, config, model, instruct)
    return Engine(executor, scheduler, admission, model, config, clock)


# Stands for a question; no template contains it.
_QUESTION = "\x1dthe question\x1d"


class Instructor:
    """Maker of the `Instruction` that asks a model to repeat its context."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = lru_cache(maxsize=64)(self._encode)

    def __call__(self, replay: Replay, token_ids: list[int]) -> Instruction:
        first, later = (self._words(words and f"\n\n{words}") for words in (replay.first, replay.later))
        before, after = self._template
        written = len(before) if token_ids[: len(before)] == list(before) else 0
        # A prompt with its own system message starts like the template's and then differs.
        templated = written or (len(before) > 1 and token_ids[:2] == list(before[:2]))
        return Instruction(first, later, written, after if templated else ())

    @cached_property
    def _template(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens before and after a user's message; empty without a template."""
        try:
            prompt = apply_template(self._tokenizer, [{"role": "user", "content": _QUESTION}]).text or ""
        except InvalidRequestError:
            return (), ()
        if prompt.count(_QUESTION) != 1:
            return (), ()
        before, after = prompt.split(_QUESTION)
        return self._encode(before), self._encode(after)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()
