"""`winnow merge`: the outputs of the shards of a file of prompts become the output of a whole run."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from winnow.batch.journal import SHARD, read_identity
from winnow.batch.reader import InputFile, Shard
from winnow.cli.flags.paths import STANDARD, require_distinct, require_writable
from winnow.errors import UsageError
from winnow.report.fingerprint import Fingerprint, differences
from winnow.report.journal import draft_path

DESCRIPTION = """\
Join the outputs of `winnow run PROMPTS.jsonl --shard 1/N`, 2/N, ..., N/N to the output of a whole run.

The parts may be named in any order: the journal beside each says which shard it is. Nothing is written
unless every line of PROMPTS.jsonl is answered, under the same model and options.
"""
EPILOG = """\
examples:
  winnow run prompts.jsonl --shard 1/2 -o part-1.jsonl      # on one machine
  winnow run prompts.jsonl --shard 2/2 -o part-2.jsonl      # on another
  winnow merge prompts.jsonl part-*.jsonl -o answers.jsonl
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow merge PROMPTS.jsonl PART.jsonl ... -o OUT.jsonl"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("prompts", metavar="PROMPTS.jsonl", type=Path, help="file of prompts that was shared")
    parser.add_argument("parts", metavar="PART.jsonl", type=Path, nargs="+", help="outputs of the shards")
    text = "all answers, in the order of the prompts; - for standard output"
    parser.add_argument("-o", "--output", metavar="OUT.jsonl", type=Path, required=True, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace OUT.jsonl")


def execute(namespace: argparse.Namespace) -> int:
    output: Path = namespace.output
    is_stream = str(output) == STANDARD
    read = [("PROMPTS.jsonl", namespace.prompts), *(("PART.jsonl", part) for part in namespace.parts)]
    require_distinct([] if is_stream else [("OUT.jsonl", output)], read)
    if not is_stream:
        require_writable(output, str(output))
        if output.exists() and not namespace.overwrite:
            raise UsageError(f"{output} exists; pass --overwrite to replace it")
    prompts = InputFile.scan(namespace.prompts)
    parts = _in_order(prompts, namespace.parts)
    with ExitStack() as stack:
        files = [stack.enter_context(part.open("rb")) for part in parts]
        lines = (files[index % len(files)].readline() for index in range(prompts.num_requests))
        if is_stream:
            sys.stdout.buffer.writelines(lines)
            sys.stdout.buffer.flush()
            return 0
        try:
            draft = draft_path(output)
            with draft.open("wb") as file:
                file.writelines(lines)
            draft.replace(output)
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from error
    print(f"winnow: {output} has all {prompts.num_requests} answers of {len(parts)} parts", file=sys.stderr)
    return 0


def _in_order(prompts: InputFile, parts: Sequence[Path]) -> list[Path]:
    """Return the outputs of shards 1 to N of `prompts`. Raises UsageError: they are not those of one whole run."""
    found = dict[Shard, Path]()
    first: tuple[Path, Fingerprint] | None = None
    for path in parts:
        identity = read_identity(path)
        shard = Shard.parse(str(identity.pop(SHARD, Shard())))
        if identity.get("input") != prompts.sha256:
            raise UsageError(f"{path} answers other prompts than those of {prompts.path}")
        first = first or (path, identity)
        if refused := differences(first[1], identity, answers_alone=True).refused:
            raise UsageError(f"{first[0]} and {path} were made under other options: {'; '.join(refused)}")
        if shard in found:
            raise UsageError(f"{found[shard]} and {path} are both shard {shard}")
        found[shard] = path
        with path.open("rb") as file:
            answered = sum(line.endswith(b"\n") for line in file)
        lines = shard.num_lines(prompts.num_requests)
        if answered != lines:
            raise UsageError(
                f"{path} has {answered} of the {lines} answers of shard {shard}: run the command that made it "
                "again"
            )
    count = next(iter(found)).count
    wanted = [Shard(number, count) for number in range(1, count + 1)]
    if missing := [str(shard) for shard in wanted if shard not in found]:
        raise UsageError(f"parts must be all {count} shards of one run; there is no {', '.join(missing)}")
    for other in found.keys() - wanted:
        raise UsageError(f"parts must be the {count} shards of one run; {found[other]} is shard {other}")
    return [found[shard] for shard in wanted]
