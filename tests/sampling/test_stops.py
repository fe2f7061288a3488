"""Stop strings in growing text."""

from hypothesis import given, strategies as st

from winnow.sampling.stops import Match, StopMatcher

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str], checked_from: int = 0) -> tuple[str, int] | None:
    """By brute force: the first end of a match beyond `checked_from`, and the longest stop string that ends there."""
    for end in range(checked_from + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


@given(LETTERS, STOPS, st.data())
def test_matches_are_brute_forces_in_any_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    matcher = StopMatcher(stops)
    expected = first_match(text, stops)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        match = matcher.feed(text[start:end])
        if match is not None:
            assert expected == (match.stop, start + match.end)
            return
        pending = [
            n for n in range(1, end + 1) if any(stop.startswith(text[end - n : end]) for stop in stops)
        ]
        assert matcher.pending == max(pending, default=0)
    assert expected is None


@given(LETTERS, LETTERS, STOPS)
def test_unchecked_text_may_begin_a_match_but_not_end_one(
    unchecked: str, checked: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed(unchecked, check=False) is None
    expected = first_match(unchecked + checked, stops, len(unchecked))
    match = matcher.feed(checked)
    assert expected == (None if match is None else (match.stop, len(unchecked) + match.end))


def test_the_first_complete_wins_then_the_longest() -> None:
    assert StopMatcher(["bcd", "c"]).feed("abcd") == Match("c", 3)
    assert StopMatcher(["c", "bc", "abc"]).feed("xabc") == Match("abc", 4)


def test_nothing_to_watch_for() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("text") is None and matcher.pending == 0
