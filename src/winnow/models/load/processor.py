"""The processor of a model that reads pictures, transformers' own: it makes tokens and pixels of text and pictures."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from winnow.errors import InvalidRequestError
from winnow.models.model.damage import first_line, read_object
from winnow.values.images import PromptImage, TokenGrid, rotary_positions

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedModel

FILES = ("processor_config.json", "preprocessor_config.json")
_OTHERS = ("video_processor", "feature_extractor")

_QWEN = ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
SERVED = ("gemma3", "gemma4", "idefics3", "internvl", "lfm2_vl", "mistral3", *_QWEN, "smolvlm")
"""Model types whose pictures are read as transformers reads them, which tests/models/test_images.py holds."""
_REFUSED = {
    "gemma3n": "the tower of {} is timm's, with which nothing was compared",
    "paligemma": "the whole prompt of {} sees itself in both directions, its text too",
    "llama4": "transformers' own class for {} with pictures does not run",
}


def has_processor(path: Path) -> bool:
    from winnow.models.load.gguf.vision import find_tower

    return any((path / file).is_file() for file in FILES) or find_tower(path) is not None


def image_token(config: "PretrainedConfig") -> int:
    return int(getattr(config, "image_token_id", None) or config.image_token_index)


def two_way_layers(config: "PretrainedConfig") -> Literal["all", "windowed"] | None:
    if config.model_type == "gemma3":
        return "all"
    vision = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    return "windowed" if vision and config.model_type == "gemma4" else None


def load_processor(
    path: Path,
    config: "PretrainedConfig",
    model_class: "type[PreTrainedModel]",
    make: Callable[[Any], Any] | None = None,
) -> "Processor | str":
    """Return the processor in a model's directory, or that which `make` makes of its class; text: why there is none, or
    why it cannot be used."""
    kind_name = config.model_type
    if kind_name not in SERVED:
        reason = _REFUSED.get(kind_name, "pictures of {} have not been compared with transformers")
        return reason.format(kind_name)
    if not has_processor(path):
        return f"{path} holds no processor_config.json"
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    try:
        import PIL  # noqa: F401

        named = [read_object(path / file).get("processor_class") for file in FILES if (path / file).is_file()]
        name = next(filter(None, named), None) or PROCESSOR_MAPPING_NAMES.get(config.model_type)
        kind: Any = processor_class_from_name(name)
        if kind is None:
            return f"transformers has no processor called {name!r}"
        kind = _for_pictures(kind)
        safe: Any = {"trust_remote_code": False, "local_files_only": True}
        own = kind.from_pretrained(path, **safe) if make is None else make(kind)
        return Processor(own, config, model_class)
    except ImportError as error:
        own = "Pillow (winnow-llm[vision]), and some processors torchvision or num2words"
        return f"a package is missing ({first_line(error)}); pictures need {own}"
    except Exception as error:  # each processor checks its files in its own way
        return f"the processor in {path} is not usable: {first_line(error)}"


def _for_pictures(kind: Any) -> Any:
    """Return a processor's class that needs no processors of videos and sound, which take further packages."""
    others = [name for name in kind.get_attributes() if name in _OTHERS]
    if not others:
        return kind
    from transformers.processing_utils import ProcessorMixin

    class Alone(ProcessorMixin):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{name: each for name, each in options.items() if name not in others})

    names = list(inspect.signature(kind.__init__).parameters)[1:]

    def attributes(cls: Any) -> list[str]:
        return [name for name in super(alone, cls).get_attributes() if name not in others]

    def from_args_and_dict(cls: Any, args: list[Any], *more: Any, **options: Any) -> Any:
        rest = iter(args)
        count = len(args) + len(others)
        whole = [None if name in others else next(rest) for name in names[:count]]
        return super(alone, cls).from_args_and_dict(whole, *more, **options)

    methods = {
        "get_attributes": classmethod(attributes),
        "from_args_and_dict": classmethod(from_args_and_dict),
    }
    alone: Any = type(kind.__name__, (kind, Alone), methods)
    return alone


