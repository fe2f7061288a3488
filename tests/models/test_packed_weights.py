"""Packed weights give the products and embeddings of the plain ones, and let go of the pages they were read from."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, build
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel

pytest.importorskip("winnow._native")
from optimizing import MAX_POSITION, Step, bound, optimized

from winnow.config import ModelConfig
from winnow.models.bind.binding import ATTENTION_NAME
from winnow.models.bind.geometry_probe import probe_geometry
from winnow.models.fast.fused.build import run_model
from winnow.models.fast.fused.kernels import LayerKernels
from winnow.models.fast.packed_linear import (
    PackedEmbedding,
    PackedLinear,
    linear_maker,
    pack_linears,
    put_back,
)
from winnow.models.load.loader import load_model
from winnow.models.model.memory import is_file_backed, release_pages, trim_heap
from winnow.process.native import native_kernels

pytestmark = pytest.mark.cpu


@pytest.fixture
def kernels() -> LayerKernels:
    return LayerKernels(native_kernels())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products(kernels: LayerKernels, dtype: torch.dtype, bias: bool) -> None:
    plain = nn.Linear(70, 130, bias=bias).to(dtype)
    x = torch.randn(2, 17, 70).to(dtype)
    packed = PackedLinear.pack([plain], kernels)
    eps = 2 * torch.finfo(dtype).eps
    for rows in (x, x[:, :1], x.transpose(0, 1), x[..., :0, :]):
        found, expected = packed(rows), plain(rows)
        assert found.dtype == dtype and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=eps, atol=8 * eps)
    with pytest.raises(TypeError, match="cannot multiply"):
        packed(x.double())


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, PackedLinear), (torch.float16, nn.Linear)], ids=str
)
def test_an_odd_number_of_inputs(kernels: LayerKernels, dtype: torch.dtype, kind: type) -> None:
    """Pairs of inputs are packed in 16 bits, and one would be left over."""
    plain = nn.Linear(7, 5).to(dtype)
    made = linear_maker(kernels, dtype)([plain])
    assert type(made) is kind
    x = torch.randn(3, 7).to(dtype)
    torch.testing.assert_close(made(x), plain(x), rtol=1e-3, atol=1e-3)


def test_only_plain_linear_layers_are_packed(kernels: LayerKernels) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Twice(4, 4)))
    replaced = pack_linears(module, linear_maker(kernels, torch.float32))
    assert type(module[0]) is PackedLinear and type(module[1][0]) is Twice
    put_back(replaced)
    assert type(module[0]) is nn.Linear


def tied(**changes: Any) -> Any:
    config = LlamaConfig(**ARCHITECTURES["llama-gqa"].to_dict() | {"tie_word_embeddings": True} | changes)
    model = build(config)
    model.set_attn_implementation(ATTENTION_NAME)
    probe_geometry(model)  # modules that attend get their numbers
    return model


@pytest.mark.parametrize("vocab_size", [VOCAB, 131], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_embedding_reads_its_rows_from_a_tied_head(dtype: torch.dtype, vocab_size: int) -> None:
    model = tied(vocab_size=vocab_size).to(dtype)
    dense = model.model.embed_tokens.weight.detach().clone()
    optimized(model)
    assert type(model.lm_head) is PackedLinear and type(model.model.embed_tokens) is PackedEmbedding
    assert model.model.embed_tokens.packed.data_ptr() == model.lm_head.packed.packed.data_ptr()
    assert model.dtype == dtype and model.device.type == "cpu"
    shuffled = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    for tokens in (torch.arange(vocab_size)[None], shuffled, torch.tensor([], dtype=torch.int64)):
        rows = model.model.embed_tokens(tokens)
        assert rows.is_contiguous() and torch.equal(rows, dense[tokens])
        assert torch.equal(rows, model.model.embed_tokens(tokens.int()))
    for outside in (-1, vocab_size):
        with pytest.raises(IndexError, match=f"between 0 and {vocab_size - 1}, got {outside}"):
            model.model.embed_tokens(torch.tensor([[0, outside]]))


def test_an_embedding_stays_whose_weight_the_model_reads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def reading(self: LlamaModel, *args: Any, **kwargs: Any) -> Any:
        assert self.embed_tokens.weight.ndim == 2
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", reading)
    model = optimized(tied())
    assert type(model.model.embed_tokens) is nn.Embedding
    # No file holds its rows, so the head keeps the one copy there is.
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_embedding_stays_that_is_more_than_its_rows() -> None:
    class Doubled(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return 2 * super().forward(tokens)

    model = tied()
    weight = model.lm_head.weight
    embedding = Doubled(*weight.shape)
    embedding.weight = weight
    model.set_input_embeddings(embedding)
    expected = run_model(model, MAX_POSITION, Step())
    optimized(model)
    assert model.model.embed_tokens is embedding and model.lm_head.weight is weight
    torch.testing.assert_close(run_model(model, MAX_POSITION, Step()), expected, rtol=1e-4, atol=1e-5)


def test_rows_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = PackedEmbedding.forward
    monkeypatch.setattr(PackedEmbedding, "forward", lambda self, tokens: lookup(self, tokens).flip(-1))
    model = optimized(tied())
    assert type(model.model.embed_tokens) is nn.Embedding
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_head_of_its_own_leaves_the_embedding() -> None:
    model = optimized(bound("llama-gqa", torch.float32))
    assert type(model.lm_head) is PackedLinear and type(model.model.embed_tokens) is nn.Embedding


def test_a_tied_head_without_readable_rows_is_packed_where_the_embedding_stays_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.models.fast.optimize._share_rows", lambda *_: False)
    tied().save_pretrained(tmp_path)
    plain = load_model(ModelConfig(tmp_path, optimize=False)).model
    packed = load_model(ModelConfig(tmp_path)).model
    assert type(packed.lm_head) is PackedLinear
    assert is_file_backed(packed.model.embed_tokens.weight)
    assert torch.equal(packed.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    hidden = torch.randn(5, plain.config.hidden_size)
    torch.testing.assert_close(packed.lm_head(hidden), plain.lm_head(hidden), rtol=1e-5, atol=1e-5)
    # In another format than the file's, or without a file, the embedding is in memory already.
    for other in (ModelConfig(tmp_path, dtype="bfloat16"), ModelConfig(tmp_path, load_format="dummy")):
        assert type(load_model(other).model.lm_head) is nn.Linear


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_tied_model_is_loaded_with_one_copy(tmp_path: Path, load_format: str) -> None:
    tied().save_pretrained(tmp_path)
    model = load_model(ModelConfig(tmp_path, load_format=load_format)).model
    assert type(model.lm_head) is PackedLinear and type(model.model.embed_tokens) is PackedEmbedding


def test_pages_let_go_come_back_from_their_file(tmp_path: Path) -> None:
    values = {"a": torch.randn(300, 100), "b": torch.randn(7)}
    save_file(values, tmp_path / "weights.safetensors")
    mapped = load_file(tmp_path / "weights.safetensors")
    own = {name: value.clone() for name, value in values.items()}
    release_pages([*mapped.values(), *own.values(), torch.empty(0)])
    trim_heap()
    for name, value in values.items():
        assert torch.equal(mapped[name], value) and torch.equal(own[name], value)


def resident_of_files() -> int:
    """Bytes of files that this process has mapped and in memory; Linux counts those of tmpfs apart."""
    lines = Path("/proc/self/status").read_text().splitlines()
    shown = dict(line.split(":", maxsplit=1) for line in lines)
    return sum(int(shown[kind].split()[0]) for kind in ("RssFile", "RssShmem")) * 2**10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_pages_that_others_map_too_are_let_go(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    values = {"a": torch.randn(4096, 1024)}
    save_file(values, file)
    holding = (
        f"import mmap; f = open({str(file)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); "
    )
    holding += "sum(m[:: mmap.PAGESIZE]); print('held', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holding], text=True, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        mapped = load_file(file)
        assert torch.equal(mapped["a"], values["a"])
        before = resident_of_files()
        release_pages(mapped.values())
        assert before - resident_of_files() > 0.9 * values["a"].nbytes
        assert torch.equal(mapped["a"], values["a"])
        other.communicate("\n")


def test_pages_that_were_written_keep_what_was_written(tmp_path: Path) -> None:
    values = {"a": torch.randn(4096, 64), "b": torch.randn(4096, 64)}
    save_file(values, tmp_path / "weights.safetensors")
    mapped = load_file(tmp_path / "weights.safetensors")
    mapped["a"][2000] = 7
    release_pages(mapped.values())
    values["a"][2000] = 7
    for name, value in values.items():
        assert torch.equal(mapped[name], value)
