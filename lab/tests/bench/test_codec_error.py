"""Errors of codecs apart from each other: on keys that have a constant part, and on values that have none."""

from pathlib import Path

import torch
from tiny_llama import VOCAB, save_tiny_llama

from winnow.config import ModelConfig
from winnow.models.load.loader import load_plain_model
from winnow_lab.real.codec_error import codec_of, measure_errors


def test_fewer_bits_err_more_and_a_centre_helps_keys_alone(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path, seed=3, head_dim=32)
    model = load_plain_model(ModelConfig(path, dtype="float32")).model
    names = ["float32", "int8", "int4", "int4 centred", "int4 by channel", "int2"]
    token_ids = torch.randint(3, VOCAB, [64], generator=torch.Generator().manual_seed(0)).tolist()
    before = model(torch.tensor([token_ids])).logits
    errors, shape = measure_errors(model, token_ids, {name: codec_of(name) for name in names})
    assert set(errors["float32"].values()) == {0.0}
    for kind in errors["int8"]:
        assert 0 < errors["int8"][kind] < errors["int4"][kind] < errors["int2"][kind], kind
    assert errors["int4 centred"]["values"] == errors["int4"]["values"]
    assert errors["int4 centred"]["keys"] != errors["int4"]["keys"]
    assert errors["int4 by channel"]["values"] == errors["int4"]["values"]
    assert 0 < errors["int4 by channel"]["keys"] < errors["int4"]["keys"]
    assert 0 < shape["key_mean_share"] < 1 < shape["key_largest_channel"]
    assert torch.equal(model(torch.tensor([token_ids])).logits, before), "the model is left as it was"
