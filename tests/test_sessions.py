"""Conversations whose turns compute their own new tokens alone."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from architectures import save
from hybrids import HYBRIDS
from tiny_llama import VOCAB

from winnow import LLM, SamplingParams
from winnow.outputs import RequestOutput

BLOCK = 16
OPTIONS: dict[str, Any] = {"kv_memory": "32MiB", "max_num_seqs": 4, "block_size": BLOCK}
QUESTIONS = ["Tell me a story about a dog and a cat.", "And then?", "Where did the cat go?", "Why?"]
LONG = "Tell me a story about a dog and a cat who went to the sea, and what they saw there. " * 4
# Turns end with a special token, and nothing follows the question that a window would keep.
BARE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% else %}{{ '\nAnswer:' }}{% endif %}{% endfor %}"
)
TOKEN_BYTES = 6288
ANSWER = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**OPTIONS, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture
def open_llm() -> Iterator[Any]:
    """Opens models, and closes them in the end."""
    opened: list[LLM] = []

    def open_one(**options: Any) -> LLM:
        opened.append(LLM(**OPTIONS | options))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


def converse(llm: LLM, questions: list[str], params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """The outputs of a conversation's turns."""
    messages: list[dict[str, str]] = []
    outputs = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        [output] = llm.chat(messages, params, **options)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        outputs.append(output)
    llm.check_integrity()
    return outputs


def known_tokens(output: RequestOutput) -> list[int]:
    return list(output.prompt_token_ids) + list(output.outputs[0].token_ids)


@pytest.mark.parametrize("seed", [None, 1])
def test_turns_compute_what_is_new(llm: LLM, plain: LLM, seed: int | None) -> None:
    """The model's own tokens are read again, also where the tokenizer would cut their text otherwise."""
    params = ANSWER if seed is None else replace(ANSWER, temperature=2.0, seed=seed)
    outputs = converse(llm, QUESTIONS, params)
    for before, after in pairwise(outputs):
        known = known_tokens(before)
        assert after.prompt_token_ids[: len(known)] == known
        assert after.num_cached_tokens == len(known) - 1  # the last token was sampled and never computed
    for output in outputs:
        [expected] = plain.generate([list(output.prompt_token_ids)], params)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.tokenizer is not None
    encoded = [llm.tokenizer.encode(str(each.prompt), add_special_tokens=False) for each in outputs]
    assert encoded != [each.prompt_token_ids for each in outputs]


def test_a_changed_turn_is_known_up_to_the_change(llm: LLM) -> None:
    first, second = converse(llm, ["Who was the first king of the hill?", "And the second one?"], ANSWER)
    messages = [
        {"role": "user", "content": "Who was the first king of the hill?"},
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And the second queen?"},
    ]
    [changed] = llm.chat(messages, ANSWER)
    pairs = zip(changed.prompt_token_ids, second.prompt_token_ids, strict=False)
    common = next(at for at, (one, other) in enumerate(pairs) if one != other)
    assert changed.num_cached_tokens == common > len(known_tokens(first)) + 2


def finish(llm: LLM) -> None:
    """Compute what the engine has queued itself."""
    while llm.has_unfinished:
        assert llm.step() == []
    llm.check_integrity()


