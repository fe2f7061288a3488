"""The record of a line, in the form in which the line asked.

Flat lines get `{"index", ..., "text", "token_ids", "finish_reason", "usage"}`, or `outputs` with several samples; Batch
lines get OpenAI's objects. A line that failed gets an `error` with its line number, a code and a message.
"""

from typing import Any

from winnow.cli.batch.errors import FAILED, INTERNAL, LineError
from winnow.cli.batch.lines import DEFAULT_METRIC, BadLine, Form, Job
from winnow.cli.batch.logprobs import (
    chat_logprobs,
    completion_logprobs,
    cumulative_logprob,
    flat_logprobs,
)
from winnow.evaluate.metrics import score
from winnow.json_values import dump_json
from winnow.outputs import CompletionOutput, RequestOutput

Record = dict[str, Any]


def encode(record: Record) -> bytes:
    """The line of the output file that holds `record`."""
    return dump_json(record, ensure_ascii=False).encode() + b"\n"


def answer_record(job: Job, output: RequestOutput, model: str, created: int) -> Record:
    """The record of a finished request; `model` and `created` (Unix seconds) go into OpenAI's objects."""
    if job.form is Form.FLAT:
        return _flat(job, output)
    body = _chat_body(job, output) if job.form is Form.CHAT else _completion_body(job, output)
    head = {
        "id": body.pop("id"),
        "object": body.pop("object"),
        "created": created,
        "model": job.model or model,
    }
    response = {"status_code": 200, "request_id": output.request_id, "body": head | body}
    return _batch_head(job) | {"response": response, "error": None} | _carried(job) | _scored(job, output)


def error_record(line: Job | BadLine, error: LineError) -> Record:
    """The record of a line that cannot be run."""
    told = {"line": line.number, "code": error.code, "message": str(error)}
    if line.form is Form.FLAT:
        return {"index": line.index, **line.carried, "error": told}
    ours = error.code in (INTERNAL, FAILED)
    kind, status = ("server_error", 500) if ours else ("invalid_request_error", 400)
    body = {"message": str(error), "type": kind, "param": None, "code": error.code}
    response = {"status_code": status, "request_id": request_id(line), "body": {"error": body}}
    return _batch_head(line) | {"response": response, "error": told} | _carried(line)


def request_id(line: Job | BadLine) -> str:
    """The engine's name for the request of a line; the same in every run over the file."""
    return f"line-{line.number}"


def _flat(job: Job, output: RequestOutput) -> Record:
    record: Record = {"index": job.index, **job.carried}
    answers = [_flat_answer(answer) for answer in output.outputs]
    if len(answers) == 1:
        record |= answers[0]
    else:
        record["outputs"] = [{"index": index, **answer} for index, answer in enumerate(answers)]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = flat_logprobs(output.prompt_token_ids, output.prompt_logprobs)
    return record | {"usage": _usage(output)} | _scored(job, output)


def _flat_answer(answer: CompletionOutput) -> Record:
    told: Record = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
    }
    if answer.stop_reason is not None:
        told["stop_reason"] = answer.stop_reason
    if answer.eviction is not None:
        told["eviction"] = answer.eviction.to_json()
    if answer.logprobs is not None:
        told["cumulative_logprob"] = cumulative_logprob(answer)
        told["logprobs"] = flat_logprobs(answer.token_ids, answer.logprobs)
    return told


def _batch_head(line: Job | BadLine) -> Record:
    return {"id": f"batch_req_{line.index}", "custom_id": line.carried.get("custom_id")}


def _carried(line: Job | BadLine) -> Record:
    return {key: value for key, value in line.carried.items() if key != "custom_id"}


def _chat_body(job: Job, output: RequestOutput) -> Record:
    choices = [
        {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": chat_logprobs(answer),
            "finish_reason": answer.finish_reason,
        }
        for answer in output.outputs
    ]
    return {
        "id": f"chatcmpl-{job.index}",
        "object": "chat.completion",
        "choices": choices,
        "usage": _usage(output),
    }


def _completion_body(job: Job, output: RequestOutput) -> Record:
    choices = [
        {
            "index": answer.index,
            "text": answer.text,
            "logprobs": completion_logprobs(answer),
            "finish_reason": answer.finish_reason,
        }
        for answer in output.outputs
    ]
    return {
        "id": f"cmpl-{job.index}",
        "object": "text_completion",
        "choices": choices,
        "usage": _usage(output),
    }


def _usage(output: RequestOutput) -> Record:
    prompt = len(output.prompt_token_ids)
    answer = sum(len(answer.token_ids) for answer in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _scored(job: Job, output: RequestOutput) -> Record:
    """The score of the first answer against the line's `reference`, 0..1; nothing where there is no reference."""
    if "reference" not in job.carried:
        return {}
    metric = job.carried.get("metric", DEFAULT_METRIC)
    return {"score": score(metric, output.outputs[0].text, [job.carried["reference"]])}
