"""A stage of Ray Data that answers rows, built and used as the LLM processors of Ray are (`ray.data.llm`)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray.data

from winnow.batch.driver import answered_line, failed_line, line_request, served_name
from winnow.batch.lines import BadLine, parse_line
from winnow.batch.reader import RawLine
from winnow.batch.records import request_id
from winnow.config import EngineConfig
from winnow.errors import ConfigError, WinnowError
from winnow.llm import LLM
from winnow.openai.answers import AnswerReader
from winnow.openai.errors import ApiError
from winnow.server.async_engine import AsyncEngine
from winnow.values.json_values import dump_json

Row = dict[str, Any]
Function = Callable[[Row], Row]
_LINE = "__winnow_line"
_ERROR = "__inference_error__"


@dataclass(frozen=True)
class ProcessorConfig:
    """Options of a stage.

    Attributes:
        engine: options of `winnow.LLM`.
        batch_size: rows that are handed to a worker at once.
        concurrency: number of workers, or the least and the most of a pool that grows and shrinks.
        max_concurrent_batches: batches that a worker computes at once, so that it does not idle at the end of each.
        resources: of a worker, in the words of `ray.remote`, such as {"num_cpus": 8} or {"num_gpus": 1}.
        should_continue_on_error: give a row that fails an `__inference_error__`, and not end the dataset with it.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    concurrency: int | tuple[int, int] = 1
    max_concurrent_batches: int = 8
    resources: Mapping[str, Any] = field(default_factory=dict)
    should_continue_on_error: bool = False

    def __post_init__(self) -> None:
        EngineConfig.from_options(dict(self.engine))
        for name in ("batch_size", "max_concurrent_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


def build_processor(
    config: ProcessorConfig, preprocess: Function | None = None, postprocess: Function | None = None
) -> Callable[["ray.data.Dataset"], "ray.data.Dataset"]:
    """Return a function from a dataset to a dataset, which computes nothing until the result is read.

    Args:
        preprocess: from a row to one that holds `prompt` (a text or token ids) or `messages`, and `sampling_params`, a
            mapping; what else it holds reaches `postprocess`. None: rows are of that form.
        postprocess: from a row with `generated_text`, `generated_tokens`, `num_input_tokens` and
            `num_generated_tokens` beside the columns of `preprocess` to a row of the result. None: that row.
    """

    def process(dataset: "ray.data.Dataset") -> "ray.data.Dataset":
        asked = dataset.map(lambda row: _asked(row if preprocess is None else preprocess(row)))
        concurrency = config.concurrency
        pool = (
            ray.data.ActorPoolStrategy(size=concurrency)
            if isinstance(concurrency, int)
            else ray.data.ActorPoolStrategy(min_size=concurrency[0], max_size=concurrency[1])
        )
        answered = asked.map_batches(
            _Stage,
            fn_constructor_args=(dict(config.engine), config.should_continue_on_error),
            batch_size=config.batch_size,
            compute=pool,
            max_concurrency=config.max_concurrent_batches,
            **({"num_cpus": 1} | dict(config.resources)),
        )
        return answered if postprocess is None else answered.map(postprocess)

    return process


class _Stage:
    def __init__(self, options: Mapping[str, Any], should_continue_on_error: bool) -> None:
        config = EngineConfig.from_options(dict(options))
        self._llm = LLM(**options)
        self._reader = AnswerReader.of(self._llm.tokenizer)
        self._model, self._seed = served_name(config.model.model), config.model.seed
        self._engine = AsyncEngine(self._llm.driver)
        self._continues = should_continue_on_error
        self._num_asked = 0

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self._engine.start()
        lines = batch.pop(_LINE)
        first, self._num_asked = self._num_asked, self._num_asked + len(lines)
        places = range(first, self._num_asked)
        numbered = zip(places, lines, strict=True)
        asked = [RawLine(place, place + 1, str(line).encode()) for place, line in numbered]
        records = await asyncio.gather(*map(self._answer, asked))
        answers = list(map(self._columns, records))
        yield batch | {name: _array([answer[name] for answer in answers]) for name in answers[0]}

    async def _answer(self, raw: RawLine) -> Row:
        """Return the record of a line. Raises ApiError: the engine failed, and answers no line any more."""
        job = parse_line(raw, self._llm.conversation_defaults, accounts=True)
        if isinstance(job, BadLine):
            return failed_line(job, job.error)[0]
        name = request_id(job)
        try:
            request = await asyncio.to_thread(line_request, self._llm, self._reader, job, self._seed, name)
            output = [each async for each in await self._engine.submit([request])][-1]
        except WinnowError as error:
            self._engine.require_usable()
            return failed_line(job, ApiError.wrap(error))[0]
        return answered_line(job, output, self._model, int(time.time()), self._reader)[0]

    def _columns(self, record: Row) -> Row:
        error = record.get("error")
        if error is not None and not self._continues:
            raise ValueError(f"a row failed: {error['message']} (should_continue_on_error keeps the others)")
        found = {
            "generated_text": record.get("text", ""),
            "generated_tokens": record.get("token_ids", []),
            "num_input_tokens": record["usage"]["prompt_tokens"] if error is None else 0,
            "num_generated_tokens": record["usage"]["completion_tokens"] if error is None else 0,
        }
        return found | ({_ERROR: "" if error is None else error["message"]} if self._continues else {})


def _asked(row: Row) -> Row:
    """Return a row with the line that asks for its answer; sampling parameters and messages stand in it alone."""
    line = {name: _plain(row[name]) for name in ("prompt", "messages") if row.get(name) is not None}
    line |= _plain(row.get("sampling_params") or {})
    rest = {name: value for name, value in row.items() if name not in ("messages", "sampling_params")}
    return rest | {_LINE: dump_json(line)}


def _plain(value: Any) -> Any:
    """Return what came through Arrow as JSON has it: lists for arrays, and mappings without the columns of others."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _array(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        array = np.empty(len(values), dtype=object)
        array[:] = [np.array(value, dtype=np.int64) for value in values]
        return array
    return np.array(values)
