"""Which tokens survived: what is read agrees with what the engine reports, and the page holds all of it."""

import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from winnow import LLM, RequestOutput, SamplingParams
from winnow.engine.requests.new_request import KeptKVs
from winnow.errors import InvalidRequestError
from winnow.eviction import EvictionPolicy, Keep, KeyNorm, When
from winnow_inspect import Held, Inspection, Token, read_tokens

TEXT = (
    "The instrument of Philip is piano. Marriage and family are key structures in most societies. While the two "
    "institutions have historically been closely linked, their connection is becoming more complex. The favourite "
    "season of Andrew is late summer. Different people define it in different ways. Not even sociologists are able "
    "to agree on a single meaning. Here we'll define it as a socially recognized group. The instrument of Philip is"
)
ROWS = 12  # of the demo model: 6 layers, 2 heads


def greedy(eviction: str | EvictionPolicy = "snapkv", **chosen: object) -> SamplingParams:
    options = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "eviction": eviction, "kv_budget": 48}
    return SamplingParams(**options | chosen)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="32MiB", num_accumulators=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def snapkv(llm: LLM) -> Inspection:
    return llm.inspect(TEXT, greedy())


def generate(llm: LLM, params: SamplingParams) -> RequestOutput:
    return llm.generate(TEXT, params)[0]


class TestWhatIsRead:
    @pytest.mark.parametrize("eviction", ["snapkv", "kv-compress", "h2o", "tova", "pyramidkv", "keydiff"])
    def test_the_counts_are_those_of_the_report_and_the_answer_is_that_of_generate(
        self, llm: LLM, eviction: str
    ) -> None:
        params = greedy(eviction, kv_budget=60)
        output, inspection = generate(llm, params), llm.inspect(TEXT, params)
        completion = output.outputs[0]
        assert inspection.answer == completion.text
        assert [t.id for t in inspection.tokens] == output.prompt_token_ids + completion.token_ids
        assert inspection.num_prompt_tokens == len(output.prompt_token_ids)
        assert inspection.report is not None and completion.eviction is not None
        assert inspection.at_end.counts == inspection.report.kept == completion.eviction.kept
        assert inspection.at_end.num_tokens == inspection.report.num_tokens == completion.eviction.num_tokens
        assert inspection.at_end.compression == pytest.approx(inspection.report.compression)
        for held in (inspection.after_prompt, inspection.at_end):
            for row in (row for layer in held.rows for row in layer):
                assert list(row) == sorted(set(row))
                assert row[0] >= 0 and row[-1] < held.num_tokens

    def test_without_eviction_every_row_holds_every_token(self, llm: LLM) -> None:
        inspection = llm.inspect(TEXT, greedy("full", kv_budget=None))
        prompt = inspection.num_prompt_tokens
        assert inspection.after_prompt.rows == ((tuple(range(prompt)),) * 2,) * 6
        assert inspection.at_end.rows == ((tuple(range(prompt + 5)),) * 2,) * 6
        assert set(inspection.at_end.shares) == {1.0}
        assert inspection.report is None
        assert inspection.at_end.compression == 1

    def test_snapkv_keeps_its_window_and_takes_nothing_of_the_answer(self, snapkv: Inspection) -> None:
        prompt = snapkv.num_prompt_tokens
        assert snapkv.after_prompt.counts == ((48, 48),) * 6
        for before, after in zip(snapkv.after_prompt.rows, snapkv.at_end.rows, strict=True):
            for row, later in zip(before, after, strict=True):
                assert set(range(prompt - 32, prompt)) <= set(row)
                assert later == row + tuple(range(prompt, prompt + 5))
        assert len({row for layer in snapkv.at_end.rows for row in layer}) > 1, "all rows keep the same?"

    def test_a_sliding_window_slides(self, llm: LLM) -> None:
        inspection = llm.inspect(TEXT, greedy("recent"))
        prompt = inspection.num_prompt_tokens
        assert inspection.after_prompt.rows == ((tuple(range(prompt - 48, prompt)),) * 2,) * 6
        end = prompt + 5  # of 6 tokens the last is not computed; the one before it came after the last round
        assert inspection.at_end.rows == ((tuple(range(end - 49, end)),) * 2,) * 6

    def test_shares_count_rows(self, snapkv: Inspection) -> None:
        for token, share in enumerate(snapkv.at_end.shares):
            holders = [row for layer in snapkv.at_end.rows for row in layer if token in row]
            assert share == len(holders) / ROWS
        assert len(snapkv.at_end.shares) == len(snapkv.tokens) - 1

    def test_a_policy_of_ones_own(self, llm: LLM) -> None:
        policy = EvictionPolicy(KeyNorm(), keep=Keep(sinks=3), when=When(after_prefill=True))
        inspection = llm.inspect(TEXT, greedy(policy))
        assert inspection.policy == "own"
        assert inspection.parts["score"] == "KeyNorm"
        assert all(row[:3] == (0, 1, 2) for layer in inspection.after_prompt.rows for row in layer)


