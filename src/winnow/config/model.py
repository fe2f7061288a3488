"""Options of the model, and of how it is loaded."""

from dataclasses import dataclass
from pathlib import Path

from winnow.config.option import Effect, option, optional_int
from winnow.errors import ConfigError
from winnow.values.checks import check_choice, check_integer, require

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # vLLM's
WEIGHT_DEVICES = {
    "int8": ("cpu", "cuda"),
    "q8_0": ("cpu",),
    "q4_0": ("cpu",),
    "fp8": ("cuda",),
    "int4": ("cuda",),
}
"""Devices on which linear layers can keep weights in a form."""
WEIGHT_DTYPES = ("auto", *WEIGHT_DEVICES)
LOAD_FORMATS = ("auto", "dummy")
ATTENTION_BACKENDS = ("auto", "native", "triton", "reference")
PAGED = "paged"
"""Winnow's own engine; others are joined by the entry points `winnow.engines`."""


@dataclass(frozen=True)
class ModelConfig:
    """Options of the model and of how it is loaded."""

    model: str | Path | None = option(
        None,
        "directory with config.json and safetensors weights, a GGUF file, or org/name on the Hugging Face Hub, with "
        ":Q4_K_M or :FILE behind it for a GGUF file there; left out in Python, demo on the command line: the demo "
        "model that ships with Winnow",
        short=("-m", "-hf", "--hf-repo"),
    )
    revision: str | None = option(
        None,
        "branch, tag or commit of a model on the Hub; left out: its main branch",
        effect=Effect.NEVER,  # the model's files are compared
    )
    tokenizer: str | Path | None = option(
        None,
        "directory, or org/name on the Hub, whose tokenizer and chat template are taken; left out: the model's own",
    )
    lora: str | Path | None = option(
        None,
        "an adapter that is merged into the weights as they are loaded: a directory of peft's, org/name on the Hub, or "
        "a GGUF file; =NAME behind it is what the server calls the model",
    )
    engine: str = option(
        PAGED,
        "what runs the model: paged, or the name of an engine of another package (padded: of winnow-lab), with options "
        "of its own behind a colon",
    )
    dtype: str = option(
        "auto",
        "number format of activations and KVs, and of weights that are in no blocks; auto: the checkpoint's own, on a "
        "CPU what `winnow bench formats` found fastest where the model has 64 MiB or more, else float32",
        choices=(*DTYPES, *_DTYPE_ALIASES),
    )
    weight_dtype: str = option(
        "auto",
        "how linear layers keep their weights; auto: in dtype, those of a quantized checkpoint as they are in its "
        "files, on a GPU by humming where dtype holds their scales; on a CPU q8_0, which int8 stands for there: 8 bits "
        "and a scale for each 32 inputs of a feature, as in GGUF's Q8_0 blocks, or q4_0: 4 bits likewise; on a GPU, by "
        "humming, int8; fp8: multiplied as such from compute capability 8.9 on; or int4: a scale and a zero for each "
        "128 inputs of a feature",
        choices=WEIGHT_DTYPES,
    )
    device: str = option(
        "auto", "torch device, such as cpu or cuda:0; auto: cuda where there is one, else cpu"
    )
    threads: int | None = option(
        None,
        "threads that compute on the CPU; left out: one per core that affinity and control groups let this process "
        "use, or what OMP_NUM_THREADS says",
        effect=Effect.BATCHES,
    )
    tensor_parallel_size: int = option(
        1,
        "processes that compute the model together, each with a part of its heads, weights and KVs: one for each NUMA "
        "node, or each GPU",
        short=("-tp",),
    )
    load_format: str = option(
        "auto",
        "auto: weights from safetensors; dummy: random weights from config.json alone",
        choices=LOAD_FORMATS,
    )
    max_model_len: int | None = option(
        None, "longest prompt plus answer, in tokens; left out: the model's own limit", parse=optional_int
    )
    attention_backend: str = option(
        "auto", "what computes attention over the paged cache", choices=ATTENTION_BACKENDS
    )
    language_model_only: bool = option(
        False, "leave the vision tower of a model that reads pictures out of memory", effect=Effect.NEVER
    )
    optimize: bool = option(
        True,
        "compute layers in fused passes, and on CPU keep weights packed for the processor, wherever that gives "
        "what the model's own code gives",
    )
    generation_config: str = option(
        "auto",
        "whose sampling parameters serve requests that bring none: auto: those of the model's generation_config.json; "
        "winnow: none; vllm: none, also not those that commands and the server take where a model recommends none; or "
        "a directory with a generation_config.json",
    )
    verify_model: bool = option(
        True,
        "compare a model that transformers reads with its own code, on a few tokens, and refuse it where they differ",
        effect=Effect.NEVER,
    )
    model_cache: bool = option(
        True,
        "keep a model that was loaded for the CPU as the processor reads it, in ~/.cache/winnow/models (or below "
        "XDG_CACHE_HOME), up to 8 GiB of them (`winnow cache`): its next start takes a second or two",
        effect=Effect.NEVER,
    )
    seed: int = option(0, "seed of requests that bring none, and of dummy weights")

    def __post_init__(self) -> None:
        require(isinstance(self.engine, str), "engine", "a name", self.engine)
        if str(self.tokenizer) == str(self.model):
            object.__setattr__(self, "tokenizer", None)
        # Also a torch.dtype, which is written torch.float16.
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", _DTYPE_ALIASES.get(dtype, dtype))
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("weight_dtype", self.weight_dtype, WEIGHT_DTYPES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.max_model_len is not None:
            check_integer("max_model_len", self.max_model_len, 1)
        if self.threads is not None:
            check_integer("threads", self.threads, 1, 1024)
        check_integer("tensor_parallel_size", self.tensor_parallel_size, 1, 1024)
        if self.tensor_parallel_size > 1:
            devices = "auto, cpu or cuda with tensor_parallel_size above 1, which takes the first GPUs"
            require(self.device in ("auto", "cpu", "cuda"), "device", devices, self.device)
        check_integer("seed", self.seed, 0, 2**63 - 1)

    def check_weight_device(self, kind: str) -> None:
        """Raise ConfigError if linear layers cannot keep their weights as `weight_dtype` says on a kind of device."""
        devices = WEIGHT_DEVICES.get(self.weight_dtype, (kind,))
        if kind not in devices:
            raise ConfigError(
                f"weight_dtype {self.weight_dtype} needs device {' or '.join(devices)}, got {kind}"
            )
