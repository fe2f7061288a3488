"""WikiText-2 (Merity et al. 2016), the text of the perplexity task, cut into windows."""

from pathlib import Path
from typing import Any

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.likelihood import Pair
from winnow_lab.evaluate.tasks.files import find_file, has_file, read_text, shipped

_PUBLISHED = "by the WikiText project, as the test split of WikiText-2"
_NAMES = ("test.txt", "wiki.test.tokens")


def wikitext(directory: Path | None = None) -> str:
    """Return the test split in `directory`, as published: words apart by spaces, rare ones replaced by <unk>.

    None: its first four articles, which ship with Winnow.
    """
    place = shipped("wikitext2") if directory is None else directory
    name = next((name for name in _NAMES if has_file(place, name)), _NAMES[0])
    path = find_file(place, name, _PUBLISHED)
    text = read_text(path)
    if not text.strip():
        raise DatasetError(f"{path} holds no text")
    return text


def cut_windows(tokenizer: Any, text: str, length: int, context: int, most: int | None = None) -> list[Pair]:
    """Windows of `length` tokens, one after the other: the first `context` are given, the others are to be predicted.

    Where the tokenizer puts a token at the beginning of texts, it does so in every window, and it is part of `context`.
    What is left at the end and fills no window is left out. `most` windows from the front are cut; None: all.
    """
    if not 1 <= context < length:
        raise EvaluationError(
            f"context must be at least 1 and leave room in a window of {length} tokens, got {context}"
        )
    bos = tokenizer.bos_token_id
    start = (bos,) if bos is not None and tokenizer.encode("")[:1] == [bos] else ()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    step = length - len(start)
    count = len(ids) // step if step > 0 else 0
    if not count:
        raise EvaluationError(f"the text has {len(ids)} tokens, which is less than a window of {length}")
    places = range(min(count, most or count))
    windows = [(*start, *ids[place * step : (place + 1) * step]) for place in places]
    return [Pair(window[:context], window[context:]) for window in windows]
