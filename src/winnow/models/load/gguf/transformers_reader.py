"""Reader that lets transformers read a GGUF file through its header, which is parsed once.

transformers asks the package gguf for the file three times, seconds each over a large vocabulary, and for the
table of tensors' names once for each module of the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import cache
from importlib import import_module
from io import StringIO
from types import SimpleNamespace
from typing import Any

from transformers.utils.logging import is_progress_bar_enabled

from winnow.models.load.gguf.header import GgufHeader
from winnow.process.progress import report

_STRING, _ARRAY = 8, 9
# Where transformers looks for what reads metadata: it differs between versions, and so do the callers.
_METADATA_READERS = (
    "transformers.integrations.gguf",
    "transformers.integrations.gguf.reader",
    "transformers.quantizers.quantizer_gguf",
)


@contextmanager
def reading(header: GgufHeader) -> Iterator[None]:
    """Let transformers read the header's file by the header while this lasts. For one thread at a time."""
    import gguf

    def read_metadata(path: str, string_arrays: Sequence[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
        values = {
            key: len(value) if kind == (_ARRAY, _STRING) and key not in string_arrays else value
            for (key, value), kind in zip(header.values.items(), header.kinds.values(), strict=True)
        }
        return values, tuple(tensor.name for tensor in header.tensors)

    with ExitStack() as stack:
        stack.enter_context(_replaced(gguf, "GGUFReader", lambda path: _Reader(header)))
        stack.enter_context(_replaced(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)))
        for name in _METADATA_READERS:
            try:
                module = import_module(name)
            except ImportError:
                continue
            stack.enter_context(_replaced(module, "read_gguf_metadata", read_metadata))
        # The reader draws a progress bar that does not ask whether transformers may draw any.
        if not is_progress_bar_enabled():
            stack.enter_context(redirect_stderr(StringIO()))
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    theirs = getattr(module, name, None)
    if theirs is None:
        yield
        return
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, theirs)


class _Reader:
    """Part of `gguf.GGUFReader` that transformers uses: fields and tensors.

    Of the tokenizer's fields none but the vocabulary's size: `read_gguf_metadata` gives those.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.fields = {
            key: _field(value, kind)
            for (key, value), kind in zip(header.values.items(), header.kinds.values(), strict=True)
            if not key.startswith("tokenizer.")
        }
        size = f"{header.architecture}.vocab_size"
        tokens = header.values.get("tokenizer.ggml.tokens")
        if tokens is not None and size not in self.fields:
            self.fields[size] = _field(len(tokens), (4,))
        self._header = header

    @property
    def tensors(self) -> Iterator[SimpleNamespace]:
        tensors = self._header.tensors
        for index, tensor in enumerate(tensors):
            report("reading weights", index, len(tensors))
            yield SimpleNamespace(
                name=tensor.name,
                tensor_type=tensor.kind,
                data=self._header.array(tensor),
                shape=tensor.shape[::-1],
            )

    def get_field(self, key: str) -> SimpleNamespace | None:
        return self.fields.get(key)


def _field(value: Any, kind: tuple[int, ...]) -> SimpleNamespace:
    entries = value if kind[0] == _ARRAY else [value]
    parts = [entry.encode() if isinstance(entry, str) else [entry] for entry in entries]
    return SimpleNamespace(types=list(kind), parts=parts, data=range(len(parts)))