@pytest.mark.parametrize("policy", ["kv-compress", "keydiff"])
def test_a_compressed_conversation_goes_on(open_llm: Any, policy: str) -> None:
    """A turn continues on what rounds have left, and its own round may compress it further."""
    llm = open_llm(num_accumulators=2)
    llm.tokenizer.chat_template = BARE
    params = replace(ANSWER, eviction=policy, kv_budget=60)
    outputs = converse(llm, [LONG, "And then?", LONG, "Why?"], params, session_id="one")
    for before, after in pairwise(outputs):
        assert after.num_cached_tokens == len(known_tokens(before)) - 1
        assert after.outputs[0].eviction is not None and after.outputs[0].eviction.rounds
    [session] = llm.sessions()
    assert (session.name, session.tier, session.num_turns, session.compressed) == ("one", "device", 4, True)
    assert session.num_tokens == len(known_tokens(outputs[-1])) - 1
    assert session.num_bytes < llm.kv_bytes(session.num_tokens) * 0.7
    # Another policy, another session, another tenant and no session begin with what is no round's.
    prompt = known_tokens(outputs[-1])
    others: list[tuple[dict[str, Any], SamplingParams]] = [
        ({"session_id": "two"}, params),
        ({"session_id": "one", "tenant": "other"}, params),
        ({}, params),
        ({"session_id": "one"}, replace(params, eviction="full", kv_budget=None)),
    ]
    other = open_llm(num_accumulators=2)
    for options, each in others:
        [output] = llm.generate([prompt], each, **options)
        [alone] = other.generate([prompt], each)
        report, expected = output.outputs[0].eviction, alone.outputs[0].eviction
        assert (report and report.rounds) == (expected and expected.rounds)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_policy_that_replays_begins_anew(open_llm: Any) -> None:
    """Its prompts are found as they were computed, and compressed as without a session."""
    llm = open_llm()
    llm.tokenizer.chat_template = BARE
    params = replace(ANSWER, eviction="kvzip", compression=3.0)
    outputs = converse(llm, [LONG, LONG, LONG], params, session_id="one")
    assert [each.outputs[0].eviction.rounds for each in outputs[1:]] == [1, 1]  # type: ignore[union-attr]
    assert not llm.sessions()[0].compressed


def test_old_turns_are_compressed(open_llm: Any) -> None:
    """The system prompt and the last turn stay whole, and the session within its memory."""
    memory = 250 * TOKEN_BYTES
    llm = open_llm(session_memory=memory)
    system = {"role": "system", "content": "You answer in one word, and are kind to all who ask."}
    messages: list[dict[str, str]] = [system]
    before: RequestOutput | None = None
    for question in (LONG, "And then?", LONG, "Why?", LONG):
        messages.append({"role": "user", "content": question})
        [output] = llm.chat(messages, ANSWER, session_id="one")
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        finish(llm)
        [session] = llm.sessions()
        assert session.num_bytes <= memory
        if before is not None:
            known = known_tokens(before)
            assert output.prompt_token_ids[: len(known)] == known
            # The last token before a compression is computed once more.
            assert output.num_cached_tokens >= len(known) - 3
        before = output
    stats = llm.stats()
    assert session.compressed and stats.session_compressions >= 2 and not stats.sessions_dropped
    assert stats.session_tokens > 400 and stats.session_seconds > 0
    index = llm._engine.scheduler.ledger.prefixes  # type: ignore[attr-defined]
    [snapshot] = index.snapshots.values()
    assert snapshot.num_tokens == session.num_tokens - 1
    assert snapshot.lengths.sum() < 0.8 * snapshot.lengths.size * snapshot.num_tokens
    assert llm.drop_session("one") and not llm.drop_session("one")
    assert llm.sessions() == [] and not index.snapshots
    llm.check_integrity()


def test_conversations_with_recurrent_layers(tmp_path: Path) -> None:
    """Turns compute their own tokens; states cannot be compressed, so what is too large is the prefix cache's."""
    save(HYBRIDS["qwen3.5"], tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"block_size": 4, "kv_memory": "8MiB"}
    with (
        LLM(tmp_path, **options, session_memory="120KiB") as llm,
        LLM(tmp_path, **options, enable_prefix_caching=False) as plain,
    ):
        generator, history = Random(1), list[int]()
        for turn in range(5):
            history += generator.choices(range(3, VOCAB), k=50)
            [output] = llm.generate([history], params, session_id="one")
            assert output.outputs[0].token_ids == plain.generate([history], params)[0].outputs[0].token_ids
            finish(llm)
            assert output.num_cached_tokens == (len(history) - 51 if turn else 0)
            assert llm.sessions()[0].outgrown == (turn >= 3)
            history += output.outputs[0].token_ids
        assert (llm.stats().sessions_outgrown, llm.stats().sessions_dropped) == (1, 0)


