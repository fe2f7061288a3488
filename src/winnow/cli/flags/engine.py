"""The engine behind a command: its flags, its options, and opening it late.

Loading a model brings libraries that take seconds to import, so that waits until everything typed has been checked.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from winnow.batch.journal import OF_REQUESTS
from winnow.cli.flags.llama_cpp_flags import add_llama_cpp_flags
from winnow.cli.flags.options import add_flags, given
from winnow.cli.flags.paths import require_distinct
from winnow.cli.known_accuracy import PAGE, lost_tasks
from winnow.cli.loading import show_loading
from winnow.config import AUTO, PARTS, EngineConfig, ModelConfig, present_options
from winnow.errors import UsageError
from winnow.models.load.hub import fetched_repositories, is_repository, locate_model
from winnow.models.load.named import NAMED_MODELS
from winnow.process.lazy import importing
from winnow.sampling import SamplingParams
from winnow.sampling.params import READERS
from winnow.values.foreign_names import ForeignName, translate
from winnow.values.units import format_bytes
from winnow.vllm import names as vllm_names

if TYPE_CHECKING:
    from winnow.llm import LLM


COMMON: Mapping[str, str] = MappingProxyType(
    {
        "model": "directory, GGUF file, or org/name on the Hub",
        "dtype": "number format of weights and KVs",
        "max_model_len": "longest prompt plus answer, in tokens",
        "kv_memory": "of the KV cache",
        "kv_cache_dtype": "of stored KVs, such as int8",
        "eviction": "which KVs stay: see `winnow policies`",
        "compression": "tokens of the prompt per KV kept, or auto",
        "max_num_seqs": "most sequences at once",
        "max_tokens": "longest answer, in tokens",
        "temperature": "0 takes the most probable token",
        "top_p": "share of probability drawn from",
        "structured_outputs": "a schema, choice, regex or grammar",
    }
)
"""Options and sampling parameters that `--help` shows, in a line each; `--help all` shows the others too, in full."""
DEMO = "demo"
"""Name of the demo model, where no directory has it."""
OF_SEVERAL = ("n", "logprobs", "prompt_logprobs")
"""Sampling parameters that mean nothing to a command that shows one answer's text."""
_TELLING_SECONDS, _SILENT_SECONDS = 0.4, 2.0
UNFLAGGED = ("seed", "reuse", *READERS, "output_kind", *OF_REQUESTS)
"""Sampling parameters without a flag; requests that bring no seed take the engine's."""


