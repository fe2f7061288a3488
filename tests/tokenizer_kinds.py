"""Small tokenizers of the kinds that models have."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Stop here, please! 123 456\n\nHuman: hello hello",
    "Grüße aus Köln, el niño añade çà et là; €5 “quotes” … naïve façade",
    "你好世界。これは日本語です。한국어 텍스트 😀🎉👩‍👩‍👧‍👦 नमस्ते",
] * 3
EOS, UNKNOWN = "<eos>", "<unk>"


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token=UNKNOWN)


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE so small that most characters outside ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[EOS, UNKNOWN])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


def with_byte_fallback(normalizer: normalizers.Normalizer, decoder: list[decoders.Decoder]) -> Tokenizer:
    """A BPE whose rare characters are spelt in byte tokens."""
    seeded = Tokenizer(models.BPE())
    seeded.normalizer = normalizer
    seeded.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=150, special_tokens=[EOS, UNKNOWN]))
    vocab = seeded.get_vocab()
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN, byte_fallback=True))
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([EOS, UNKNOWN])
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


def sentencepiece_style() -> PreTrainedTokenizerFast:
    """As in Llama 2: spaces are part of tokens, the first is dropped, rare characters are spelt in byte tokens."""
    return wrap(
        with_byte_fallback(
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        )
    )


def gemma_style() -> PreTrainedTokenizerFast:
    """As in Gemma: spaces are tokens' or their own, none is put in front or dropped, with byte fallback."""
    return wrap(
        with_byte_fallback(
            normalizers.Replace(" ", "▁"),
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
        )
    )


def unigram() -> PreTrainedTokenizerFast:
    """As in T5 and XLNet: a unigram model over words that begin with their space; unknown characters are lost."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=[EOS, UNKNOWN], unk_token=UNKNOWN)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


def wordpiece() -> PreTrainedTokenizerFast:
    """As in BERT: words, and pieces of words marked ##; the decoder puts spaces between, and tidies some away."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=[EOS, UNKNOWN])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece_style()
KINDS = {
    "byte-level": BYTE_LEVEL,
    "llama-2": SENTENCEPIECE,
    "gemma": gemma_style(),
    "unigram": unigram(),
    "wordpiece": wordpiece(),
}
