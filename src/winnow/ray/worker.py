"""An engine that takes lines one by one and answers each as soon as it is finished."""

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from winnow.batch.driver import answered_line, failed_line, line_request, served_name
from winnow.batch.lines import BadLine, parse_line
from winnow.batch.reader import RawLine
from winnow.batch.records import request_id
from winnow.config import EngineConfig
from winnow.errors import WinnowError
from winnow.llm import LLM
from winnow.openai.answers import AnswerReader
from winnow.openai.errors import ApiError
from winnow.server.async_engine import AsyncEngine


class LineWorker:
    """Server of lines of a file from an engine of its own, for the tasks of one event loop.

    Args:
        options: of the engine, as `LLM` takes them.
        defaults: sampling parameters of lines that do not say, before what the model's makers recommend.
    """

    def __init__(self, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        config = EngineConfig.from_options(dict(options))
        self._llm = LLM(**options)
        self._defaults = {**self._llm.sampling_defaults, **defaults}
        self._reader = AnswerReader.of(self._llm.tokenizer)
        self._model, self._seed = served_name(config.model.model), config.model.seed
        self._engine = AsyncEngine(self._llm.driver)
        self._numbers = itertools.count()

    async def wait_started(self) -> None:
        """Return once the model is loaded: calls of an actor begin when it is made."""

    async def answer(self, raw: RawLine) -> bytes:
        """Return the record of a line as a line of JSON. Raises ApiError: the engine failed, and answers no line any
        more."""
        self._engine.start()
        job = parse_line(raw, self._defaults, accounts=True)
        if isinstance(job, BadLine):
            return failed_line(job, job.error)[1]
        try:
            # A line may be asked for twice: by a call that was lost, and again.
            name = f"{request_id(job)}-{next(self._numbers)}"
            request = await asyncio.to_thread(line_request, self._llm, self._reader, job, self._seed, name)
            stream = await self._engine.submit([request])
            output = [each async for each in stream][-1]
        except WinnowError as error:
            self._engine.require_usable()
            return failed_line(job, ApiError.wrap(error))[1]
        output = replace(output, request_id=request_id(job))
        return answered_line(job, output, self._model, int(time.time()), self._reader)[1]
