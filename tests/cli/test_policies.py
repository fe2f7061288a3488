"""`winnow policies`: the table, one policy in full, JSON, and that all of it is read off the dataclasses."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from winnow.attention import Group
from winnow.cli.main import main
from winnow.cli.policies import NOTES
from winnow.eviction import PRESETS, AdaptiveHeads, EvictionPolicy, LayerRows, Pyramid, Scorer, Window
from winnow.eviction.describe import brief, brief_policy


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["policies", *arguments]) == 0
    return capsys.readouterr().out


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["policies", "--help"])
    assert stop.value.code == 0
    assert "examples:\n  winnow policies" in capsys.readouterr().out


def test_the_table_is_whole_at_100_columns_and_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = printed(capsys, "--all")
    assert "\x1b" not in text, "colour codes in a pipe"
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text, "a cell was cut"
    table, _, hint = text.rpartition("winnow policies NAME")
    assert "shows a policy" in hint
    names = [line.split()[0] for line in table.splitlines() if line[:1].strip()]
    # The plug-ins that the line below names are there, all of them.
    folder = Path(__file__).parents[2] / "examples/policies"
    plugins = {tuple(each) for each in re.findall(r"(\w+\.py):([A-Z_]+)", table)}
    assert {file for file, _ in plugins} == {path.name for path in folder.glob("*.py")}
    assert all(f"\n{name} = EvictionPolicy(" in (folder / file).read_text() for file, name in plugins)
    assert [name for name in names if name in PRESETS] == list(PRESETS)
    words = set(text.replace(",", " ").split())
    for preset in PRESETS.values():
        for reported in (*brief_policy(preset.policy).values(), preset.paper):
            assert set(reported.replace(",", " ").split()) <= words
        assert preset.kv_budget is None or str(preset.kv_budget) in words


def test_those_to_choose_from_are_a_line_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(capsys).splitlines()
    assert max(map(len, lines)) <= 100
    rows = {line.split()[0]: line for line in lines[2 : 2 + len(NOTES)]}
    assert list(rows) == list(NOTES) and rows.keys() < PRESETS.keys()
    for name, note in NOTES.items():
        assert all(part in rows[name] for part in note)
        assert 5 <= len(" ".join(note).split()) <= 16, "about ten words"
    assert "demo model" in rows["leverage"]


def test_one_policy_is_shown_with_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "snapkv")
    words, _, fields = text.partition("{")
    assert f"snapkv: {PRESETS['snapkv'].paper}" in words and "the question seen" in words
    assert json.loads("{" + fields) == json.loads(printed(capsys, "snapkv", "--json"))


def test_json_holds_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    policies = json.loads(printed(capsys, "--json"))
    assert [policy["name"] for policy in policies] == list(PRESETS)
    for policy in policies:
        preset = PRESETS[policy["name"]]
        assert (policy["paper"], policy["kv_budget"]) == (preset.paper, preset.kv_budget)
        assert policy["score"]["class"] == type(preset.policy.score).__name__
        assert policy["when"] == {"class": "When"} | vars(preset.policy.when)
        assert policy == json.loads(printed(capsys, policy["name"], "--json"))
    [snapkv] = [policy for policy in policies if policy["name"] == "snapkv"]
    assert snapkv["score"]["pool"]["size"] == 7
    assert snapkv["score"]["group"] == "mean"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("snapvk", "no policy is called 'snapvk'; did you mean snapkv?"),
        ("KV-Compress", "did you mean kv-compress?"),
        ("qqqqq", "no policy is called 'qqqqq'; Known: full, winnow, "),
    ],
)
def test_an_unknown_name_is_one_line_and_exit_code_2(
    typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policies", typed]) == 2
    reported = capsys.readouterr()
    assert reported.out == ""
    assert reported.err.startswith("winnow: error: ")
    assert reported.err.count("\n") == 1
    assert message in reported.err


class TestBrief:
    def test_defaults_go_without_saying(self) -> None:
        assert brief(Window()) == "Window"
        assert brief_policy(EvictionPolicy()) == {
            "score": "Recency",
            "budget": "EqualHeads",
            "keep": "-",
            "when": "never",
        }

    def test_what_differs_is_said_in_words(self) -> None:
        assert (
            brief(Window(8, 2, group=Group.MEAN, continual=True))
            == "Window (size 8, power 2, group mean, continual)"
        )
        assert brief(AdaptiveHeads(layers=Pyramid(beta=7))) == "AdaptiveHeads (layers Pyramid (beta 7))"

    def test_a_class_of_ones_own(self) -> None:
        @dataclass(frozen=True)
        class Mine(Scorer):
            weight: float = 1.0

            def score(self, rows: LayerRows) -> Tensor:
                return rows.position.float()

        assert brief(Mine(0.5)) == "Mine (weight 0.5)"
