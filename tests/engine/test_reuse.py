"""Documents that were computed once stand elsewhere in other prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from tiny_llama import greedy, prompt, save_tiny_llama

from winnow import LLM, Document, RequestOutput, SamplingParams
from winnow.config.cache import CacheConfig
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import ConfigError, InvalidRequestError
from winnow.models.bind.rotation import ModelRotation
from winnow.openai.tools import read_template_options
from winnow.prompt.prompts import list_prompts
from winnow.values.logprob import LogprobDict
from winnow.values.reuse import LIBRARY, LIBRARY_FOLDER

SIZE = 40
DOCUMENTS = [prompt(SIZE, seed) for seed in range(10, 15)]
QUESTION = prompt(9, 88)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("four") / "model", seed=3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def by_tokens(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose lower layers attend to nothing, so that all KVs follow from tokens and positions alone."""
    path = save_tiny_llama(tmp_path_factory.mktemp("tokens") / "model", seed=4, num_hidden_layers=4)
    weights = load_file(path / "model.safetensors")
    for layer in range(3):
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"].zero_()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def open_llm(directory: Path, share: float | None = None, **options: object) -> LLM:
    reuse = (
        {"enable_prefix_caching": False} if share is None else {"reuse": "documents", "reuse_share": share}
    )
    defaults = {"dtype": "float32", "kv_memory": "4MiB", "prefill_chunk": 64}
    return LLM(directory, **(defaults | reuse | options))


@pytest.fixture(scope="module")
def whole(directory: Path) -> Iterator[LLM]:
    with open_llm(directory) as llm:
        yield llm


def ask(
    llm: LLM, order: Sequence[int], head: int = 1, tenant: str | None = None, **options: object
) -> RequestOutput:
    return ask_all(llm, [order], head, tenant, **options)[0]


def request_of(
    llm: LLM, order: Sequence[int], head: int = 1, tenant: str | None = None, **options: object
) -> NewRequest:
    token_ids, marks = prompt(10 + head, head), []
    for number in order:
        marks.append((len(token_ids), len(token_ids) + SIZE))
        token_ids = token_ids + DOCUMENTS[number]
    params = greedy(logprobs=2, **options)
    whole = llm.tokenize(token_ids + QUESTION)
    return llm.new_request(whole, params, final_only=True, documents=tuple(marks), tenant=tenant)


def ask_all(
    llm: LLM, orders: Sequence[Sequence[int]], head: int = 1, tenant: str | None = None, **options: object
) -> list[RequestOutput]:
    requests = [request_of(llm, order, head, tenant, **options) for order in orders]
    outputs = llm.driver.finish(requests)
    llm.check_integrity()
    for output in outputs:
        output.raise_for_error()
    return outputs


def logprobs(output: RequestOutput) -> LogprobDict:
    [answer] = output.outputs
    assert answer.logprobs is not None and answer.logprobs[0] is not None
    return answer.logprobs[0]


def answers(outputs: RequestOutput | Sequence[RequestOutput]) -> list[object]:
    several = [outputs] if isinstance(outputs, RequestOutput) else outputs
    return [(answer.token_ids, answer.logprobs) for each in several for answer in each.outputs]


def test_all_computed_again_is_the_whole_computation(directory: Path, whole: LLM) -> None:
    for backend in ("reference", "native"):
        with (
            open_llm(directory, 1.0, attention_backend=backend) as llm,
            open_llm(directory, attention_backend=backend) as alone,
        ):
            ask(llm, [0, 1, 2, 3], head=1)
            for head, order in ((2, [3, 1]), (3, [2, 0, 1]), (4, [3, 0, 2, 1])):
                output = ask(llm, order, head)
                assert (output.num_reused_tokens, output.num_cached_tokens) == (0, 0)
                assert output.num_repaired_tokens == SIZE * len(order)
                assert answers(output) == answers(ask(alone, order, head))


def distance(llm: LLM, alone: LLM) -> float:
    """Return how far the first token's probabilities are from those of the whole computation, in nats."""
    found, expected = (ask(each, [2, 0, 1], head=7, max_tokens=1) for each in (llm, alone))
    assert found.num_reused_tokens >= 3 * SIZE - 3
    ours, theirs = (logprobs(each) for each in (found, expected))
    shared = ours.keys() & theirs.keys()
    assert shared
    return max(abs(ours[token].logprob - theirs[token].logprob) for token in shared)