def test_a_conversation_beyond_its_memory_is_the_prefix_caches(
    open_llm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, once, and its turns are not computed anew."""
    llm = open_llm(session_memory=1000)
    outputs = converse(llm, ["Hello there, who are you?", "Why?", "How?"], ANSWER, session_id="one")
    finish(llm)
    [session] = llm.sessions()
    assert session.outgrown and [each.outgrown for each in outputs] == [False, True, True]
    assert all(later.num_cached_tokens > 0 for later in outputs[1:])
    assert (llm.stats().sessions_outgrown, llm.stats().sessions_dropped) == (1, 0)
    assert [each.message for each in caplog.records if "session 'one' has" in each.message].__len__() == 1


def test_the_least_recently_used_of_a_tenant_go_first(open_llm: Any) -> None:
    llm = open_llm(tenants={"a": {"session_memory": "1MiB"}})
    for name in ("one", "two", "three", "one"):
        llm.chat([{"role": "user", "content": f"{name} {LONG}"}], ANSWER, session_id=name, tenant="a")
    llm.chat([{"role": "user", "content": LONG}], ANSWER, session_id="other", tenant="b")
    assert sum(each.num_bytes for each in llm.sessions("a")) <= 2**20
    assert next(each.name for each in llm.sessions("a")) == "one"
    assert len(llm.sessions("a")) < 3 and [each.name for each in llm.sessions("b")] == ["other"]


def test_idle_sessions_give_way(open_llm: Any) -> None:
    """Memory that only sessions hold can be had at once."""
    llm = open_llm(kv_memory="3MiB")
    for number in range(12):
        llm.generate([[number + 300] * 40], ANSWER, session_id=str(number))
    found = {each.name: each.tier for each in llm.sessions()}
    assert found["11"] == "device" and found["0"] == "gone"
    most = llm.generate([[5] * 300], replace(ANSWER, max_tokens=2))[0]
    assert most.outputs[0].finish_reason == "length"
    llm.check_integrity()


def test_idle_sessions_are_compressed_then_moved_then_forgotten(open_llm: Any, tmp_path: Path) -> None:
    """Each step is counted, and a session comes back from disk as it was compressed."""
    memory = 200 * TOKEN_BYTES
    llm = open_llm(kv_memory="4MiB", session_memory=memory, prefix_cache_dir=tmp_path)
    roomy = open_llm(session_memory=memory)  # where it stays on the device
    for each in (roomy, llm):
        messages: list[dict[str, str]] = []
        for question in (LONG, "And then?", LONG, "Why?"):
            messages.append({"role": "user", "content": question})
            [output] = each.chat(messages, ANSWER, session_id="one")
            messages.append({"role": "assistant", "content": output.outputs[0].text})
            finish(each)
    [session] = llm.sessions()
    stats = llm.stats()
    assert session.compressed and session.tier == "device" and session.num_bytes <= memory
    assert stats.session_compressions >= 1 and not stats.sessions_dropped
    for number in range(4):
        llm.generate([[number + 300] * 200], ANSWER)
    llm.write_prefixes()
    llm.check_integrity()
    assert llm.sessions()[0].tier == "disk" and llm.stats().sessions["disk"] == 1
    known = known_tokens(output)
    [again] = llm.generate([[*known, 5]], ANSWER, session_id="one")
    [expected] = roomy.generate([[*known, 5]], ANSWER, session_id="one")
    assert again.num_cached_tokens == expected.num_cached_tokens >= len(known) - 3
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    assert again.outputs[0].eviction == expected.outputs[0].eviction is not None
    tier = llm.stats().disk_tier
    assert tier is not None and tier.loaded_tokens >= again.num_cached_tokens
    finish(llm)
    llm.reset_prefix_cache()  # files too
    assert llm.sessions()[0].tier == "gone" and llm.stats().sessions["gone"] == 1
