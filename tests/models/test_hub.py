"""`org/name` means a repository of the Hugging Face Hub; here its local cache, without a network."""

from pathlib import Path

import pytest
from architectures import ARCHITECTURES, save

from winnow.cli.main import main
from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.models import load_model
from winnow.models.load import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache as huggingface_hub leaves it: `some/model` at main, and at a tag with another seed."""
    path = tmp_path_factory.mktemp("hub")
    repository = path / "models--some--model"
    for seed, (name, commit) in enumerate({"main": COMMIT, "v2": OTHER}.items()):
        save(ARCHITECTURES["llama-gqa"], repository / "snapshots" / commit, seed)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    return path


@pytest.fixture(autouse=True)
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def test_the_cache_serves(cache: Path) -> None:
    assert hub.locate_model(ModelConfig("some/model")).name == COMMIT
    assert hub.locate_model(ModelConfig("some/model", revision="v2")).name == OTHER
    assert hub.locate_model(ModelConfig("some/model", revision=OTHER)).name == OTHER
    weights = [
        load_model(ModelConfig("some/model", revision=each)).model.get_input_embeddings().weight
        for each in (None, "main", "v2")
    ]
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])


def test_what_is_not_there() -> None:
    with pytest.raises(UnsupportedModelError, match=r"model: cannot load no/such: .* not in the local cache"):
        load_model(ModelConfig("no/such"))
    with pytest.raises(
        UnsupportedModelError, match=r"cannot load some/model at v3: .* not in the local cache"
    ):
        load_model(ModelConfig("some/model", revision="v3"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("GatedRepoError", "accepted its terms"),
        ("RepositoryNotFoundError", "has no such repository"),
        ("RevisionNotFoundError", "no such revision"),
        ("HFValidationError", "HFValidationError: no"),
    ],
)
def test_what_the_hub_refuses(error: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, error)

    def refuse(*_: object, **__: object) -> str:
        raise kind.__new__(kind, "no") if issubclass(kind, OSError) else kind("no")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(ModelConfig("some/model"))


def test_only_what_a_model_needs_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    kept: list[str] = []
    files = (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/older/tool_use.jinja",
        "additional_chat_templates_2/tool_use.jinja",
        "add/config.json",
        "a/config.json",
        "pytorch_model.bin",
        "modeling_own.py",
        "original/consolidated.safetensors",
        "onnx/model.onnx",
        "model.gguf",
    )

    def fetch(repository: str, **patterns: object) -> str:
        del patterns["revision"], patterns["tqdm_class"]
        kept.extend(filter_repo_objects(files, **patterns))  # type: ignore[arg-type]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    (tmp_path / "model.safetensors").touch()
    assert hub.locate_model(ModelConfig("some/model")) == tmp_path
    assert kept == list(files[:8])


def test_a_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some/model").mkdir(parents=True)
    assert hub.locate_model(ModelConfig("some/model")) == Path("some/model")
    with pytest.raises(ConfigError, match="revision needs a model of the Hub"):
        hub.locate_model(ModelConfig("some/model", revision="v2"))


def test_commands_take_a_repository(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [5, 6], "max_tokens": 2}\n')
    command = ["run", "prompts.jsonl", "-o", "out.jsonl", "--model", "some/model", "--kv-memory", "4MiB"]
    for _ in range(2):  # the second finds all done
        assert main(command) == 0, capsys.readouterr().err
    assert '"token_ids"' in (tmp_path / "out.jsonl").read_text()
    assert main(["check", "some/model"]) == 0
