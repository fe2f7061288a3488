"""A tokenizer by the package tokenizers alone: importing transformers for one takes as long as all else of a start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BACKEND = "backend_tokenizer.json"
"""File of the backend that transformers' tokenizer hands its texts to, as it stands once it is loaded."""
# Methods of transformers' tokenizers that are done here in their place; a class with its own stays what it is.
_TAKEN_OVER = (
    *("encode", "_encode_plus", "decode", "_decode", "convert_ids_to_tokens", "convert_tokens_to_ids"),
    *("_convert_token_to_id_with_added_voc", "_convert_id_to_token", "get_vocab"),
)


@dataclass(frozen=True)
class TokenizerNumbers:
    """Numbers of a tokenizer that its backend does not know."""

    eos_token_id: int | None
    unk_token_id: int | None
    special_ids: tuple[int, ...]

    @classmethod
    def write(cls, tokenizer: "PreTrainedTokenizerBase | None", directory: Path) -> "TokenizerNumbers | None":
        """Write a tokenizer's backend into a directory. None, and nothing is written: the tokenizer is more than it."""
        from transformers import PreTrainedTokenizerFast as Fast

        if not isinstance(tokenizer, Fast) or getattr(tokenizer, "split_special_tokens", False):
            return None
        kind = type(tokenizer)
        if any(getattr(kind, name, None) is not getattr(Fast, name, None) for name in _TAKEN_OVER):
            return None
        try:
            backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        except Exception:  # plain `Exception`: a part of it is Python
            return None
        backend.no_padding()
        backend.no_truncation()
        backend.save(str(directory / BACKEND), pretty=False)
        special = tuple(int(token) for token in tokenizer.all_special_ids if token is not None)
        return cls(tokenizer.eos_token_id, tokenizer.unk_token_id, special)


class BackendTokenizer:
    """Tokenizer that cuts texts and joins tokens as the tokenizer of transformers does whose backend was written.
    Whatever else it is asked for loads that one: `full`."""

    def __init__(
        self, backend: Tokenizer, numbers: TokenizerNumbers, load: Callable[[], "PreTrainedTokenizerBase"]
    ) -> None:
        self.backend_tokenizer = backend
        self.eos_token_id, self.unk_token_id = numbers.eos_token_id, numbers.unk_token_id
        self.all_special_ids = list(numbers.special_ids)
        self._load = load

    @cached_property
    def full(self) -> "PreTrainedTokenizerBase":
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.full, name)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def vocab_size(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab())

    def encode(self, text: Any, *, add_special_tokens: bool = True, **options: Any) -> list[int]:
        if options or not isinstance(text, str):
            return self.full.encode(text, add_special_tokens=add_special_tokens, **options)
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        if options != {"clean_up_tokenization_spaces": False} or not isinstance(token_ids, list):
            return self.full.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Any, **options: Any) -> Any:
        if options:
            return self.full.convert_ids_to_tokens(ids, **options)
        token = self.backend_tokenizer.id_to_token
        return token(ids) if isinstance(ids, int) else [token(int(each)) for each in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found


def full_tokenizer(tokenizer: Any) -> "PreTrainedTokenizerBase | None":
    return tokenizer.full if isinstance(tokenizer, BackendTokenizer) else tokenizer
