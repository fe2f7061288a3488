"""What a process of Winnow keeps in memory, from its imports to its peak, beside its weights and its KV memory.

    python -m winnow_lab.memory.resident_memory
    python -m winnow_lab.memory.resident_memory --packed

Every configuration answers the work in a fresh process, which reads its resident set from /proc (Linux): after
`import torch`, after that of Winnow, with the model loaded, and at its highest while it answers. Pages of
files, such as the code of libraries, count as resident though processes share them; so they stand apart.

Extras that are installed can be imported by transformers: what an installation costs is measured in one without them.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from winnow.config import WEIGHT_DTYPES
from winnow_lab.bench.presets import PRESETS, Preset, model_cache
from winnow_lab.bench.work_options import WorkOptions, options_by_eviction
from winnow_lab.bench.workload import Workload
from winnow_lab.checkout import ROOT
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, flag, run_study

MIB = 2**20
TIMEOUT = 1800
# What an engine may take besides its weights and KVs, and by how much all of it may be exceeded.
ALLOWANCE, FACTOR = 200 * MIB, 1.2


@dataclass(frozen=True)
class Options(WorkOptions):
    """The work, and how the model is held."""

    weight_dtype: str = flag("auto", choices=WEIGHT_DTYPES)
    packed: bool = flag(False, "run the model as `winnow pack` writes it")
    threads: int = flag(len(os.sched_getaffinity(0)), "of torch", least=1)


@dataclass(frozen=True)
class Resident:
    """Bytes of a process that lie in memory."""

    anonymous: int
    """Of the process alone."""
    of_files: int
    """Mapped from files, or shared."""

    @property
    def total(self) -> int:
        """Both."""
        return self.anonymous + self.of_files

    @classmethod
    def now(cls) -> "Resident":
        """Of this process."""
        sizes = memory_sizes()
        return cls(sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"])

    def __str__(self) -> str:
        return f"{mib(self.total)} ({mib(self.anonymous)} + {mib(self.of_files)})"


def memory_sizes() -> dict[str, int]:
    """What Linux tells of this process's memory, in bytes by name."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    entries = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 2**10 for name, size, _ in entries}