def add_engine_flags(
    parser: argparse.ArgumentParser,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Add one flag per option of the engine, except those of `skip`; `defaults` are the command's own.

    vLLM's flags are declared too; help does not show them.
    """
    add_llama_cpp_flags(parser, device="device" not in skip)
    for title, config in PARTS.items():
        add_flags(parser, config, title, skip, defaults, COMMON)
    add_foreign_flags(parser, vllm_names.ENGINE)


def add_foreign_flags(parser: argparse.ArgumentParser, names: Mapping[str, ForeignName]) -> None:
    """Declare another engine's flags, where the parser has none of the name; help does not show them."""
    for name, foreign in names.items():
        flags = [f"--{name.replace('_', '-')}", *filter(None, [foreign.short])]
        if flags[0] not in parser._option_string_actions:
            extra: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if foreign.switch else {}
            parser.add_argument(
                *flags, dest=_foreign(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **extra
            )


def foreign_values(namespace: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values typed behind another engine's flags, by its names."""
    return {name: getattr(namespace, _foreign(name)) for name in names if hasattr(namespace, _foreign(name))}


def check_foreign(namespace: argparse.Namespace, names: Mapping[str, ForeignName]) -> None:
    """Raise UsageError for flags of another engine that ask for what is not done."""
    translate(foreign_values(namespace, names), names, (), UsageError, "flag")


def _foreign(name: str) -> str:
    return f"foreign_{name}"


def typed_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's options as typed, under Winnow's names, also of vLLM's flags."""
    options = present_options(
        given(namespace, *PARTS.values()) | foreign_values(namespace, vllm_names.ENGINE)
    )
    if options.get("model") == DEMO and not Path(DEMO).exists():
        del options["model"]
    return options


def usual_model(
    namespace: argparse.Namespace, options: dict[str, Any], *, or_demo: bool = False
) -> dict[str, Any]:
    """Return the options with SmolLM2, of models/ or the Hub's cache, where no model was typed; `or_demo`: else
    with the demo model, and a line that says so. Raises UsageError: it is not here."""
    if options.get("model") is not None or getattr(namespace, "model", None) == DEMO:
        return options
    file = Path("models") / NAMED_MODELS["smollm2"].file
    cached = (name for name, _ in fetched_repositories() if "/SmolLM2-" in name and "Instruct" in name)
    model = str(file) if file.is_file() else next(cached, None)
    if model is None:
        text = (
            "no MODEL was given, and SmolLM2 is not here: `winnow pull smollm2` fetches it (98 MB), `winnow pull` "
            f"lists others, and --model {DEMO} is the demo model, which looks facts up in a text and does nothing else"
        )
        if not or_demo:
            raise UsageError(text)
        print(f"winnow: {text}; it starts now", file=sys.stderr)
        return options
    return options | {"model": model}


def engine_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's options as typed, checked as far as that needs no model. Raises ConfigError, UsageError."""
    options = typed_options(namespace)
    check_engine_options(options)
    return options


def check_engine_options(options: Mapping[str, Any]) -> None:
    config = EngineConfig.from_options(options)
    model_exists(config.model.model)
    if isinstance(config.eviction.eviction, str):
        from winnow.eviction import find_preset

        find_preset(config.eviction.eviction)


def model_exists(model: str | Path | None) -> None:
    if model is not None and not Path(model).exists() and not is_repository(model):
        raise UsageError(
            "model must be a directory with config.json and weights, a GGUF file, or org/name on the Hugging Face "
            f"Hub, with :FILE or :Q4_K_M for a GGUF file there, got {str(model)!r}"
        )


def model_files(options: Mapping[str, Any]) -> list[tuple[str, Path]]:
    """Return what nothing may be written over, for `require_distinct`: a model's directory and the files in it."""
    model = options.get("model")
    if model is None or not Path(model).is_dir():
        return []
    files = [("a file of --model", path) for path in sorted(Path(model).iterdir()) if path.is_file()]
    return [("--model", Path(model)), *files]


def check_written(written: Mapping[str, Path | None], options: Mapping[str, Any]) -> None:
    """Raise UsageError for files that would be written over by each other, or over the model's."""
    named = [(name, path) for name, path in written.items() if path is not None]
    require_distinct(named, model_files(options))


def add_sampling_flags(
    parser: argparse.ArgumentParser,
    title: str,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    also: Collection[str] = (),
) -> None:
    """Add one flag per sampling parameter, except those of `skip`; `defaults` are the command's own, and `also`
    parameters of a single request, for a command that has one."""
    without = [name for name in UNFLAGGED if name not in also]
    add_flags(parser, SamplingParams, title, (*without, *skip), defaults, COMMON)


def sampling_options(namespace: argparse.Namespace, also: Collection[str] = ()) -> dict[str, Any]:
    """Return the sampling parameters as typed, checked; `also` as in `add_sampling_flags`."""
    typed = given(namespace, SamplingParams)
    options = {name: value for name, value in typed.items() if name not in UNFLAGGED or name in also}
    SamplingParams.from_mapping(options)
    return options


def open_llm(options: dict[str, Any], *, announce: bool = False, quiet: bool = False) -> "LLM":
    """Load the model and set up its cache; `announce` and `quiet` as in `show_loading`."""
    name = "the demo model" if options.get("model") is None else str(options["model"])
    with show_loading(name, sys.stderr, announce=announce, quiet=quiet):
        with importing():
            from winnow.llm import LLM

        silence_transformers()
        llm = LLM(**options)
    lines = [] if quiet else _known_lines(llm)
    left = llm.config.eviction.compression
    if llm.config.codec_factor > 1 and left != AUTO and not quiet:
        kvs = f"{llm.config.cache.kv_cache_dtype} KVs and "
        kvs += "all of them" if left is None else f"{left:.2g}x fewer KVs"
        lines.insert(0, f"winnow: compression {options['compression']:g} in bytes: {kvs}")
    for line in lines:
        print(line, file=sys.stderr)
    return llm


def _known_lines(llm: "LLM") -> list[str]:
    """Return lines on the policy that `auto` takes, and on tasks that the engine's policy was measured to lose."""
    from winnow.eviction import resolve_policy

    eviction, model = llm.config.eviction, llm.config.model.model
    chosen = resolve_policy(eviction)
    compression = chosen.amount.compression
    if chosen.policy.when.never or compression is None:
        return []
    lines = []
    if eviction.compression == AUTO:
        taken = f"{chosen.name}, up to {compression:g}x, where memory is short"
        if llm.config.codec_factor > 1:
            taken = f"{llm.config.cache.kv_cache_dtype} KVs; {taken}"
        lines.append(f"winnow: --compression auto: {taken}")
    if lost := lost_tasks(model, chosen.name, compression):
        tasks = ", ".join(f"{each.share:.2f} of {each.task} at {each.compression:g}x" for each in lost[:3])
        lines.append(
            f"winnow: warning: of the full cache's answers {chosen.name} keeps {tasks} on this model ({PAGE}); "
            "`winnow eval` measures yours"
        )
    return lines


def conversation_params(llm: "LLM", defaults: Mapping[str, Any], typed: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a person's questions; print them on standard error if neither model nor user set any.

    `defaults` are the command's own, below the model's and what is typed.
    """
    params = SamplingParams.from_mapping({**defaults, **llm.conversation_defaults, **typed})
    if note := sampling_note(llm, typed, params):
        print(note, file=sys.stderr)
    return params


def _sampled(params: SamplingParams) -> str:
    limit = "the end of the context" if params.max_tokens is None else f"{params.max_tokens} tokens"
    return (
        f"temperature {params.temperature:g}, top_p {params.top_p:g}, min_p {params.min_p:g}, up to {limit} "
        "(--temperature 0 takes the most probable token)"
    )


def served_sampling(llm: "LLM") -> str:
    """Return the line on how a server samples where requests do not say."""
    params = SamplingParams.from_mapping(llm.conversation_defaults)
    why = "as the model recommends"
    if llm.conversation_defaults.keys() != llm.sampling_defaults.keys():
        why = "for the model recommends none (--generation-config vllm takes vLLM's defaults)"
    elif llm.config.model.generation_config == "vllm":
        why = "vLLM's defaults"
    shown = f"temperature {params.temperature:g}, top_p {params.top_p:g}, min_p {params.min_p:g}"
    return f"winnow: sampling where requests do not say: {shown}, {why}"


def sampling_note(llm: "LLM", typed: Mapping[str, Any], params: SamplingParams) -> str | None:
    """Return a line that says how tokens are sampled; None: the model's makers or the user say."""
    if llm.conversation_defaults.keys() == llm.sampling_defaults.keys() or "temperature" in typed:
        return None
    return f"winnow: the model recommends no sampling: {_sampled(params)}"


def silence_transformers() -> None:
    """Keep transformers off standard error, which is for progress and messages; it reads this when it is imported.

    It imports torchao where that is installed, which names the kernels that this machine cannot load.
    """
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def model_path(options: Mapping[str, Any]) -> Path:
    """Return where the model lies that the engine's options name, fetched where it is a repository of the Hub."""
    named = {name: options[name] for name in ("model", "revision") if name in options}
    return locate_model(ModelConfig(**named))


def engine_lines(llm: "LLM", name: str) -> list[str]:
    """Return the model and its context, what computes it, and the memory that KVs have: a line each."""
    from winnow.process import native

    config: EngineConfig = llm.config
    scheduler, sample = config.scheduler, 1024
    tokens = config.cache.kv_memory * sample // max(1, llm.kv_bytes(sample))
    computed_by = llm.implementation()
    if native.is_installed() and llm.device.type == "cpu":
        computed_by["kernels"] = str(native.instruction_set())
    return [
        f"winnow: {name}, context {llm.max_model_len} tokens",
        "winnow: " + ", ".join(f"{what} {which}" for what, which in computed_by.items()),
        f"winnow: KV memory {format_bytes(config.cache.kv_memory)} ({tokens} tokens uncompressed), at most "
        f"{scheduler.max_num_seqs} answers in a batch, {scheduler.max_num_batched_tokens} tokens in a step",
        memory_line(llm),
    ]


def with_speed(llm: "LLM", outputs: Iterator[Any]) -> Generator[Any, None, None]:
    """Yield a request's outputs, behind a line on standard error on what computes them and how fast, which the first
    tokens tell: those are held back for `_TELLING_SECONDS`, or until the answer ends. Before the first, a long prompt
    has a line of its own."""
    began, first, said = 0.0, 0, False
    with closing(outputs):  # type: ignore[type-var]
        with show_loading("the prompt", sys.stderr, doing="reading", done="read", patience=_SILENT_SECONDS):
            begin = list(islice(outputs, 1))
        for output in chain(begin, outputs):
            count, now = len(output.outputs[0].token_ids), time.monotonic()
            began, first = (began, first) if first else (now, count)
            if not said and (now - began >= _TELLING_SECONDS or output.finished):
                speed = f": about {(count - first) / (now - began):.0f} tokens/s" if count > first else ""
                print(f"winnow: {_formats(llm)}{speed}", file=sys.stderr, flush=True)
                said = True
            if said:
                yield output


def _formats(llm: "LLM") -> str:
    from winnow.process import native

    stored = str(llm.dtype).removeprefix("torch.") if llm.stored_kind is None else llm.stored_kind
    stored += " as stored" if llm.stored_kind is not None and llm.weight_dtype == "auto" else ""
    on_cpu = llm.device.type == "cpu"
    return f"{stored}, {(native.instruction_set() or 'no kernels').upper() if on_cpu else llm.device.type}"


def memory_line(llm: "LLM") -> str:
    """Return the line on memory: weights and their formats, the limit of KVs, and the rest of the process."""
    dtype = str(llm.dtype).removeprefix("torch.")
    formats = dtype if llm.weight_dtype == "auto" else f"{dtype}, linear layers {llm.weight_dtype}"
    weights, kvs, rest = (
        format_bytes(each) for each in (llm.weight_bytes, llm.config.cache.kv_memory, llm.program_bytes)
    )
    return f"winnow: memory: weights {weights} ({formats}) + KVs up to {kvs} + about {rest} for all else"
