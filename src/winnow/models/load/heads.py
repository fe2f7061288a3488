"""Heads of a checkpoint that predict tokens behind the next one (MTP), by transformers' `MtpModel`."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from winnow.config import ModelConfig
from winnow.errors import ConfigError
from winnow.models.bind.binding import ATTENTION_NAME, AttentionStep, set_attention
from winnow.models.bind.geometry_probe import probe_geometry
from winnow.models.fast.packed.decoder import Decoded
from winnow.models.load.damage import first_line
from winnow.models.load.hub import locate_model
from winnow.models.load.kinds import head_patterns, num_draft_heads, takes_attention
from winnow.models.load.loaded import LoadedModel


class DraftHeads(MtpModel):
    """The heads over a paged cache, called as causal models are; hidden states come and go beside.

    Attributes:
        previous: hidden states that go with the tokens of the next call, [T, D]; None: zeros.
        depth: the head that computes; None: all, one after the other.
        outputs: hidden states of the last call, [T, D].
    """

    _supports_attention_backend = True
    previous: Tensor | None = None
    depth: int | None = None
    outputs: Tensor

    def create_masks_for_mtp_layer(self, *_: Any, **__: Any) -> dict[str, None]:
        return {"attention_mask": None}

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        winnow_step: AttentionStep | None = None,
        logits_to_keep: Tensor | int = 0,
        **more: Any,
    ) -> Decoded:
        previous, depth = self.previous, self.depth
        if previous is None:
            size = self.config.hidden_size
            previous = torch.zeros(input_ids.shape[1], size, dtype=self.dtype, device=input_ids.device)
        hidden = previous[None]
        more = {"use_cache": False, "winnow_step": winnow_step}
        for index in range(self.num_mtp_layers) if depth is None else (depth,):
            hidden = self.forward_layer(index, hidden, position_ids, None, input_ids=input_ids, **more)
        self.outputs = hidden[0]
        wanted = hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        return Decoded(self._project_to_logits(wanted))


def load_heads(config: ModelConfig, target: LoadedModel) -> LoadedModel:
    """Load the heads of the target's checkpoint, bound to a paged cache of their own; embedding and head are shared.

    Raises:
        ConfigError: the checkpoint has none, or of a kind that is not read; names it.
    """
    path = locate_model(config)
    model: Any = target.model
    kind = type(model)
    whole = copy.deepcopy(model.config)
    text = whole.get_text_config()
    count = num_draft_heads(whole)
    if not count:
        raise _refused(path, "its config.json names none")
    if path.is_file() or getattr(model.config, "quantization_config", None) is not None:
        raise _refused(path, "heads are read from safetensors that are not quantized")
    if not takes_attention(kind):
        raise _refused(path, f"attention of {kind.__name__} cannot be replaced")
    text.num_mtp_layers = count
    for name in ("layer_types", "mlp_layer_types"):  # as those that close the model
        if getattr(text, name, None) and not getattr(text, f"mtp_{name}", None):
            setattr(text, f"mtp_{name}", [getattr(text, name)[-1]] * count)
    whole.name_or_path, whole.dtype = str(path), target.dtype
    try:
        with torch.device("meta"):
            empty: Any = kind._from_config(whole)
        empty._keys_to_ignore_on_load_unexpected = head_patterns(whole)  # classes name those of one size
        heads: Any = MtpModel.from_pretrained(empty, device_map={"": target.device})
        heads.__class__ = DraftHeads  # after loading: names of weights are known by that of the class
        heads.tie_with_main_model(model)
        heads.eval().requires_grad_(False)
        set_attention(heads, ATTENTION_NAME)
        geometry = probe_geometry(heads)
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise _refused(path, f"{first_line(error):.200}") from error
    return LoadedModel(
        heads,
        target.tokenizer,
        target.vocab_size,
        target.max_model_len,
        target.eos_token_ids,
        geometry=geometry,
        trained_len=target.trained_len,
    )


def _refused(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"speculative_config: method mtp finds no heads to draft with in {path}: {reason}")
