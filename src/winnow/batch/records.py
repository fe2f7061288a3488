"""The record of a line, in the form in which the line asked: flat, with `outputs` where there are several samples, or
OpenAI's object. A line that failed gets an `error` with its line number, a code and a message.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from winnow.batch.lines import DEFAULT_METRIC, BadLine, Job
from winnow.batch.metrics import score
from winnow.openai.answers import AnswerReader
from winnow.openai.errors import ApiError
from winnow.openai.logprobs import cumulative_logprob, finite_logprob, ranked
from winnow.openai.response import ResponseForm, cached_tokens, completion_object, usage_object
from winnow.outputs import CompletionOutput, RequestOutput
from winnow.values.json_values import dump_json
from winnow.values.logprob import Logprob, LogprobDict

Record = dict[str, Any]


def encode(record: Record) -> bytes:
    return dump_json(record, ensure_ascii=False).encode() + b"\n"


def answer_record(job: Job, output: RequestOutput, model: str, created: int, reader: AnswerReader) -> Record:
    """Return the record of a finished request; `model` and `created` (Unix seconds) go into OpenAI's objects."""
    if job.endpoint is None:
        return _flat(job, output)
    form = ResponseForm(job.asked, reader, str(job.index), job.asked.model or model, created)
    body = completion_object(form, [output])
    return _batch_response(job, output.request_id, body, 200, None) | _scored(job, output)


def _batch_response(
    line: Job | BadLine, name: str, body: Record, status: int, error: Record | None
) -> Record:
    response = {"status_code": status, "request_id": name, "body": body}
    carried = {key: value for key, value in line.carried.items() if key != "custom_id"}
    custom_id = line.carried.get("custom_id")
    found = {"id": f"batch_req_{line.index}", "custom_id": custom_id, "response": response, "error": error}
    return found | carried


def error_record(line: Job | BadLine, error: ApiError) -> Record:
    described = {"line": line.number, "code": error.code, "message": str(error)}
    if line.endpoint is None:
        return {"index": line.index, **line.carried, "error": described}
    return _batch_response(line, request_id(line), error.body(), error.status, described)


def request_id(line: Job | BadLine) -> str:
    """Return the engine's name for the request of a line; the same in every run over the file."""
    return f"line-{line.number}"


def _flat(job: Job, output: RequestOutput) -> Record:
    record: Record = {"index": job.index, **job.carried}
    answers = [_flat_answer(answer, job.carried.get("return_kept") is True) for answer in output.outputs]
    if len(answers) == 1:
        record |= answers[0]
    else:
        record["outputs"] = [{"index": index, **answer} for index, answer in enumerate(answers)]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprobs(output.prompt_token_ids, output.prompt_logprobs)
    usage = usage_object(
        len(output.prompt_token_ids),
        sum(len(answer.token_ids) for answer in output.outputs),
        cached_tokens(output),
        [answer.eviction for answer in output.outputs],
        sum(answer.reasoning_tokens for answer in output.outputs),
    )
    return record | {"usage": usage} | _scored(job, output)


def _flat_answer(answer: CompletionOutput, kept: bool) -> Record:
    record: Record = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
    }
    if answer.stop_reason is not None:
        record["stop_reason"] = answer.stop_reason
    if answer.eviction is not None:
        record["eviction"] = answer.eviction.to_json(kept=kept)
    if answer.logprobs is not None:
        record["cumulative_logprob"] = cumulative_logprob(answer)
        record["logprobs"] = _logprobs(answer.token_ids, answer.logprobs)
    return record


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[LogprobDict | None]) -> list[Record | None]:
    """Return per token what it was, and the candidates by rank; None where nothing predicted the token."""
    return [
        None
        if candidates is None
        else {
            **_logprob(token, candidates[token]),
            "top": [_logprob(other, entry) for other, entry in ranked(candidates)],
        }
        for token, candidates in zip(token_ids, logprobs, strict=True)
    ]


def _logprob(token: int, entry: Logprob) -> Record:
    return {"token_id": token, "token": entry.decoded_token, "logprob": finite_logprob(entry)}


def _scored(job: Job, output: RequestOutput) -> Record:
    """Return the score of the first answer against the line's `reference`, 0..1; empty without a reference."""
    if "reference" not in job.carried:
        return {}
    metric = job.carried.get("metric", DEFAULT_METRIC)
    return {"score": score(metric, output.outputs[0].text, [job.carried["reference"]])}


@dataclass
class Tally:
    """Sums over finished records of either form, also those that an earlier run wrote.

    `scores` lists the scores of each category's lines.
    """

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cut_off: int = 0
    """Answers that ended at their `max_tokens`, or at the end of the context."""
    policies: Counter[str] = field(default_factory=Counter)
    """Answers by the policy that they ended under."""
    first_error: str | None = None
    scores: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, record: dict[str, Any]) -> None:
        self.requests += 1
        if record.get("error") is not None:
            self.failed += 1
            said = f"line {record['error']['line']}: {record['error']['message']}"
            self.first_error = self.first_error or said
            if isinstance(record.get("reference"), str):
                self._score(record, 0.0)  # no answer is a wrong one
            return
        answer = record["response"]["body"] if "response" in record else record
        self.prompt_tokens += answer["usage"]["prompt_tokens"]
        self.generated_tokens += answer["usage"]["completion_tokens"]
        answers = answer.get("choices") or answer.get("outputs") or [answer]
        reports = [each.get("eviction") for each in answers]
        self.policies.update("full cache" if each is None else each["policy"] for each in reports)
        self.cut_off += sum(each["finish_reason"] == "length" for each in answers)
        if "score" in record:
            self._score(record, record["score"])

    def _score(self, record: dict[str, Any], score: float) -> None:
        category = record.get("category")  # anything at all, where the line was refused
        self.scores[category if isinstance(category, str) else "all"].append(score)