class TestAnswersThatEnd:
    @pytest.mark.parametrize(("eviction", "temperature"), [("snapkv", 0.0), ("h2o", 0.0), ("h2o", 1.0)])
    def test_by_themselves(self, llm: LLM, eviction: str, temperature: float) -> None:
        drawn_to_the_end = {llm.tokenizer.eos_token_id: 7.0}
        self._check(
            llm,
            greedy(
                eviction,
                ignore_eos=False,
                max_tokens=None,
                temperature=temperature,
                seed=3,
                logit_bias=drawn_to_the_end,
            ),
        )

    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_soon(self, llm: LLM, length: int) -> None:
        last = generate(llm, greedy()).outputs[0].token_ids[length - 1]
        inspection = self._check(llm, greedy(stop_token_ids=[last]))
        prompt = inspection.num_prompt_tokens
        assert len(inspection.tokens) == prompt + length
        # the round after the prompt comes with the second token
        assert inspection.after_prompt.counts == (((48, 48),) * 6 if length > 1 else ((prompt, prompt),) * 6)

    def test_at_a_stop_string(self, llm: LLM) -> None:
        text = generate(llm, greedy()).outputs[0].text
        assert self._check(llm, greedy(stop=text[7:12])).answer == text[:7]

    def test_where_the_context_ends(self, llm: LLM) -> None:
        prompt = llm.tokenizer.encode(TEXT)
        with LLM(kv_memory="32MiB", max_model_len=len(prompt) + 3) as short:
            inspection = short.inspect(prompt, greedy(max_tokens=30))
            assert len(inspection.tokens) == len(prompt) + 3
            assert inspection.at_end.num_tokens == len(prompt) + 2
            assert not short.has_unfinished

    def test_one_token_gets_a_second(self, llm: LLM) -> None:
        inspection = llm.inspect(TEXT, greedy(max_tokens=1))
        assert len(inspection.tokens) == inspection.num_prompt_tokens + 2
        assert inspection.after_prompt.counts == ((48, 48),) * 6
        assert inspection.at_end.counts == ((49, 49),) * 6

    def _check(self, llm: LLM, params: SamplingParams) -> Inspection:
        """Whatever ends the answer, it is the one that `generate` gives."""
        output, inspection = generate(llm, params), llm.inspect(TEXT, params)
        completion = output.outputs[0]
        assert completion.finish_reason == "stop", "this test is about answers that stop"
        assert inspection.answer == completion.text
        assert [t.id for t in inspection.tokens] == output.prompt_token_ids + completion.token_ids
        assert completion.eviction is not None
        assert inspection.at_end.counts == completion.eviction.kept
        assert inspection.at_end.num_tokens == completion.eviction.num_tokens
        return inspection