@pytest.mark.parametrize(("kv_dtype", "error"), [("float32", 1e-4), ("int8", 0.02), ("int4", 0.1)])
def test_keys_are_turned_to_where_they_stand(
    by_tokens: Path, kv_dtype: str, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where KVs follow from tokens and positions alone, placing them is all that there is to do. The errors, in nats,
    are those of keys which are decoded, turned and encoded once more."""
    options: dict[str, Any] = {"kv_cache_dtype": kv_dtype, "attention_backend": "reference"}
    with open_llm(by_tokens, 0.0, **options) as llm, open_llm(by_tokens, **options) as alone:
        ask(llm, [0, 1, 2, 3])
        assert distance(llm, alone) < error
        monkeypatch.setattr(ModelRotation, "turn", lambda self, layer, keys, difference: keys)
        llm.reset_prefix_cache()
        ask(llm, [0, 1, 2, 3])
        assert distance(llm, alone) > 2 * error


def test_a_share_is_computed_again_beside_others(directory: Path, whole: LLM) -> None:
    """Counts are exact, both backends choose and compute the same tokens, and who runs beside is not disturbed."""
    found = []
    plain = whole.generate([prompt(30, 5)], greedy(max_tokens=40))[0].outputs[0].token_ids
    for backend in ("reference", "native"):
        with open_llm(directory, 0.3, attention_backend=backend) as llm:
            ask(llm, [0, 1, 2, 3])
            beside = llm.submit(prompt(30, 5), greedy(max_tokens=40), final_only=True)
            for _ in range(3):
                llm.step()
            [output] = ask_all(llm, [[3, 1, 2]], 2)
            counted = llm.stats()
            computed = counted.prompt_tokens
            assert (output.num_reused_tokens, output.num_repaired_tokens) == (
                83,
                37,
            )  # 0.3 of each chunk, rounded up
            assert (counted.reused_tokens, counted.repaired_tokens) == (83, 37)
            assert computed == 11 + 4 * SIZE + 9 + 30 + (12 + 3 * SIZE + 9 - 83)
            found.append(output.outputs[0].token_ids)
            others: list[RequestOutput] = []
            while not others:
                others = llm.step()
            assert (others[0].request_id, others[0].outputs[0].token_ids) == (beside, plain)
    assert found[0] == found[1]
    assert found[0] != whole_answer(whole, [3, 1, 2], 2), "a share of 0.3 is not exact here"


def whole_answer(llm: LLM, order: Sequence[int], head: int) -> object:
    return ask(llm, order, head).outputs[0].token_ids


def test_approximate_blocks_are_found_by_nobody(directory: Path, whole: LLM) -> None:
    """Neither as a prefix nor as documents: a prompt that asks for exactness begins anew, and other tenants do too."""
    with open_llm(directory, 0.0, prefill_chunk=32) as llm:
        ask(llm, [0, 1])
        first = ask(llm, [1, 0, 2], 2)
        assert first.num_reused_tokens >= 2 * SIZE - 4
        exact = ask(llm, [1, 0, 2], 2, reuse="exact")
        assert (exact.num_reused_tokens, answers(exact)) == (0, answers(ask(whole, [1, 0, 2], 2)))
        # The next turn begins with what this one left, as far as blocks are whole.
        known = [*first.prompt_token_ids, *first.outputs[0].token_ids]
        [second] = llm.generate([known + prompt(20, 6)], greedy(reuse="documents"))
        assert (second.num_repaired_tokens, second.num_cached_tokens) == (0, 0)
        assert second.num_reused_tokens >= len(known) - 17
        assert ask(llm, [0, 1], 3, tenant="other").num_reused_tokens == 0
        assert ask(llm, [1, 0], 3).num_reused_tokens >= 2 * SIZE - 4
        with pytest.raises(InvalidRequestError, match="reuse must be one of exact, documents, anywhere"):
            greedy(reuse="maybe")
        # What is known goes while a prompt is in progress: the rest is computed.
        marks = tuple((12 + SIZE * n, 12 + SIZE * (n + 1)) for n in range(3))
        token_ids = prompt(12, 2) + DOCUMENTS[2] + DOCUMENTS[1] + DOCUMENTS[0] + QUESTION
        request = llm.new_request(
            llm.tokenize(token_ids), greedy(logprobs=2), final_only=True, documents=marks
        )
        llm.submit_all([request])
        llm.step()
        llm.reset_prefix_cache()
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs = llm.step()
        assert 0 < outputs[0].num_reused_tokens < 2 * SIZE


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2, "temperature": 0.8, "seed": 3},
        {"eviction": "winnow-keys", "compression": 2.0},
        {"eviction": "snapkv", "compression": 2.0},
    ],
    ids=["forks", "keys", "window"],
)
def test_what_follows_is_as_ever(directory: Path, whole: LLM, options: dict[str, Any]) -> None:
    with open_llm(directory, 1.0, prefill_chunk=512) as llm, open_llm(directory, prefill_chunk=512) as alone:
        ask(llm, [0, 1, 2, 3], max_tokens=1)
        output = ask(llm, [3, 1, 2], 2, **options)
        assert output.num_repaired_tokens > SIZE
        assert answers(output) == answers(ask(alone, [3, 1, 2], 2, **options))


@pytest.mark.parametrize("swap", [None, "1MiB"])
def test_preempted_requests_end_as_they_would(directory: Path, whole: LLM, swap: str | None) -> None:
    orders = [[0, 1, 2], [3, 1], [2, 0], [1, 3, 0], [3, 2, 1], [0, 3]]
    options: dict[str, Any] = {
        "kv_memory": "400KiB",
        "max_model_len": 256,
        "kv_offloading_size": swap,
        "prefill_chunk": 512,
    }
    expected = [ask(whole, order, 2, max_tokens=60).outputs[0].token_ids for order in orders]
    with open_llm(directory, 1.0, **options) as llm:
        ask(llm, [0, 1, 2, 3], max_tokens=1)
        found = ask_all(llm, orders, 2, max_tokens=60)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().repaired_tokens > 0
        assert [each.outputs[0].token_ids for each in found] == expected


@pytest.fixture(scope="module")
def soaked(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Little memory, a tier behind it and files: what is known goes and comes."""
    options: dict[str, Any] = {
        "kv_offloading_size": "1MiB",
        "prefix_cache_dir": tmp_path_factory.mktemp("kvs"),
    }
    with open_llm(directory, 1.0, kv_memory="400KiB", max_model_len=256, prefill_chunk=48, **options) as llm:
        ask(llm, [0, 1, 2, 3], max_tokens=1)
        ask_all(llm, [[0, 1, 2], [3, 1], [2, 0], [1, 3, 0]], 2, max_tokens=60)
        stats = llm.stats()
        assert stats.repaired_tokens > 0 and stats.num_preemptions > 0
        yield llm


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True),
            st.integers(1, 3),
            st.sampled_from(["exact", "documents", "anywhere"]),
            st.sampled_from([{}, {"n": 2}, {"max_tokens": 50}]),
        ),
        min_size=2,
        max_size=5,
    )
)
def test_whatever_is_known_answers_stay(soaked: LLM, whole: LLM, asked: list[Any]) -> None:
    """All is computed again: order, neighbours, copies in files and on the host, and who gives way change nothing."""
    found: list[Any] = []
    expected: list[Any] = []
    requests = [
        request_of(soaked, order, head, reuse=reuse, **{"max_tokens": 24, **options})
        for order, head, reuse, options in asked
    ]
    for output in soaked.driver.finish(requests):
        output.raise_for_error()
        found.append([answer.token_ids for answer in output.outputs])
    soaked.check_integrity()
    for order, head, _, options in asked:
        output = ask(whole, order, head, **{"max_tokens": 24, **options})
        expected.append([answer.token_ids for answer in output.outputs])
    assert found == expected


