"""What the `anthropic` client can ask, unmodified. Exit code 1 if a case fails.

Usage: anthropic_client.py URL MODEL
"""

import sys
from typing import Any

import anthropic
from cases import run_cases

MESSAGES: list[Any] = [{"role": "user", "content": "What is the name of the dog?"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather of a place",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Paris", "Rome"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


class Cases:
    def __init__(self, url: str, model: str) -> None:
        self._client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        self._asked: dict[str, Any] = {"model": model, "max_tokens": 8, "messages": MESSAGES}

    def message(self) -> None:
        found = self._client.messages.create(**self._asked)
        assert found.role == "assistant" and found.type == "message" and found.id.startswith("msg_")
        assert found.stop_reason in ("max_tokens", "end_turn") and 0 < found.usage.output_tokens <= 8
        assert all(each.type == "text" for each in found.content)

    def stream(self) -> None:
        with self._client.messages.stream(**self._asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        assert "content_block_start" in kinds and "message_delta" in kinds
        assert final.usage.output_tokens > 0

    def text_stream(self) -> None:
        with self._client.messages.stream(**self._asked) as stream:
            text = "".join(stream.text_stream)
            assert text == stream.get_final_text()

    def raw_stream(self) -> None:
        kinds = [event.type for event in self._client.messages.create(**self._asked, stream=True)]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"

    def system_and_turns(self) -> None:
        turns = [
            *MESSAGES,
            {"role": "assistant", "content": "Rex."},
            {"role": "user", "content": "And the cat?"},
        ]
        system = [{"type": "text", "text": "You know animals.", "cache_control": {"type": "ephemeral"}}]
        found = self._client.messages.create(**self._asked | {"messages": turns, "system": system})
        assert found.usage.output_tokens > 0

    def cached_turns(self) -> None:
        long = [{"role": "user", "content": "The dog is brown. " * 40}]
        first = self._client.messages.create(**self._asked | {"messages": long})
        again = self._client.messages.create(**self._asked | {"messages": long})
        assert again.usage.cache_read_input_tokens, "a prompt that was asked before is found"
        total = [
            each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) for each in (first, again)
        ]
        assert total[0] == total[1]

    def count_tokens(self) -> None:
        counted = self._client.messages.count_tokens(
            model=self._asked["model"], messages=MESSAGES, system="You know animals."
        )
        usage = self._client.messages.create(**self._asked, system="You know animals.").usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    def stop_sequences(self) -> None:
        found = self._client.messages.create(**self._asked | {"max_tokens": 64}, stop_sequences=["e", "a"])
        assert found.stop_reason in ("stop_sequence", "end_turn", "max_tokens")
        assert found.stop_reason != "stop_sequence" or found.stop_sequence in ("e", "a")

    def tools(self) -> None:
        choice: Any = {"type": "tool", "name": "get_weather"}
        first = self._client.messages.create(
            **self._asked | {"max_tokens": 64}, tools=[TOOL], tool_choice=choice
        )
        [call] = [each for each in first.content if each.type == "tool_use"]
        assert first.stop_reason == "tool_use" and call.name == "get_weather"
        assert call.input["place"] in ("Paris", "Rome")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}
        turns = [
            *MESSAGES,
            {"role": "assistant", "content": [each.model_dump() for each in first.content]},
            {"role": "user", "content": [result]},
        ]
        second = self._client.messages.create(**self._asked | {"messages": turns}, tools=[TOOL])
        assert second.usage.output_tokens > 0

    def tools_stream(self) -> None:
        choice: Any = {
            "type": "any",
            "disable_parallel_tool_use": True,
        }  # else it makes calls until it is cut
        with self._client.messages.stream(
            **self._asked | {"max_tokens": 64}, tools=[TOOL], tool_choice=choice
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        assert "input_json" in kinds and final.content[-1].type == "tool_use"

    def errors(self) -> None:
        for kind, change in (
            (anthropic.NotFoundError, {"model": "no-such-model"}),
            (anthropic.BadRequestError, {"max_tokens": 0}),
            (anthropic.BadRequestError, {"messages": []}),
        ):
            try:
                self._client.messages.create(**self._asked | change)
            except kind as error:
                body: Any = error.body
                assert error.request_id and body["type"] == "error"
            else:
                raise AssertionError(f"{change} was taken")


if __name__ == "__main__":
    sys.exit(run_cases(Cases(*sys.argv[1:3])))
