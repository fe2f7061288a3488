"""Train the demo model's tokenizer: byte-level BPE whose numbers split into groups of at most two digits.

Two digits a token keep a passage number or a line number whole and a four-digit key at two tokens, which a small model
copies far more reliably than single digits.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import corpus
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from winnow_lab.evaluate.demo_tasks import words

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}{{ 'Question: ' + message['content'] + '\\nAnswer:' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% endif %}"
    "{% endfor %}"
)


def training_text(data: Path, words: list[str]) -> Iterator[str]:
    """The corpus, then every two-digit number and task word often enough to become one token."""
    for path in corpus.training_files(data):
        yield from corpus.read_paragraphs(path)
    for number in range(100):
        yield " ".join([f"{number:02d}"] * 3000)
    for word in ("Question", "Answer", "Passage"):
        yield "\n".join([word] * 4000)
    for word in words:
        yield "\n".join([word] * 400)


def task_words() -> list[str]:
    """Words of the tasks that the corpus has too rarely; a space in front where they follow one in a text."""
    spaced = [*words.NAMES]
    spaced += [word for values in words.ATTRIBUTES.values() for value in values for word in value.split()]
    alone = [word for group in words.WORD_GROUPS.values() for word in group]
    alone += [*words.ADJECTIVES, *words.NOUNS, *words.VERBS]
    alone += ["Key", "The", "def", "\n    return"]
    spaced += [
        "favourite",
        "season",
        "instrument",
        "value",
        "belongs",
        "x",
        "y",
        "n",
        "k",
        "+",
        "*",
        "%",
        "//",
    ]
    return sorted({" " + word for word in spaced if not word.isdigit()}) + sorted(set(alone))


def train(data: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer that puts `<s>` in front and, as a chat, asks "Question: ... Answer:" once per user message."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(training_text(data, task_words()), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    """Command line: `python training/tokenizer.py --data DIR --out src/winnow/models/demo`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the text_* folders of the corpus"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for tokenizer.json and tokenizer_config.json"
    )
    parser.add_argument("--vocab-size", type=int, default=5120, help="entries, special tokens included")
    arguments = parser.parse_args()
    tokenizer = train(arguments.data, arguments.vocab_size)
    tokenizer._tokenizer.save(str(arguments.out / "tokenizer.json"))
    tokenizer.save_pretrained(arguments.out, save_jinja_files=False)
    print(f"wrote a tokenizer of {len(tokenizer)} entries to {arguments.out}")


if __name__ == "__main__":
    main()
