"""Assistants that draft from the KVs of the model that answers: transformers' classes of Gemma 4."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from winnow.attention import AttentionSpec, BackendStep
from winnow.errors import ConfigError
from winnow.models.bind.binding import attention_by_part
from winnow.models.load.damage import first_line
from winnow.models.load.json_files import read_object
from winnow.models.load.loaded import LoadedModel

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
    """Attend with queries [1, Hq, T, d] over what the target's layer of the same kind has stored."""
    layer = int(module.kv_layer)  # type: ignore[arg-type]
    out = winnow_step.attend(layer, query[0].transpose(0, 1), AttentionSpec(scaling, sliding_window))
    return out[None], None


AttentionInterface.register(_NAME, _read_attention)


class Assistant:
    """An assistant that reads layers of the target's cache.

    Raises:
        ConfigError: it is not one for the target; names the reason.
    """

    def __init__(self, path: Path, target: LoadedModel) -> None:
        of_target: Any = target.model
        self._embed, text = of_target.get_input_embeddings(), of_target.config.get_text_config()
        kind = read_object(path / "config.json").get("model_type")
        if kind not in KINDS:
            raise ConfigError(
                f"speculative_config: model {path} is a {kind}, and assistants must be of a kind out of "
                f"{', '.join(KINDS)}"
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
        kinds = (getattr(text, "layer_types", None) or [])[
            : text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
        ]
        for module in self.model.modules():
            kind = getattr(module, "layer_type", None)
            if hasattr(module, "q_proj"):
                if kind not in kinds:
                    raise ConfigError(
                        f"speculative_config: model {path} reads {kind}, which the target has not"
                    )
                module.kv_layer = len(kinds) - 1 - kinds[::-1].index(kind)
        # What stands where KVs would: it says no more than that there are some.
        self._nothing = torch.zeros(1, 1, 1, 1, dtype=target.dtype, device=target.device)

    def compute(
        self, tokens: Tensor, hidden: Tensor, position: Tensor, step: BackendStep
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, V] of the tokens behind `tokens`, int64 [B], and hidden states to continue from, [B, D].

        Args:
            hidden: states of the tokens before, [B, D].
            position: at which the cache is read, int64 [B].
        """
        kinds = self.model.config.get_text_config().layer_types
        out = self.model(
            inputs_embeds=torch.cat([self._embed(tokens), hidden], dim=-1)[None],
            position_ids=position[None],
            shared_kv_states=dict.fromkeys(kinds, (self._nothing, self._nothing)),
            logits_to_keep=position,  # a tensor: all, where a number would leave some out
            winnow_step=step,
        )
        return out.logits[0], out.last_hidden_state[0]