class Processor:
    """A processor of transformers; see `winnow.prompt.prompts.ImageProcessor`. Holds no weights."""

    def __init__(self, own: Any, config: "PretrainedConfig", model_class: "type[PreTrainedModel]") -> None:
        self._own = own
        self._token = image_token(config)
        self._config = config
        self._takes = frozenset(inspect.signature(model_class.get_image_features).parameters)
        self._positions = _positions_of(config, model_class)
        self.chat_template: str | None = getattr(own, "chat_template", None)
        self._two_way = two_way_layers(config) is not None
        most = (getattr(own, "image_seq_length", 0), getattr(own.image_processor, "max_soft_tokens", 0))
        self.longest_run = max(most) if self._two_way else 0

    def process(
        self, prompt: str | Sequence[int], images: "Sequence[Image]", *, add_special_tokens: bool
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        mark = self._own.image_token
        text = prompt if isinstance(prompt, str) else self._own.tokenizer.decode(prompt)
        if (count := text.count(mark)) != len(images):
            raise InvalidRequestError(
                f"prompt must hold {mark!r} once for each of its {len(images)} images, got it {count} times"
            )
        try:
            data = [self._run(image) for image in images]
            pieces = text.split(mark)
            for index, each in enumerate(data):
                pieces[index] += each["text_replacement_offsets"][0][0]["replacement"]
            ids = self._own.tokenizer("".join(pieces), add_special_tokens=add_special_tokens)["input_ids"]
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise InvalidRequestError(f"images cannot be processed: {first_line(error)}") from error
        return ids, self._images(ids, data, [image.size for image in images])

    def _run(self, image: "Image") -> dict[str, Any]:
        """Return what the processor makes of a picture alone: its pixels, and the text that takes its mark's place."""
        options = {
            "add_special_tokens": False,
            "return_text_replacement_offsets": True,
            "return_tensors": "pt",
        }
        return dict(self._own(text=[self._own.image_token], images=[image], **options))

    def _images(
        self, ids: list[int], data: Sequence[Mapping[str, Any]], sizes: Sequence[tuple[int, int]]
    ) -> tuple[PromptImage, ...]:
        inputs = [self._inputs(each) for each in data]
        found = np.flatnonzero(np.array(ids) == self._token)
        counts = [int((each["input_ids"] == self._token).sum()) for each in data]
        if sum(counts) != len(found):
            raise InvalidRequestError(
                f"images must be {sum(counts)} tokens of the prompt, got {len(found)}: a text holds their token too"
            )
        tokens = np.split(found, np.cumsum(counts)[:-1])
        positions = None if self._positions is None else self._positions(ids, inputs)
        images = []
        for each, own, size in zip(inputs, tokens, sizes, strict=True):
            fields: dict[str, Any] = {"size": size, "grids": self._grids(each, own, ids)}
            if positions is not None:
                behind = int(own[-1]) + 1
                fields["positions"] = positions[:, own]
                fields["position_offset"] = int(positions[:, :behind].max()) + 1 - behind
            if self._two_way:
                fields["two_way"] = tuple((int(run[0]), int(run[-1]) + 1) for run in _runs(own))
            images.append(PromptImage.of(each, own, **fields))
        if positions is not None and not np.array_equal(rotary_positions(images, 0, len(ids)), positions):
            kind = self._config.model_type
            raise InvalidRequestError(f"images: {kind} counts positions in a way of its own")
        return tuple(images)

    def _inputs(self, data: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        return {
            name: np.ascontiguousarray((value.float() if value.is_floating_point() else value).numpy())
            for name, value in data.items()
            if name in self._takes and isinstance(value, torch.Tensor)
        }

    def _grids(
        self, inputs: Mapping[str, NDArray[Any]], tokens: NDArray[np.int64], ids: list[int]
    ) -> tuple[TokenGrid, ...]:
        """Return which part of its picture each of its tokens shows, as far as the prompt's tokens tell."""
        if "image_grid_thw" in inputs:
            _, rows, cols = (inputs["image_grid_thw"][0] // self._own.image_processor.merge_size).tolist()
            return (TokenGrid(0, rows, cols),)
        if "image_position_ids" in inputs:
            most = inputs["image_position_ids"].reshape(-1, 2).max(axis=0) + 1
            cols, rows = (most // self._config.vision_config.pooling_kernel_size).tolist()
            return (TokenGrid(0, rows, cols),)
        runs = _runs(tokens)
        before = self._own.tokenizer.convert_ids_to_tokens([ids[run[0] - 1] for run in runs])
        tiles = [re.search(r"row_(\d+)_col_(\d+)", name) for name in before]
        if len(runs) > 1 and not any(tiles):  # a run is a row
            return (TokenGrid(0, len(runs), len(runs[0])),)
        shapes = inputs.get("spatial_shapes")
        places = [(int(tile[1]), int(tile[2])) for tile in tiles if tile]
        height, width = np.max(places, axis=0).tolist() if places else (1, 1)
        grids, first = list[TokenGrid](), 0
        for index, (run, tile) in enumerate(zip(runs, tiles, strict=True)):
            rows = cols = int(len(run) ** 0.5)
            if shapes is not None:
                rows, cols = (-(-shapes[index] // self._config.downsample_factor)).tolist()
            if rows * cols != len(run):
                return ()
            box = (0.0, 0.0, 1.0, 1.0)
            if tile:
                row, col = int(tile[1]) - 1, int(tile[2]) - 1
                box = (col / width, row / height, (col + 1) / width, (row + 1) / height)
            grids.append(TokenGrid(first, rows, cols, box))
            first += len(run)
        return tuple(grids)


def _runs(tokens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return np.split(tokens, np.flatnonzero(np.diff(tokens) != 1) + 1)


def _positions_of(config: "PretrainedConfig", model_class: "type[PreTrainedModel]") -> Any:
    """Return what counts positions of three axes, by the class's own method, without its weights; None: it has none."""
    prefix = model_class.__name__.removesuffix("ForConditionalGeneration")
    holder: Any = getattr(sys.modules[model_class.__module__], f"{prefix}Model", None)
    if not hasattr(holder, "get_rope_index"):
        return None
    shell = holder.__new__(holder)
    nn.Module.__init__(shell)
    shell.config = config

    def positions(ids: list[int], inputs: Sequence[Mapping[str, NDArray[Any]]]) -> Any:
        tokens = torch.tensor([ids], device="cpu")
        grids = torch.cat([torch.from_numpy(each["image_grid_thw"]) for each in inputs])
        kinds = (tokens == image_token(config)).int()
        found, _ = shell.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grids)
        return found[:, 0].numpy()

    return positions


@dataclass(frozen=True)
class PackedImages:
    """Pictures of a packed step of T tokens, whose features transformers' own forward puts in their tokens' places.

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
        """Return arguments of the model's forward for the step's `tokens`, int64 [T]. Tokens that the model has for
        pictures and that stand for none, since a text holds them or they were sampled, keep their own embeddings."""
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
            first, *further = features
            wider = [embedded.to(first.dtype), *(x.new_zeros(len(places), x.shape[1]) for x in further)]
            features = tuple(x.index_copy(0, own, each) for x, each in zip(wider, features, strict=True))
        first, *further = features
        out = BaseModelOutputWithPooling(pooler_output=first if self.joined else (first,))
        out.deepstack_features = [(each,) for each in further]
        return {"mm_encoder_outputs": {"image": out}}


@torch.inference_mode()
def run_tower(
    model: "PreTrainedModel", images: Sequence[PromptImage]
) -> tuple[list[tuple[Tensor, ...]], bool]:
    """Return what the vision tower makes of each picture, and `joined`: see `PackedImages`. The pictures' inputs have
    the same shapes, and are computed in one batch."""
    inputs = {}
    for name, value in images[0].inputs.items():
        rows = [torch.from_numpy(image.inputs[name]) for image in images]
        whole = (rows[0] if len(rows) == 1 else torch.cat(rows)).to(model.device)
        inputs[name] = whole.to(model.dtype) if value.dtype.kind == "f" else whole
    out = model.get_image_features(**inputs, return_dict=True)
    parts = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
    counts = [len(image.tokens) for image in images]
    features = [_flat(part).to(model.dtype) for part in parts]
    found, wanted = len(features[0]), sum(counts)
    assert found == wanted, f"the tower gives {found} features for {wanted} tokens"
    # A copy of each: what stays of a batch is dropped picture by picture.
    split = [[each.clone() for each in part.split(counts)] for part in features]
    return list(zip(*split, strict=True)), isinstance(out.pooler_output, Tensor)


def _flat(part: Tensor | Sequence[Tensor]) -> Tensor:
    whole = part if isinstance(part, Tensor) else torch.cat(list(part))
    return whole.reshape(-1, whole.shape[-1])
