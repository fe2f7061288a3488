"""What the KV-Compress paper reports (sections 5.4 to 5.6), and how its setting differs from ours."""

from dataclasses import dataclass

L4 = "Llama-3.1-8B on an L4"
H100 = "Llama-3.1-70B FP8 on an H100"
_GPU = "model, GPU, vLLM"


@dataclass(frozen=True)
class Published:
    """One number of section 5.4: total throughput beside vLLM 0.6.0 with the full cache, prompts prefilled whole."""

    setting: str
    context: str
    """Tokens of the prompts; empty where the text does not say."""
    compression: float
    gain: float
    differs: str
    """From every setting of ours."""


PUBLISHED = (
    Published(L4, "6000", 64.0, 5.18, f"{_GPU}, prompts of 6000"),
    Published(L4, "6000", 32.0, 4.93, f"{_GPU}, prompts of 6000"),
    Published(L4, "500", 4.0, 2.54, f"{_GPU}, prompts of 500"),
    Published(L4, "500", 2.0, 2.0, f"{_GPU}, prompts of 500"),
    Published(H100, "", 64.0, 2.14, _GPU),
    Published(H100, "", 8.0, 1.8, _GPU),
)
BEST_GAIN = max(each.gain for each in PUBLISHED)
BATCHES = "decoding batches of over 100 were reached with both models (5.6)"
UNTOLD = "lengths of answers, and how many sequences the full cache held"