def forget_peak() -> None:
    """Let the peak that Linux remembers begin anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def mib(size: float) -> str:
    """Whole MiB."""
    return f"{size / MIB:.0f}"


@dataclass(frozen=True)
class Stages:
    """The memory of one process, in the order of its life; peaks are those of a stage alone."""

    torch: Resident
    """With torch imported."""
    imports: Resident
    """With Winnow imported."""
    loading_peak: int
    """What the model needs is imported, weights are read, and packed unless they are; bytes."""
    loaded: Resident
    """With the model and an empty cache."""
    answered: Resident
    """After the last answer."""
    answering_peak: int
    """Bytes."""

    @property
    def peak(self) -> int:
        """Of the whole life, in bytes."""
        return max(self.loading_peak, self.answering_peak)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Stages":
        """From `asdict`."""
        resident: dict[str, Any] = {n: v if isinstance(v, int) else Resident(**v) for n, v in values.items()}
        return cls(**resident)


@dataclass(frozen=True)
class Case:
    """What one process does."""

    options: dict[str, Any]
    """Of `LLM`."""
    workload: Workload
    vocab_size: int
    threads: int

    def measure(self) -> Stages:
        """Do it in this process, which has imported nothing of size yet."""
        import torch as pytorch

        torch = Resident.now()
        pytorch.set_num_threads(self.threads)
        from winnow import LLM, SamplingParams

        imports = Resident.now()
        prompts = self.workload.prompts(self.vocab_size)
        params = SamplingParams(
            temperature=0.0, max_tokens=self.workload.new_tokens, ignore_eos=True, detokenize=False
        )
        forget_peak()
        with LLM(**self.options) as llm:
            loading_peak, loaded = memory_sizes()["VmHWM"], Resident.now()
            forget_peak()
            llm.generate(prompts, params)
            return Stages(torch, imports, loading_peak, loaded, Resident.now(), memory_sizes()["VmHWM"])


def measure_apart(case: Case, name: str) -> Stages:
    """The same in a process of its own.

    Raises:
        PeerError: it failed; holds the end of what it said.
    """
    from winnow_lab.peers.environment import call

    words = [sys.executable, "-m", "winnow_lab.memory.resident_memory", "--case", json.dumps(asdict(case))]
    output = call(words, f"the process of {name}", TIMEOUT, cwd=ROOT)
    return Stages.from_json(json.loads(output.splitlines()[-1]))


def serve(text: str) -> None:
    """The main function of that process: measure, print one line of JSON."""
    case = json.loads(text)
    stages = Case(**case | {"workload": Workload(**case["workload"])}).measure()
    print("\n" + json.dumps(asdict(stages)))


def weight_bytes(options: dict[str, Any]) -> int:
    """Of a model, each weight counted once."""
    from winnow.config import ModelConfig
    from winnow.models import load_model, load_plain_model

    if options["weight_dtype"] == "auto":
        model = load_plain_model(ModelConfig(model=options["model"], dtype=options["dtype"])).model
        return sum(weight.nbytes for weight in model.parameters())
    from winnow.models.fast.packed.write import other_tensors, packed_tensors

    decoder = load_model(ModelConfig(**options)).decoder
    if decoder is None:
        raise SystemExit("error: this installation has no kernels")
    return sum(tensor.nbytes for _, tensor in (*packed_tensors(decoder), *other_tensors(decoder)))


def table(title: str, found: dict[str, Stages], weights: int, kv_memory: int) -> TextTable:
    """Stages down, configurations across."""
    limit = FACTOR * (weights + kv_memory + ALLOWANCE)
    lines: dict[str, Callable[[Stages], str]] = {
        "torch imported": lambda stages: str(stages.torch),
        "Winnow imported": lambda stages: str(stages.imports),
        "loading, peak": lambda stages: mib(stages.loading_peak),
        "loaded": lambda stages: str(stages.loaded),
        "answered": lambda stages: str(stages.answered),
        "answering, peak": lambda stages: mib(stages.answering_peak),
        "weights": lambda _: mib(weights),
        "KV memory": lambda _: mib(kv_memory),
        "limit": lambda _: mib(limit),
        "peak - limit": lambda stages: f"{(stages.peak - limit) / MIB:+.0f}",
    }
    rows = tuple((name, tuple(map(tell, found.values()))) for name, tell in lines.items())
    notes = (
        "MiB; in brackets what is the process's own + what is mapped from files",
        f"limit: {FACTOR} x (weights + KV memory + {mib(ALLOWANCE)})",
    )
    return TextTable(title, "resident", tuple(found), rows, notes)


def packed(model: Path, preset: Preset, weight_dtype: str, folder: str) -> Path:
    """The model packed for this processor, below a folder."""
    from winnow.config import ModelConfig
    from winnow.models import pack_model

    directory = Path(folder) / "packed"
    pack_model(ModelConfig(model, dtype=preset.dtype, weight_dtype=weight_dtype), directory)
    return directory


def study(options: Options) -> Result:
    """Every configuration in a process of its own."""
    preset, work = PRESETS[options.work], options.workload
    model, weight_dtype = preset.shape.save(model_cache()), options.weight_dtype
    with TemporaryDirectory() as folder:
        path = packed(model, preset, weight_dtype, folder) if options.packed else model
        common = {"model": str(path), "dtype": preset.dtype, "weight_dtype": weight_dtype}
        cases = options_by_eviction(options, common)
        found = {
            name: measure_apart(Case(own, work, preset.shape.vocab_size, options.threads), name)
            for name, own in cases.items()
        }
    kv_memory = next(iter(cases.values()))["kv_memory"]
    weights = weight_bytes({"model": model, "dtype": preset.dtype, "weight_dtype": weight_dtype})
    title = (
        f"{work.requests} requests of {work.prompt_tokens} + {work.new_tokens} tokens, {options.threads} threads"
        f"{', packed model' * options.packed}{'' if weight_dtype == 'auto' else f', {weight_dtype} weights'}"
    )
    sizes = {name: asdict(stages) for name, stages in found.items()}
    numbers = {"weights": weights, "kv_memory": kv_memory, "resident": sizes}
    return Result("Resident memory", [table(title, found, weights, kv_memory)], numbers=numbers)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        serve(sys.argv[2])
    else:
        sys.exit(run_study(Options, study))
