"""Pictures in a packed step: what the vision tower makes of them takes the places of their tokens' embeddings.

transformers' own forward does that, and all that a class does beside it (features added in the first layers): it is
handed the tower's outputs, of as many tokens as the step has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from winnow.models.load.processor import image_token
from winnow.values.images import PromptImage

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PackedImages:
    """Pictures of a packed step of T tokens.

    Attributes:
        tokens: indices in the batch of the n tokens that stand for parts of pictures, int64 [n], ascending.
        features: what the tower makes of those parts, each [n, size]: their embeddings, and what is added to hidden
            states after the first layers (deepstack).
        joined: the class's forward takes features of all pictures in one tensor, else picture by picture.
        positions: rotary positions of all tokens, int64 [3, T]; None: those of the step.
    """

    tokens: Tensor
    features: tuple[Tensor, ...]
    joined: bool
    positions: Tensor | None

    def arguments(self, model: "PreTrainedModel", tokens: Tensor) -> dict[str, Any]:
        """Return arguments of the model's forward for the step's `tokens`, int64 [T].

        Tokens that the model has for pictures and that stand for none, since a text holds them or they were sampled,
        keep their own embeddings.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        if not len(self.tokens):
            return {}
        places = torch.nonzero(tokens == image_token(model.config))[:, 0]
        features = self.features
        if len(places) > len(self.tokens):
            own = torch.searchsorted(places, self.tokens)
            # Gemma 4 reads them as padding, in a step without pictures too.
            padded = model.config.model_type == "gemma4"
            alone = model.config.text_config.pad_token_id if padded else image_token(model.config)
            embedded = model.get_input_embeddings()(torch.full_like(tokens[places], alone))
            features = tuple(
                (
                    embedded.to(each.dtype) if index == 0 else each.new_zeros(len(places), each.shape[1])
                ).index_copy(0, own, each)
                for index, each in enumerate(features)
            )
        first, *further = features
        out = BaseModelOutputWithPooling(pooler_output=first if self.joined else (first,))
        out.deepstack_features = [(each,) for each in further]
        return {"mm_encoder_outputs": {"image": out}}


@torch.inference_mode()
def run_tower(
    model: "PreTrainedModel", images: Sequence[PromptImage]
) -> tuple[list[tuple[Tensor, ...]], bool]:
    """Return what the vision tower makes of each picture, and `joined`: see `PackedImages`.

    Args:
        images: whose inputs have the same shapes; a class computes them in one batch.
    """
    inputs = {}
    for name, value in images[0].inputs.items():
        rows = [torch.from_numpy(image.inputs[name]) for image in images]
        whole = (rows[0] if len(rows) == 1 else torch.cat(rows)).to(model.device)
        inputs[name] = whole.to(model.dtype) if value.dtype.kind == "f" else whole
    out = model.get_image_features(**inputs, return_dict=True)
    parts = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
    counts = [len(image.tokens) for image in images]
    features = [_flat(part).to(model.dtype) for part in parts]
    assert len(features[0]) == sum(counts), (
        f"the tower gives {len(features[0])} features for {sum(counts)} tokens"
    )
    # A copy of each: what stays of a batch is dropped picture by picture.
    split = [[each.clone() for each in part.split(counts)] for part in features]
    return list(zip(*split, strict=True)), isinstance(out.pooler_output, Tensor)


def _flat(part: Tensor | Sequence[Tensor]) -> Tensor:
    """Return features of pictures' parts one behind the other, [n, size]."""
    whole = part if isinstance(part, Tensor) else torch.cat(list(part))
    return whole.reshape(-1, whole.shape[-1])
