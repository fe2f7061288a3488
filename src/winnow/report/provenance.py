"""Provenance of a number: command, machine, versions, commit and date, as a report needs them."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_CPU_FOLDERS = Path("/sys/devices/system/cpu")
_USUAL_CACHE = 32 * 2**20


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    threads: int
    """That torch uses for one operation."""
    accelerator: str | None
    last_level_cache: int
    """Bytes, of all sockets together, or of the accelerator."""
    python_version: str
    torch_version: str
    transformers_version: str
    system: str

    @classmethod
    def here(cls, device: "torch.device | str" = "cpu") -> "Machine":
        """Describe this machine for work on `device`; "auto" is a GPU where there is one."""
        import torch  # late: the command and its machine are named without it where nothing is computed

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        on_gpu = torch.device(device).type == "cuda"
        properties = torch.cuda.get_device_properties(device) if on_gpu else None
        return cls(
            cpu=_cpu_name(),
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            accelerator=None if properties is None else properties.name,
            last_level_cache=cpu_cache_bytes() if properties is None else properties.L2_cache_size,
            python_version=platform.python_version(),
            torch_version=torch.__version__,
            transformers_version=version("transformers"),
            system=f"{platform.system()} {platform.machine()}",
        )

    def __str__(self) -> str:
        what = self.accelerator or f"{self.cpu}, {self.cores} cores, {self.threads} threads"
        return f"{what}; torch {self.torch_version}, transformers {self.transformers_version}"


def report_head(command: list[str], machine: Machine) -> dict[str, Any]:
    """Return the head of a report: command, date (UTC), commit (None outside a checkout), machine."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": asdict(machine),
    }


def typed_command() -> list[str]:
    """Return the command line as typed: the program without its directory, a package as `python -m` names it."""
    program, arguments = Path(sys.argv[0]), sys.argv[1:]
    if program.name != "__main__.py":
        return [program.name, *arguments]
    names, folder = [program.parent.name], program.parent.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    # `python -m winnow` is what `winnow` runs.
    return ["winnow", *arguments] if names == ["winnow"] else ["python", "-m", ".".join(names), *arguments]


def device_name(machine: Mapping[str, Any]) -> str:
    """Return the accelerator, or the processor with the cores it could use."""
    return machine["accelerator"] or f"{machine['cpu']}, {machine['cores']} cores"


def commit() -> str | None:
    """Return the checkout's commit, with "-dirty" where files differ; None outside a checkout."""
    root = Path(__file__).parents[3]
    git = shutil.which("git")
    # An installed package may lie inside another repository, whose commit is meaningless here.
    if git is None or not (root / ".git").exists():
        return None
    described = subprocess.run(  # noqa: S603
        [git, "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def cpu_cache_bytes(folder: Path = _CPU_FOLDERS) -> int:
    """Return bytes of the last-level caches of all sockets, read below `folder`; a usual size where nothing is said."""
    sizes: dict[str, int] = {}
    for cpu in folder.glob("cpu[0-9]*"):
        levels = sorted(cpu.glob("cache/index*"), key=lambda index: int((index / "level").read_text()))
        if levels:
            shared_by = (levels[-1] / "shared_cpu_list").read_text()
            sizes[shared_by] = int((levels[-1] / "size").read_text().strip().removesuffix("K")) * 2**10
    return sum(sizes.values()) or _USUAL_CACHE


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
