"""Scripts in the manner of vLLM's offline examples, with `from winnow import` in place of `from vllm import`."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tokenizer_kinds import byte_level

from winnow import (
    LLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from winnow.config import ModelConfig
from winnow.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from winnow.models.load.loader import pack_model
from winnow.sampling.params import RequestOutputKind

PROMPTS = [
    "Question: What is the capital of France?\nAnswer:",
    "Once upon a time",
    "The president of the United States is",
    "The future of AI is",
]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model, opened by the constructor's line of many a script."""
    options: dict[str, Any] = {"tensor_parallel_size": 1, "enforce_eager": True, "trust_remote_code": False}
    with LLM(dtype="float", kv_memory="64MiB", threads=1, max_model_len=512, seed=0, **options) as opened:
        yield opened


def test_basic(llm: LLM) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.outputs[0].text
        assert len(output.outputs[0].token_ids) <= 16, "vLLM's default of max_tokens"


def test_chat(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "The capital of France is Paris.\n"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    alone = llm.chat(conversation, GREEDY, use_tqdm=False)
    both = llm.chat([conversation, conversation], sampling_params=GREEDY, chat_template_content_format="auto")
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert [output.prompt for output in both] == [text, text]
    assert alone[0].prompt_token_ids == tokenizer.encode(str(text), add_special_tokens=False)
    assert both[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    [other] = llm.chat(conversation[1:], GREEDY, chat_template=template)
    assert other.prompt == "[user] What is the capital of France?"


def test_parameters_that_are_changed(llm: LLM) -> None:
    """generate.py and chat.py; a request keeps what it was made with."""
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens, params.ignore_eos = 0, 3, True  # type: ignore[misc]
    name = llm.submit(PROMPTS[1], params, final_only=True)
    params.max_tokens = 5  # type: ignore[misc]
    [changed] = llm.generate(PROMPTS[1], params)
    [kept] = llm.step()
    assert kept.request_id == name
    assert [len(each.outputs[0].token_ids) for each in (kept, changed)] == [3, 5]


def test_a_list_of_sampling_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n + 1, ignore_eos=True) for n in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_structured_outputs(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 22]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    forms = [
        StructuredOutputsParams(choice=["Positive", "Negative"]),
        StructuredOutputsParams(regex=r"[a-c]{2,4}@x\.com"),
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(grammar='root ::= "SELECT " column\ncolumn ::= "col_1" | "col_2"\n'),
    ]
    params = [SamplingParams(temperature=0, max_tokens=100, structured_outputs=form) for form in forms]
    choice, regex, answer, query = (output.outputs[0].text for output in llm.generate(["A:"] * 4, params))
    assert query in ("SELECT col_1", "SELECT col_2")
    assert choice in ("Positive", "Negative")
    assert re.fullmatch(r"[a-c]{2,4}@x\.com", regex)
    assert set(json.loads(answer)) == {"name", "age"} and json.loads(answer)["age"] in (1, 22)


def test_automatic_prefix_caching(llm: LLM) -> None:
    prefix = "You are an expert school principal, skilled in managing faculty and staff. " * 4
    prompts = [prefix + prompt for prompt in PROMPTS]
    llm.generate(prompts[0], GREEDY)
    cached = llm.generate(prompts, GREEDY)
    assert all(output.num_cached_tokens > 16 for output in cached)
    assert llm.reset_prefix_cache()
    computed = llm.generate(prompts[0], GREEDY)[0]
    assert computed.num_cached_tokens == 0
    assert computed.outputs[0].token_ids == cached[0].outputs[0].token_ids
    llm.check_integrity()


def test_chat_with_tools(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}{{ messages[-1].content }}{{ mood }}"
    )
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)
    tools = [{"type": "function", "function": {"name": "get_current_weather", "parameters": {}}}]
    messages = [{"role": "user", "content": "Weather in Dallas?"}]
    [output] = llm.chat(messages, GREEDY, tools=tools, chat_template_kwargs={"mood": "!"}, lora_request=None)  # type: ignore[call-arg]
    assert output.prompt == "<get_current_weather>Weather in Dallas?!"


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)
    [output] = llm.generate(PROMPTS[1], params)
    answer = output.outputs[0]
    assert answer.logprobs is not None and output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) and output.prompt_logprobs[0] is None
    for token, at in zip(answer.token_ids, answer.logprobs, strict=True):
        assert at is not None and at[token].rank == 1
        assert at[token].logprob == max(each.logprob for each in at.values())
        assert sorted(each.rank for each in at.values()) == [1, 2, 3]
    assert answer.cumulative_logprob == pytest.approx(
        sum(at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True) if at)
    )


