"""Materials of RULER's haystacks, read when a recipe first needs it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from winnow_lab.evaluate.tasks.files import read_text, shipped
from winnow_lab.evaluate.tasks.ruler.documents import DocumentSet, read_passages
from winnow_lab.evaluate.tasks.ruler.hotpot import find_hotpot, read_hotpot
from winnow_lab.evaluate.tasks.ruler.squad import find_squad, read_squad


@dataclass(frozen=True)
class Materials:
    """Prose, words and documents; `data` is the directory with SQuAD and HotpotQA, None where there is none."""

    data: Path | None

    @cached_property
    def essay(self) -> tuple[str, ...]:
        """Sentences of one book in their order, about 100,000 tokens."""
        return tuple(read_text(shipped("ruler") / "essay.txt.gz").splitlines())

    @cached_property
    def words(self) -> tuple[str, ...]:
        """English words in lower case, each once."""
        return tuple(read_text(shipped("ruler") / "words.txt.gz").split())

    @cached_property
    def squad(self) -> DocumentSet:
        """SQuAD; without `data` its stand-in, passages of Natural Questions.

        Raises:
            DatasetError: `data` has no such file, or it is malformed.
        """
        if self.data is None:
            return read_passages(shipped("ruler") / "nq-passages.jsonl.gz")
        return read_squad(find_squad(self.data))

    @cached_property
    def hotpotqa(self) -> DocumentSet:
        """HotpotQA.

        Raises:
            DatasetError: `data` is None or has no such file, or the file is malformed.
        """
        return read_hotpot(find_hotpot(self.data))