class TestRefusals:
    def test_several_samples(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequestError, match="n must be 1 for inspect, got 2"):
            llm.inspect(TEXT, greedy(n=2))

    def test_others_go_on_meanwhile(self, llm: LLM) -> None:
        alone = generate(llm, greedy())
        name = llm.submit(TEXT, greedy())
        llm.inspect(TEXT, greedy("h2o"))
        outputs = []
        while llm.has_unfinished:
            outputs += llm.step()
        outputs += llm.step()
        assert {output.request_id for output in outputs} == {name}
        assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids
        llm.check_integrity()


class TestTexts:
    def test_pieces_are_the_text(self, llm: LLM) -> None:
        text = "  Two spaces,\n\ta tab, naïve 日本語 👩‍👩‍👧 <b>&amp;"
        ids = llm.tokenizer.encode(text)
        tokens = read_tokens(llm.tokenizer, ids)
        assert [token.id for token in tokens] == ids
        assert "".join(token.text for token in tokens) == llm.tokenizer.decode(ids)
        assert any(token.text == "" for token in tokens), "no character was spread over tokens"

    def test_half_a_character_at_the_end(self, llm: LLM) -> None:
        ids = llm.tokenizer.encode("a 👧")[:-1]
        tokens = read_tokens(llm.tokenizer, ids)
        assert "".join(token.text for token in tokens) == llm.tokenizer.decode(ids)

    def test_without_a_tokenizer_ids_are_shown(self) -> None:
        assert read_tokens(None, [5, 77]) == (Token(5, "5 "), Token(77, "77 "))


def test_json_survives_a_round_trip(snapkv: Inspection) -> None:
    printed = snapkv.to_json()
    assert json.loads(json.dumps(printed)) == printed
    assert printed["policy"] == "snapkv"
    assert [token["id"] for token in printed["tokens"]] == [token.id for token in snapkv.tokens]
    assert printed["at_end"]["rows"] == [[list(row) for row in layer] for layer in snapkv.at_end.rows]
    assert printed["report"]["kept"] == [list(layer) for layer in snapkv.at_end.counts]


VOID = {"meta", "br", "input", "link", "img"}