@pytest.mark.parametrize("method", ["embed", "encode", "classify", "score", "reward"])
def test_embeddings_are_refused_in_one_line(llm: LLM, method: str) -> None:
    with pytest.raises(
        AttributeError, match=f"^LLM has no '{method}': text is generated; embeddings, scores"
    ):
        getattr(llm, method)(PROMPTS)
    with pytest.raises(ConfigError, match="text is generated; embeddings"):
        LLM(**{"runner": "pooling"})


def test_prompt_token_ids(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPTS[1])
    prompts = [TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt=PROMPTS[1]), {"prompt_token_ids": ids}]
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert answers == [answers[0]] * 3
    for key, word in (("mm_processor_kwargs", "pictures are"), ("cache_salt", "tenant= of generate")):
        with pytest.raises(InvalidRequestError, match=f"{key}=.*: {word}"):
            llm.generate({"prompt": PROMPTS[1], key: {"image": 1}}, GREEDY)
    with pytest.raises(InvalidRequestError, match=r"unknown key of a prompt 'promt'; did you mean prompt\?"):
        llm.generate({"promt": PROMPTS[1]}, GREEDY)


def test_what_no_answer_depends_on(llm: LLM) -> None:
    """`lora_request=None` and the like pass; what asks for something else is refused by what Winnow has."""
    harmless: dict[str, Any] = {"lora_request": None, "use_tqdm": True, "tokenization_kwargs": None}
    assert llm.generate(PROMPTS[:1], GREEDY, **harmless)
    for given, message in (
        ({"lora_request": object()}, "lora_request=.*: adapters are not served"),
        ({"prompt_token_ids": [1]}, r"prompt_token_ids=\[1\]: a prompt may be a list of token ids"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate(PROMPTS[:1], GREEDY, **given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        llm.generate(PROMPTS[:1], GREEDY, **{"nonsense": 1})


def test_step_by_step(llm: LLM) -> None:
    """The loop of llm_engine_example.py, with `submit` for `add_request` and `has_unfinished`."""
    waiting = [
        (
            "A robot may not injure a human being",
            SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1),
        ),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        (
            "What is the meaning of life?",
            SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
        ),
    ]
    prompts, finished = dict(enumerate(prompt for prompt, _ in waiting)), {}
    while waiting or llm.has_unfinished:
        if waiting:
            llm.submit(*waiting.pop(0), request_id=str(len(prompts) - len(waiting) - 1))
        for output in llm.step():
            if output.finished:
                finished[int(output.request_id)] = output
    assert {number: output.prompt for number, output in finished.items()} == prompts
    assert [len(finished[number].outputs) for number in prompts] == [1, 1, 2]
    with pytest.raises(InvalidRequestError, match="best_of=5: n answers are returned: sample more"):
        SamplingParams(**{"n": 2, "best_of": 5, "temperature": 0.8})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 2}},
            "method must be one of ngram, draft_model, mtp, got 'eagle3'",
        ),
        (
            {"enable_lora": True, "max_loras": 1},
            "adapters are not served side by side: the option lora merges one into the weights",
        ),
        ({"pipeline_parallel_size": 4}, "a model is cut over devices by tensor_parallel_size"),
        ({"hf_overrides": {"rope_parameters": {"factor": 4.0}}}, "edit a copy of it"),
        ({"enable_sleep_mode": True}, r"LLM\.close\(\) frees the memory"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, "winnow prefix save"),
    ],
)
def test_constructors_that_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    """spec_decode, multilora_inference, context_extension, sleep mode and disaggregated prefill."""
    with pytest.raises(ConfigError, match=message) as refusal:
        LLM(**options)
    assert str(refusal.value).startswith(next(iter(options))) and "\n" not in str(refusal.value)


def test_images_are_refused_in_one_line(llm: LLM) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "text", "text": "What is the content of this image?"},
    ]
    with pytest.raises(InvalidRequestError, match="models of type llama have no vision tower") as refusal:
        llm.chat([{"role": "user", "content": content}], GREEDY)
    assert "\n" not in str(refusal.value)


def test_metrics_and_profiles(llm: LLM) -> None:
    """metrics.py: counters and gauges under vLLM's names."""
    from winnow.v1.metrics.reader import Counter, Gauge  # type: ignore[import-not-found]

    with pytest.raises(AttributeError, match=r"^LLM has no 'start_profile': winnow bench"):
        llm.start_profile()  # type: ignore[attr-defined]
    before = {metric.name: metric for metric in llm.get_metrics()}
    outputs = llm.generate(PROMPTS, GREEDY)
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    after: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    name = "vllm:generation_tokens"
    assert isinstance(after[name], Counter) and after[name].value - before[name].value == generated
    assert isinstance(after["vllm:num_requests_running"], Gauge)
    assert after["vllm:num_requests_running"].value == 0 and after[name].labels["engine"] == "0"


