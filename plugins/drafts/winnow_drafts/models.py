"""Assistants that draft from the KVs of the model that answers: transformers' classes of Gemma 4."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from winnow.attention import AttentionSpec, BackendStep
from winnow.config import ModelConfig
from winnow.errors import ConfigError
from winnow.models.bind.binding import ATTENTION_NAME, AttentionStep, attention_by_part, set_attention
from winnow.models.bind.geometry_probe import probe_geometry
from winnow.models.fast.packed.decoder import Decoded
from winnow.models.load.hub import locate_model
from winnow.models.load.loaded import LoadedModel
from winnow.models.model.damage import first_line, read_object
from winnow.models.model.kinds import head_patterns, num_draft_heads, takes_attention

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Their `model_type`."""
_NAME = "winnow_reads"


def _read_attention(
    module: nn.Module,
    query: Tensor,
    *_: Any,
    winnow_step: BackendStep,
    scaling: float,
    sliding_window: int | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attend with queries [1, Hq, T, d] over what the target's layer of the same kind has stored: [1, T, Hq, d]."""
    layer = int(module.kv_layer)  # type: ignore[arg-type]
    out = winnow_step.attend(layer, query[0].transpose(0, 1), AttentionSpec(scaling, sliding_window))
    return out[None], None


AttentionInterface.register(_NAME, _read_attention)


class Assistant:
    """An assistant that reads layers of the target's cache. Raises ConfigError: it is not one for the target."""

    def __init__(self, path: Path, target: LoadedModel) -> None:
        of_target: Any = target.model
        self._embed, text = of_target.get_input_embeddings(), of_target.config.get_text_config()
        kind = read_object(path / "config.json").get("model_type")
        if kind not in KINDS:
            known = ", ".join(KINDS)
            raise ConfigError(
                f"speculative_config: model {path} is a {kind}, and assistants must be of a kind out of {known}"
            )
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=target.dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
            ).to(target.device)
        except Exception as error:  # each configuration checks itself in its own way
            raise ConfigError(f"speculative_config: model cannot load {path}: {first_line(error)}") from error
        self.model.eval().requires_grad_(False)
        self.model.set_attn_implementation(attention_by_part(self.model.config, _NAME))
        own = self.model.config.backbone_hidden_size, self.model.config.get_text_config().vocab_size
        if own != (text.hidden_size, target.vocab_size):
            raise ConfigError(
                f"speculative_config: model {path} is an assistant of models with hidden states of {own[0]} numbers "
                f"and {own[1]} tokens, not {text.hidden_size} and {target.vocab_size}"
            )
        storing = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
        kinds = (getattr(text, "layer_types", None) or [])[:storing]
        for module in self.model.modules():
            if not hasattr(module, "q_proj"):
                continue
            kind = getattr(module, "layer_type", None)
            if kind not in kinds:
                raise ConfigError(f"speculative_config: model {path} reads {kind}, which the target has not")
            module.kv_layer = len(kinds) - 1 - kinds[::-1].index(kind)
        # What stands where KVs would: it says no more than that there are some.
        self._nothing = torch.zeros(1, 1, 1, 1, dtype=target.dtype, device=target.device)

    def compute(
        self, tokens: Tensor, hidden: Tensor, position: Tensor, step: BackendStep
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, V] of the tokens behind `tokens`, int64 [B], and hidden states to continue from, [B, D]:
        `hidden`, [B, D], are those of the tokens before. The cache is read at `position`, int64 [B]."""
        kinds = self.model.config.get_text_config().layer_types
        out = self.model(
            inputs_embeds=torch.cat([self._embed(tokens), hidden], dim=-1)[None],
            position_ids=position[None],
            shared_kv_states=dict.fromkeys(kinds, (self._nothing, self._nothing)),
            logits_to_keep=position,  # a tensor: all, where a number would leave some out
            winnow_step=step,
        )
        return out.logits[0], out.last_hidden_state[0]


class DraftHeads(MtpModel):
    """The heads over a paged cache, called as causal models are; hidden states come and go beside."""

    _supports_attention_backend = True
    previous: Tensor | None = None  # hidden states with the next call's tokens, [T, D]; None: zeros
    depth: int | None = None  # the head that computes; None: all, one after the other
    outputs: Tensor  # hidden states of the last call, [T, D]

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
    Raises ConfigError: the checkpoint has none, or of a kind that is not read; names it."""
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
    own = target.tokenizer, target.vocab_size, target.max_model_len, target.eos_token_ids
    return LoadedModel(heads, *own, geometry=geometry, trained_len=target.trained_len)


def _refused(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"speculative_config: method mtp finds no heads to draft with in {path}: {reason}")
