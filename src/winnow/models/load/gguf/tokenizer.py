"""The tokenizer in a GGUF file: transformers' reading of it, and what that leaves out; or its backend alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from winnow.models.model.backend_tokenizer import TokenizerNumbers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of llama.cpp's ways to cut text, those that part digits before they do as GPT-2: transformers' reader leaves that out.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# Those that do as GPT-2.
_AS_GPT2 = (
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "mellum",
    "modern-bert", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code",
    "roberta-bpe", "a.x-4.0", "exaone4",
)  # fmt: skip
# The expressions of "default", each of which cuts what those before it have left.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
# Those that take a word whole where the vocabulary has it, and put a first token in front if the file does not say.
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
)  # fmt: skip
# The expression of these cuts numbers into groups of as many digits.
_DIGITS = {"qwen2": "", **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "glm4", "chatglm-bpe"), "{1,3}")}
_WORDS_AND_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "▁"
_KEYS, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template."
"""Beginning of the keys of named chat templates."""
_MARKS = (3, 4)
"""Types of control tokens and of user-defined ones."""
# Texts that llama.cpp takes for ends where they are such tokens, whether or not the file names them.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<turn|>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
_HARMONY = {"<|return|>", "<|call|>", "<|end|>"}


def read_tokenizer(directory: Path, file: str, values: Mapping[str, Any]) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a GGUF file, given by its whole path, which cuts text as llama.cpp does by the file's
    metadata `values`. Raises ValueError: it cuts text in a way that is not known here, or two tokens have one text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        directory, gguf_file=file, trust_remote_code=False, local_files_only=True
    )
    model, rule = values["tokenizer.ggml.model"], values.get("tokenizer.ggml.pre")
    tokenizer._tokenizer = backend = _only_known(tokenizer.backend_tokenizer, values["tokenizer.ggml.tokens"])
    named = {key.removeprefix(_TEMPLATE): value for key, value in values.items() if key.startswith(_TEMPLATE)}
    if named:
        tokenizer.chat_template = {"default": tokenizer.chat_template} | named
    if model == "gpt2":
        _set_cuts(backend, rule)
        if rule in _WHOLE_WORDS:
            backend.model.ignore_merges = True
            tokenizer.add_bos_token = bool(values.get("tokenizer.ggml.add_bos_token", True))
            tokenizer.update_post_processor()
    elif model == "llama":
        _set_space_in_front(backend, bool(values.get("tokenizer.ggml.add_space_prefix", True)))
    return tokenizer


def read_backend(values: Mapping[str, Any]) -> tuple[Tokenizer, TokenizerNumbers] | None:
    """Return the backend of what `read_tokenizer` returns, without transformers; None: the file's tokenizer is not of
    bytes (GPT-2), or of a kind that is not known here."""
    of = {key.removeprefix(_KEYS): value for key, value in values.items() if key.startswith(_KEYS)}
    texts, rule, kinds = of.get("tokens", []), of.get("pre"), of.get("token_type", [])
    known = (*_SINGLE_DIGITS, *_AS_GPT2, *_DIGITS, "default")
    whole = of.get("model") == "gpt2" and rule in known and "merges" in of and len(kinds) == len(texts)
    if not whole or len(set(texts)) < len(texts) or not set("".join(texts)) <= {*ByteLevel.alphabet()}:
        return None
    ids = {name: of.get(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    if None in (ids["bos"], ids["eos"]) or not all(
        each in (None, *range(len(texts))) for each in ids.values()
    ):
        return None
    merges = [tuple(merge.split(" ")) for merge in of["merges"]]
    vocab = {text: token for token, text in enumerate(texts)}
    backend = Tokenizer(
        BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    _set_cuts(backend, rule)
    backend.model.ignore_merges = rule in _WHOLE_WORDS
    named = dict.fromkeys(token for token in ids.values() if token is not None)
    special = [*named, *(token for token, kind in enumerate(kinds) if kind == _MARKS[0])]
    backend.add_special_tokens(
        [AddedToken(texts[token], normalized=False, special=True) for token in special]
    )
    plain = [text for text, kind in zip(texts, kinds, strict=True) if kind == _MARKS[1]]
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain])
    first = [texts[ids["bos"]]] if of.get("add_bos_token", rule in _WHOLE_WORDS) else []
    last = [texts[ids["eos"]]] if of.get("add_eos_token", False) else []
    one, other = (
        " ".join(f"{each}:{part}" for each in (*first, f"${text}", *last)) for part, text in enumerate("AB")
    )
    ends = [(text, vocab[text]) for text in (*first, *last)]
    backend.post_processor = processors.TemplateProcessing(one, f"{one} {other}", ends)
    return backend, TokenizerNumbers(ids["eos"], ids["unknown"], tuple(named))


def turn_ends(values: Mapping[str, Any]) -> list[int]:
    """Return the control and user-defined tokens whose texts end an answer or a turn, as llama.cpp knows them: most
    files name one end token, and chats end with another."""
    texts, kinds = (values.get(f"tokenizer.ggml.{name}", ()) for name in ("tokens", "token_type"))
    found = {
        text: token
        for token, (text, kind) in enumerate(zip(texts, kinds, strict=False))
        if kind in _MARKS and text in _ENDS
    }
    if found.keys() >= _HARMONY:
        del found["<|end|>"]  # which ends one message of several there
    return list(found.values())


def _only_known(backend: Tokenizer, texts: list[str]) -> Tokenizer:
    """Return a tokenizer without the special texts that transformers' class adds to those of the file. Raises
    ValueError: two tokens have one text, so that one of them would have none; names them."""
    vocab = backend.get_vocab()
    lost = sorted(set(range(len(texts))) - set(vocab.values()))
    if lost:
        raise ValueError(
            f"tokenizer.ggml.tokens names {texts[lost[0]]!r} twice, so that token {lost[0]} would be lost"
        )
    if len(vocab) == len(texts):
        return backend
    described = json.loads(backend.to_str())
    described["added_tokens"] = [each for each in described["added_tokens"] if each["id"] < len(texts)]
    return Tokenizer.from_str(json.dumps(described))


def _set_cuts(backend: Tokenizer, rule: str | None) -> None:
    """Cut text as a rule of llama.cpp's says; without one as GPT-2 does."""
    if rule in _SINGLE_DIGITS:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif rule in _DIGITS:
        words = Split(Regex(_WORDS_AND_DIGITS % _DIGITS[rule]), "isolated")
        backend.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    elif rule == "default":
        cuts = [Split(Regex(expression), "isolated") for expression in _DEFAULT]
        backend.pre_tokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
    elif rule is not None and rule not in _AS_GPT2:
        from transformers.integrations.gguf import gguf_tokenizer_mapping

        known = getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", {})
        if rule not in known:
            raise ValueError(f"tokenizer.ggml.pre = {rule!r}: it is not known how that cuts text")


def _set_space_in_front(backend: Tokenizer, wanted: bool) -> None:
    """Let a space stand in front of every text between special tokens, or none (SentencePiece). transformers' Metaspace
    leaves it out where a text begins with a space, and after special tokens."""
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if wanted else spaces
    backend.pre_tokenizer = None  # nothing is cut before the merges
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if wanted else steps)