def test_bad_words(llm: LLM) -> None:
    """A word's last token does not follow its first ones, and the rest of the answer may."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [output] = llm.generate(PROMPTS[1], free)
    said = output.outputs[0]
    for length in (1, 2, 3):
        word = tokenizer.decode(said.token_ids[4 : 4 + length])
        [without] = llm.generate(
            PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=[word])
        )
        ids = tokenizer.encode(word, add_special_tokens=False)
        found = without.outputs[0].token_ids
        assert all(found[at : at + len(ids)] != ids for at in range(len(found))), (word, found)
        assert found != said.token_ids
    [same] = llm.generate(
        PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=["zebra zebra"])
    )
    assert same.outputs[0].token_ids == said.token_ids
    for words in ([""], [3], "  ", [["a"]]):
        with pytest.raises(InvalidRequestError, match="bad_words must be texts"):
            SamplingParams(bad_words=words)  # type: ignore[arg-type]


def test_modules_of_vllms_names() -> None:
    import winnow
    from winnow.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
    from winnow.inputs import TextPrompt as Text  # type: ignore[import-not-found]
    from winnow.sampling_params import (
        RequestOutputKind as Kind,  # type: ignore[import-not-found]
        SamplingParams as Params,
    )
    from winnow.usage.usage_lib import UsageContext  # type: ignore[import-not-found]
    from winnow.utils import FlexibleArgumentParser, random_uuid  # type: ignore[import-not-found]

    assert Params is SamplingParams and Text is TextPrompt and random_uuid() != random_uuid()
    assert Kind.DELTA == 1 and Kind is RequestOutputKind and UsageContext.LLM_CLASS
    assert {"LLM", "LLMEngine", "AsyncLLMEngine", "SamplingParams"} <= set(dir(winnow))
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="somewhere")
    args = parser.parse_args(["--max_model_len=128", "--enforce-eager", "--swap_space", "2"])
    assert isinstance(EngineArgs(**vars(EngineArgs.from_cli_args(args))), EngineArgs)
    made = AsyncEngineArgs.from_cli_args(args)
    assert (made.model, made.max_model_len, made.kv_offloading_size) == ("somewhere", 128, 2 * 2**30)
    with pytest.raises(ImportError, match=r"LoRARequest.*adapters are not served"):
        from winnow.lora.request import LoRARequest  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        import winnow.sampling_parms  # type: ignore[import-not-found]


def test_engines() -> None:
    """llm_engine_example.py and async_llm_streaming.py."""
    from winnow.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]

    args = EngineArgs(dtype="float", kv_memory="64MiB", threads=1, max_model_len=512, trust_remote_code=True)
    engine = LLMEngine.from_engine_args(args)
    waiting, finished = list(PROMPTS), {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            engine.add_request(str(len(waiting)), waiting.pop(0), GREEDY)
        finished |= {each.request_id: each for each in engine.step() if each.finished}
    assert len(finished) == len(PROMPTS) and engine.get_num_unfinished_requests() == 0
    expected = finished["4"].outputs[0]
    streaming = AsyncLLM(engine.llm)

    async def pieces(kind: int, name: str) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=8, output_kind=kind)
        return [
            output.outputs[0]
            async for output in streaming.generate(request_id=name, prompt=PROMPTS[0], sampling_params=params)
        ]

    async def main() -> list[list[Any]]:
        return await asyncio.gather(*(pieces(kind, f"request {kind}") for kind in RequestOutputKind))

    cumulative, deltas, final = asyncio.run(main())
    streaming.shutdown()
    assert "".join(each.text for each in deltas) == cumulative[-1].text == final[0].text == expected.text
    assert len(final) == 1 < len(deltas)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_generation_is_paused(llm: LLM, mode: str) -> None:
    """pause_resume.py: nothing is computed before it is resumed, and kept requests finish as without the pause."""
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    [alone] = llm.generate(PROMPTS[0], params)
    engine = AsyncLLMEngine(llm)

    async def main() -> None:
        got: list[Any] = []
        begun = asyncio.Event()

        async def read(name: str) -> list[Any]:
            found = []
            async for output in engine.generate(PROMPTS[0], params, name):
                found.append(output.outputs[0])
                got.append(name)
                begun.set()
            return found

        first = asyncio.create_task(read("first"))
        await begun.wait()
        with pytest.raises(InvalidRequestError, match="mode must be abort, wait or keep, got 'drop'"):
            await engine.pause_generation(mode="drop")
        assert not await engine.is_paused()
        await engine.pause_generation(mode=mode)
        assert await engine.is_paused()
        await asyncio.sleep(0.05)
        seen = len(got)
        second = asyncio.create_task(read("second"))
        await asyncio.sleep(0.2)
        assert len(got) == seen and "second" not in got and first.done() == (mode != "keep")
        await engine.resume_generation()
        answers = [
            [token for piece in pieces for token in piece.token_ids]
            for pieces in await asyncio.gather(first, second)
        ]
        whole = alone.outputs[0].token_ids
        assert answers[1] == whole and answers[0] == whole[: len(answers[0])]
        assert (len(answers[0]) == len(whole)) == (mode != "abort")
        reason = (await first)[-1].finish_reason
        assert reason == ("abort" if mode == "abort" else "length") and not await engine.is_paused()
        engine._serving.end()  # type: ignore[union-attr]  # the LLM is others' too

    asyncio.run(main())
    llm.check_integrity()


def test_running_requests_start_again(llm: LLM) -> None:
    """llm_engine_reset_kv.py: the answer is the same, and the KVs of its tokens were computed twice."""
    engine = LLMEngine(llm)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [alone] = llm.generate(PROMPTS[0], params)
    for running in (False, True):
        engine.add_request(f"reset {running}", PROMPTS[0], params)
        while (given := [token for each in engine.step() for token in each.outputs[0].token_ids]) == []:
            pass
        before = llm.stats().recomputed_tokens
        assert engine.reset_prefix_cache(reset_running_requests=running)
        llm.check_integrity()
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids and given
        again = llm.stats().recomputed_tokens - before
        assert (again >= len(alone.prompt_token_ids)) == running, again


def test_a_gguf_file_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gguf_inference.py: the tokenizer named takes the place of the file's, at each start."""
    monkeypatch.delenv("WINNOW_MODEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "own")
    pytest.importorskip("gguf")
    from tiny_gguf import save_gguf, tiny_llama

    save_gguf(tmp_path / "m.gguf", tiny_llama())
    for _ in range(2):
        with LLM(
            model=str(tmp_path / "m.gguf"), tokenizer=str(tmp_path / "own"), kv_memory="8MiB", threads=1
        ) as tiny:
            [output] = tiny.chat([{"role": "user", "content": "Hi"}], GREEDY)
            assert output.prompt == "[Hi]"
            assert output.prompt_token_ids == tokenizer.encode("[Hi]", add_special_tokens=False)
    # A directory's own files give way too, in the model cache and in a packed model.
    tiny_llama().save_pretrained(tmp_path / "dir")
    other = byte_level()
    other.chat_template = {"default": "other", "tool_use": "tools"}  # type: ignore[assignment]
    other.save_pretrained(tmp_path / "dir")
    pack_model(ModelConfig(tmp_path / "dir", tokenizer=tmp_path / "own"), tmp_path / "packed")
    named: dict[str, Any] = {"model": tmp_path / "dir", "tokenizer": tmp_path / "own"}
    for options, prompt in ((named, "[Hi]"), (named, "[Hi]"), ({"model": tmp_path / "dir"}, "other"), (named, "[Hi]"),
                            ({"model": tmp_path / "packed"}, "[Hi]")):  # fmt: skip
        with LLM(**options, kv_memory="8MiB", threads=1) as tiny:
            assert tiny.chat([{"role": "user", "content": "Hi"}], GREEDY)[0].prompt == prompt
    assert not (tmp_path / "packed" / "additional_chat_templates").exists()
    with pytest.raises(ConfigError, match="tokenizer must be left out for a packed model"):
        LLM(model=tmp_path / "packed", tokenizer=tmp_path / "own")
    with pytest.raises(
        UnsupportedModelError, match=r"tokenizer: .*none is no directory with a tokenizer\.json"
    ):
        LLM(model=str(tmp_path / "m.gguf"), tokenizer=str(tmp_path / "none"))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_is_for_terminals(
    llm: LLM, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("winnow.llm.is_shown", lambda: terminal)
    llm.generate(PROMPTS[:2], GREEDY)
    shown = capsys.readouterr().err
    assert ("Processed prompts" in shown and "2/2" in shown and "tokens/s" in shown) is terminal
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert not capsys.readouterr().err