def test_compressed_documents_are_turned_to_where_they_stand(
    by_tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that lack a KV or two each. Memory that is short, swap and ends leave nothing behind."""
    (tmp_path / LIBRARY_FOLDER).mkdir()
    head = prompt(11, 1)
    kept = SamplingParams(eviction="winnow-keys", kv_budget=len(head) + SIZE - 2, protect=((0, len(head)),))
    with open_llm(by_tokens, 0.0) as llm:
        for document in DOCUMENTS[:3]:
            llm.save_prefix(head + document, tmp_path / LIBRARY_FOLDER, kept, tenant=LIBRARY)
    options: dict[str, Any] = {"documents": tmp_path, "attention_backend": "reference"}
    with open_llm(by_tokens, 0.0, **options) as llm, open_llm(by_tokens) as alone:
        assert distance(llm, alone) < 0.05
        several = ask_all(llm, [[0, 1, 2], [2, 1, 0], [1, 3, 0]], 2, max_tokens=30)
        assert [each.num_reused_tokens for each in several] == [3 * SIZE, 3 * SIZE, SIZE + SIZE]
        monkeypatch.setattr(ModelRotation, "turn", lambda self, layer, keys, difference: keys)
        llm.reset_prefix_cache()
        assert distance(llm, alone) > 0.1
    options |= {
        "kv_memory": "400KiB",
        "max_model_len": 256,
        "kv_offloading_size": "1MiB",
        "prefill_chunk": None,
    }
    monkeypatch.undo()
    with open_llm(by_tokens, 0.0, **options) as llm:
        found = ask_all(llm, [[0, 1, 2], [2, 1, 0], [1, 3, 0], [2, 0]] * 2, 2, max_tokens=60)
        assert llm.stats().num_preemptions > 0
        assert [each.outputs[0].token_ids[:30] for each in found[:3]] == [
            each.outputs[0].token_ids for each in several
        ]


def test_who_waits_finds_what_others_compute(directory: Path) -> None:
    with open_llm(directory, 0.2, max_num_batched_tokens=512) as llm:
        first, second = ask_all(llm, [[0, 1, 2], [2, 0, 1]])
        assert first.num_reused_tokens == 0
        assert second.num_reused_tokens + second.num_repaired_tokens > 3 * SIZE - 16  # blocks are whole


def test_runs_without_marks(directory: Path) -> None:
    with open_llm(directory, 0.2, reuse="anywhere") as llm:
        known, other = prompt(200, 1), prompt(90, 2)
        llm.generate([known, other], greedy(max_tokens=1))
        [moved] = llm.generate([prompt(21, 4) + known[30:180] + prompt(7, 5)], greedy())
        assert moved.num_reused_tokens + moved.num_repaired_tokens == 150
        [short] = llm.generate([prompt(21, 6) + other + prompt(7, 5)], greedy())
        assert short.num_reused_tokens == short.num_repaired_tokens == 0
        [refused] = llm.generate([prompt(23, 4) + known[30:180]], greedy(reuse="exact"))
        assert refused.num_reused_tokens == 0


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_what_leaves_a_conversation_is_freed(directory: Path, whole: LLM, share: float) -> None:
    """Blocks of what left are free in every row; what stood behind it stays, a second time too."""
    parts = [prompt(160, seed) for seed in range(30, 34)]
    with open_llm(directory, share, reuse="anywhere", kv_memory="8MiB") as llm:

        def held() -> tuple[int, int]:
            llm.check_integrity()
            ledger = llm.driver.engine.memory.ledger
            return ledger.allocator.cached.total, ledger.layout.blocks_for(len(session.token_ids))

        session = llm.session("agent")
        with pytest.raises(
            InvalidRequestError, match="session_id must be of a conversation of tokens that is"
        ):
            session.drop((0, 4))
        llm.generate([[*chain(*parts)]], greedy(max_tokens=12), session_id="agent")
        [known] = llm.sessions()
        with pytest.raises(
            InvalidRequestError, match=f"span must be some of the session's {known.num_tokens}"
        ):
            session.drop((0, 10**6))
        for start, end, text in ((150, 330, []), (170, 300, prompt(20, 7))):
            length, behind = len(session.token_ids), len(session.token_ids) - end
            left = session.replace((start, end), text)
            assert len(session.token_ids) == length - (end - start) + len(text)
            assert behind - 33 <= left.num_reused_tokens + left.num_repaired_tokens
            assert held()[0] == held()[1]
        turn = session.token_ids + QUESTION
        [answer] = llm.generate([turn], greedy(max_tokens=12, logprobs=2), session_id="agent")
        assert answer.num_reused_tokens + answer.num_cached_tokens >= len(turn) - len(QUESTION) - 1
        [expected] = whole.generate([turn], greedy(max_tokens=12, logprobs=2))
        found, sure = (next(iter(logprobs(each).values())).logprob for each in (answer, expected))
        assert (abs(found - sure) < 1e-4) == (share == 1.0)  # chunks begin elsewhere


@pytest.mark.parametrize("fault", ["", "damaged", "foreign"])
def test_documents_survive_a_restart(directory: Path, whole: LLM, tmp_path: Path, fault: str) -> None:
    """Also those that were computed behind placed ones; what cannot be believed is computed."""
    options: dict[str, Any] = {"prefix_cache_dir": tmp_path}
    with open_llm(directory, 1.0, **options) as llm:
        ask(llm, [0, 1])
        ask(llm, [1, 2], 2)
    for path in tmp_path.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-9] ^= fault == "damaged"
        path.write_bytes(content)
    options["kv_cache_dtype"] = "bfloat16" if fault == "foreign" else "float32"
    with open_llm(directory, 1.0, **options) as llm:
        other = ask(llm, [2, 0], 5, tenant="other")
        found = ask(llm, [2, 1, 0], 3)
        assert other.num_repaired_tokens == 0
        assert (found.num_repaired_tokens > 3 * SIZE - 16) == (not fault)
        assert (found.num_repaired_tokens == 0) == bool(fault)
        tier = llm.stats().disk_tier
        assert tier is not None and bool(tier.num_damaged or tier.num_foreign) == bool(fault)
        if fault != "foreign":
            assert found.outputs[0].token_ids == whole_answer(whole, [2, 1, 0], 3)


def test_models_that_cannot_say_why(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path / "two", seed=3)
    with open_llm(path, 0.2) as llm:
        ask(llm, [0, 1])
        with pytest.warns(
            UserWarning, match="reuse=documents takes prefixes alone of this model: its layers"
        ):
            assert ask(llm, [1, 0], 2).num_reused_tokens == 0


def test_documents_are_written_between_texts() -> None:
    parts: list[str | Document] = [
        "Read.\n",
        Document("Ada lives in Oslo.\n"),
        Document("Bo lives in Rome.\n"),
        "Where does Bo live?",
    ]
    assert list_prompts(parts) == [parts]
    with LLM(kv_memory="32MiB", reuse="documents") as llm:
        found = llm.tokenize(parts)
        assert found.text == "Read.\nAda lives in Oslo.\nBo lives in Rome.\nWhere does Bo live?"
        pieces = [llm.tokenizer.decode(found.token_ids[a:b]) for a, b in found.documents]  # type: ignore[union-attr]
        assert [each.strip() for each in pieces] == ["Ada lives in Oslo.", "Bo lives in Rome."]
        # vLLM's field of chat requests, where the template shows it.
        body: dict[str, Any] = {"documents": [{"title": "Bo", "text": "Bo lives in Rome.\n"}]}
        shown = "{% for each in documents %}{{ each.text }}{% endfor %}{{ messages[0].content }}"
        asked, options = [{"role": "user", "content": "Where?"}], read_template_options(body)
        chat = llm.tokenize_chat(asked, replace(options, template=shown))
        [(start, end)] = chat.documents
        assert llm.tokenizer.decode(chat.token_ids[start:end]).strip() == "Bo lives in Rome."  # type: ignore[union-attr]
        # A mark on a part of a message, whatever the template does with the ends of texts.
        marked = {"type": "text", "text": " Bo lives in Rome.\n", "winnow": {"document": True}}
        parted = [{"role": "user", "content": [marked, {"type": "text", "text": "Where?"}]}]
        trimmed = "Hi. {{ messages[0].content | trim }}"
        chat = llm.tokenize_chat(parted, replace(options, template=shown + trimmed))
        pieces = [llm.tokenizer.decode(chat.token_ids[a:b]).strip() for a, b in chat.documents]  # type: ignore[union-attr]
        assert [each[-14:] for each in pieces] == ["lives in Rome."] * 2  # about where they stand
        with pytest.raises(
            InvalidRequestError, match="documents must be texts that the model's chat template shows"
        ):
            llm.tokenize_chat(asked, replace(options, template="{{ messages[0].content }}"))
        with pytest.raises(InvalidRequestError, match="prompt must be texts and documents"):
            llm.tokenize(cast("Any", [Document("x"), 3]))
        with pytest.raises(InvalidRequestError, match="text of a document must be text"):
            Document("")


def test_documents_stand_between_separators() -> None:
    """Of texts and of token ids; the separator is the model's to read, and is none of a document."""
    first, second = "Ada lives in Oslo, by the sea.", "Bo sells books in Rome."
    with LLM(kv_memory="32MiB", reuse_separator="\n###\n") as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        text = f"Read.\n###\n{first}\n###\n{second}\n###\nWhere?"
        by_text = llm.tokenize(text)
        separator, *parts = (
            tokenizer.encode(each, add_special_tokens=False) for each in ("\n###\n", first, second, "Where?")
        )
        ids = [5, *chain.from_iterable([*separator, *part] for part in parts)]
        by_ids = llm.tokenize(ids)
        assert by_text.text == text and by_ids.token_ids == ids
        one, two = (tokenizer.decode(by_text.token_ids[start:end]) for start, end in by_text.documents)
        assert "lives in Oslo" in one and "in Rome" in two  # tokens may join letters at the ends to others
        assert [ids[start:end] for start, end in by_ids.documents] == parts[:2]
        assert llm.tokenize([*separator, *separator, 5, 6]).documents == ()
        for none in ("Where?", "Read.\n###\nWhere?"):
            assert llm.tokenize(none).documents == ()
        kept = llm.tokenize(["a\n###\n", Document(first), "\n###\nb"])
        assert len(kept.documents) == 1
    with pytest.raises(ConfigError, match="reuse_separator must be text of at least 1 character, got ''"):
        CacheConfig(reuse_separator="")
