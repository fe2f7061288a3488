"""`winnow bench throughput`: fixed work through the whole engine."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from winnow.cli.flags.engine import open_llm
from winnow.cli.screen.progress import MODES, Meter, open_progress, show_steps
from winnow.config import EngineConfig
from winnow.errors import UsageError
from winnow.values.units import format_bytes
from winnow_lab.bench.presets import PRESETS, Workload, kv_memory_for, model_cache
from winnow_lab.report.tables import TextTable
from winnow_lab.study import EngineOptions, Result, flag

if TYPE_CHECKING:
    from winnow_lab.bench.throughput import ThroughputReport

SUMMARY = "fixed work through the whole engine, in tokens per second"
ARGUMENTS = "[MODEL] "
DESCRIPTION = """\
Answer requests of random tokens, greedily, all submitted at once, and tell how long it took.

Loading the model and a first tiny request are not timed. The work is done several times by the
same engine; medians count, least and most stand beside them.
"""
EPILOG = """\
examples:
  winnow bench throughput --preset w1
  winnow bench throughput --preset w1 --eviction kv-compress-pd --compression 4 --json w1.json
  winnow bench throughput --model DIR --requests 64 --prompt-tokens 2048 --kv-seqs 8
--preset w1 is a Llama of 107 million random parameters: 32 requests of 1024 + 128 tokens in
bfloat16, with KV memory for 8 whole sequences. Whatever else is typed takes precedence.
"""
# As vLLM has them.
_PROMPT, _ANSWER = ("input_len", "random_input_len"), ("output_len", "random_output_len")


@dataclass(frozen=True)
class Options(EngineOptions):
    preset: str | None = flag(None, "a model, its work and KV memory, by name", choices=tuple(PRESETS))
    requests: int | None = flag(None, "(default: the preset's, or 32)", least=1, aliases=("num_prompts",))
    prompt_tokens: int | None = flag(None, "random (default: the preset's, or 512)", least=1, aliases=_PROMPT)
    new_tokens: int | None = flag(None, "(default: the preset's, or 64)", least=1, aliases=_ANSWER)
    prompt_seed: int | None = flag(None, "of the prompts (default: 0)", least=0)
    kv_seqs: int | None = flag(None, "in place of --kv-memory: bytes of N whole sequences", least=1)
    repeat: int = flag(3, "times", least=1)
    progress: str = flag("auto", "auto: live on a terminal, else a line every 5 s", choices=MODES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_seqs is not None and "kv_memory" in self.engine:
            raise UsageError("--kv-seqs and --kv-memory mean the same, give one")

    @property
    def workload(self) -> Workload:
        usual = Workload() if self.preset is None else PRESETS[self.preset].workload
        return usual.having(**{name: getattr(self, name) for name in vars(usual)})


def measure(options: Options) -> Result:
    from winnow_lab.bench.throughput import measure_throughput, spread

    # Passes repeat their prompts.
    engine: dict[str, Any] = {"enable_prefix_caching": False, **options.engine}
    work, kv_seqs = options.workload, options.kv_seqs
    if options.preset is not None:
        preset = PRESETS[options.preset]
        engine = {"dtype": preset.dtype, **engine}
        if "kv_memory" not in engine:
            kv_seqs = kv_seqs or preset.kv_seqs
        if "model" not in engine:
            with Console(stderr=True).status("making the model"):
                engine["model"] = str(preset.shape.save(model_cache()))
    if kv_seqs is not None:
        engine["kv_memory"] = kv_memory_for(EngineConfig.from_options(engine), kv_seqs, work.sequence_tokens)
    with open_llm(engine) as llm, open_progress(options.progress, sys.stderr) as progress:
        show = show_steps(progress, Meter(), work.requests)
        report = measure_throughput(llm, work, llm.vocab_size, options.repeat, show)
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in engine.items()}
    rates = {
        "output tokens/s": ("output_rate", ",.1f"),
        "total tokens/s": ("total_rate", ",.0f"),
        "wall time, s": ("seconds", ".2f"),
        "processor time, s": ("cpu_seconds", ".2f"),
        "time to first token, s": ("first_token_seconds", ".2f"),
    }
    passes, last = report.passes, report.passes[-1]
    rows = [(name, spread([getattr(p, read) for p in passes]), form) for name, (read, form) in rates.items()]
    rows += [(f"  {part}, s", spread([p.parts[part] for p in passes]), ".2f") for part in last.parts]
    table = TextTable(
        f"{work.requests} requests of {work.prompt_tokens} + {work.new_tokens} tokens",
        "",
        (f"median of {len(passes)}", "least", "most"),
        tuple((name, tuple(format(value, form) for value in values)) for name, values, form in rows),
        _facts(report),
    )
    numbers = {"engine": shown, "kv_seqs": kv_seqs} | report.to_json()
    return Result("winnow bench throughput", [table], numbers=numbers, lists=("passes",))


def _facts(report: "ThroughputReport") -> tuple[str, ...]:
    """What is the same in every pass, or grows over them: of the last."""
    last = report.passes[-1]
    return (
        f"Running at once: {last.mean_running:.1f} on average, {last.most_running} at most; {last.steps:,} steps, "
        f"{last.preemptions:,} preemptions, {last.eviction_rounds:,} eviction rounds.",
        f"KV memory given: {format_bytes(report.kv_bytes_budget)}, used at most: {format_bytes(last.kv_bytes_peak)}; "
        f"memory of the process, peak: {format_bytes(report.peak_resident_bytes)}.",
    )