class PageParser(HTMLParser):
    """Collects what a test asks of a page, and sees that every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[dict[str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            if tag == "span" and self.open[-1][0] == "p" and "dir" in self.open[-1][1]:
                self.tokens.append(attributes)
                self.texts.append("")
            self.open.append((tag, attributes))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1][0] == "script":
            self.scripts.append(data)
        elif any(tag == "p" and "dir" in attributes for tag, attributes in self.open) and self.texts:
            self.texts[-1] += data


@pytest.fixture(scope="module")
def hostile(llm: LLM) -> Inspection:
    prompt = (
        TEXT
        + "\n\n\tif a < b && c > \"d\": <script>alert(1)</script> <!-- ]]> 日本語 \u202e\x00 & &amp; 'x' "
    )
    return llm.inspect(prompt, greedy("kv-compress"))


class TestPage:
    def test_holds_every_token_in_its_own_element_and_nothing_of_it_is_markup(
        self, hostile: Inspection
    ) -> None:
        page = PageParser(hostile.to_html())
        shown = [
            token.text.replace("\u202e", "U+202E").replace("\x00", "U+0000") or "\u22ef"
            for token in hostile.tokens
        ]
        assert page.texts == shown
        assert "<script>alert(1)</script>" in "".join(page.texts).replace("\u22ef", "")
        assert [attributes.get("type") for tag, attributes in page.tags if tag == "script"] == [
            "application/json",
            None,
        ]

    def test_blanks_and_line_ends_can_be_seen(self, hostile: Inspection) -> None:
        html = hostile.to_html()
        prompt = html[html.index('<p class="text" dir="auto">') : html.index("<h3>Answer</h3>")]
        marks = {mark: prompt.count(f'<i class="{mark}">') for mark in "snt"}
        text = "".join(t.text for t in hostile.tokens[: hostile.num_prompt_tokens])
        assert marks == {"s": text.count(" "), "n": text.count("\n"), "t": text.count("\t")}

    def test_titles_and_colours_are_the_shares(self, hostile: Inspection) -> None:
        page = PageParser(hostile.to_html())
        shares = hostile.after_prompt.shares
        for index, attributes in enumerate(page.tokens):
            title, style = attributes["title"], attributes.get("style")
            if index >= len(shares):
                assert (title, attributes["class"]) == (f"token {index}: not computed", "new")
                continue
            assert title == f"token {index}: held in {round(shares[index] * ROWS)} of {ROWS} rows"
            assert (attributes.get("class") == "none") == (shares[index] == 0) == (style is None)
            if style is not None:
                assert float(style.removeprefix("--s:")) == pytest.approx(shares[index], abs=1e-3)

    def test_the_scripts_data_are_the_rows(self, hostile: Inspection) -> None:
        data = json.loads(PageParser(hostile.to_html()).scripts[0])
        assert (data["layers"], data["heads"], data["prompt"]) == (6, 2, hostile.num_prompt_tokens)
        for moment, held in zip(data["moments"], (hostile.after_prompt, hostile.at_end), strict=True):
            digits = len(moment["held"]) // moment["tokens"]
            assert moment["tokens"] == held.num_tokens
            for row in range(ROWS):
                tokens = tuple(
                    token
                    for token in range(held.num_tokens)
                    if int(moment["held"][token * digits + row // 4], 16) >> row % 4 & 1
                )
                assert tokens == held.rows[row // 2][row % 2]

    def test_bars_are_the_counts(self, hostile: Inspection) -> None:
        page = PageParser(hostile.to_html())
        labels = [attributes["aria-label"] for tag, attributes in page.tags if tag == "button"]
        assert labels == [
            f"layer {layer}, head {head}: {count} KVs"
            for layer, counts in enumerate(hostile.after_prompt.counts)
            for head, count in enumerate(counts)
        ]

    def test_the_header_says_what_was_done(self, snapkv: Inspection) -> None:
        text = " ".join(PageParser(snapkv.to_html()).text.split())
        for fact in snapkv.facts().values():
            assert fact in text
        assert {"policy", "KV budget", "compression", "KV memory", "prompt"} <= set(snapkv.facts())

    def test_asks_for_nothing_from_elsewhere(self, hostile: Inspection) -> None:
        page = PageParser(hostile.to_html())
        assert not {"link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
        assert not [attributes for _, attributes in page.tags if {"src", "href"} & set(attributes)]
        assert not re.search(r"https?:|url\(|@import|fetch\(|import ", hostile.to_html())
        [policy] = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
        assert policy is not None and policy.startswith("default-src 'none'")

    def test_for_eyes_ears_and_keys(self, snapkv: Inspection) -> None:
        html = snapkv.to_html()
        page = PageParser(html)
        tags = [tag for tag, _ in page.tags]
        assert '<html lang="en">' in html and "prefers-color-scheme: dark" in html
        assert tags.count("main") == tags.count("h1") == 1
        ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert {a["aria-labelledby"] for _, a in page.tags if "aria-labelledby" in a} <= set(ids)
        assert tags.count("label") == tags.count("select") == 3, "every control has its name"
        assert any(attributes.get("role") == "status" for _, attributes in page.tags)

    def test_stays_small_with_4000_tokens(self) -> None:
        rng = random.Random(1)
        rows = [[sorted(rng.sample(range(3900), 500)) for _ in range(2)] for _ in range(6)]
        tokens = tuple(Token(i, f" word{i % 97}") for i in range(4000))
        kept = KeptKVs(rows, [[500.0, 520.5]] * 6)
        held = Held.of(kept, 3900), Held.of(kept, 3999)
        html = Inspection("own", {}, tokens, 3900, "", *held, None).to_html()
        assert len(html) < 600_000
        assert len(PageParser(html).tokens) == 4000
