"""Container file and manifests: every flag, path, port and metric in them is one that the server has."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_llama import save_tiny_llama

from winnow import LLM
from winnow.cli import serve
from winnow.server.access import Keys
from winnow.server.app import create_app
from winnow.server.config import ServerConfig
from winnow.server.service import Service

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy").rglob("*.yaml"))


def documents() -> list[dict[str, Any]]:
    return [each for path in FILES for each in yaml.safe_load_all(path.read_text())]


def containers() -> list[dict[str, Any]]:
    found = []
    for document in documents():
        spec = document["spec"]
        found += spec["template"]["spec"]["containers"] if "template" in spec else spec.get("containers", [])
    return found


def entrypoint() -> list[str]:
    [line] = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "Containerfile").read_text(), re.MULTILINE)
    return list(json.loads(line))


@pytest.mark.parametrize("container", containers(), ids=lambda each: each["name"])
def test_arguments_are_those_of_the_command(container: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text('{"ada": "key"}')
    command, *words = entrypoint()
    assert (command, words[0]) == ("winnow", "serve")
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    args = [word.replace("/keys/", f"{tmp_path}/") for word in container["args"]]
    options, config = serve._options(parser.parse_args([*words[1:], *args]))
    assert options["threads"] == int(container["resources"]["requests"]["cpu"])
    assert [port["containerPort"] for port in container["ports"]] == [config.port]


def test_paths_and_metrics_are_served(tmp_path: Path) -> None:
    with LLM(save_tiny_llama(tmp_path, seed=0), kv_memory="1MiB", max_num_seqs=2) as llm:
        service = Service(llm, ServerConfig(), Keys.of((), None), ("tiny",))
        paths = {route.path for route in create_app(service).routes}  # type: ignore[attr-defined]
        exposed = service.metrics.render(llm.stats(), {}).decode()
    probes = [probe for each in containers() for name, probe in each.items() if name.endswith("Probe")]
    assert len(probes) == 4 and {probe["httpGet"]["path"] for probe in probes} <= paths
    [scaler] = [each for each in documents() if each["kind"] == "HorizontalPodAutoscaler"]
    for metric in scaler["spec"]["metrics"]:
        assert f"{metric['pods']['metric']['name']}{{" in exposed


def test_objects_name_each_other() -> None:
    kinds = {each["kind"]: each for each in documents()}
    pod = kinds["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert (
        kinds["Deployment"]["spec"]["selector"]["matchLabels"]
        == kinds["Service"]["spec"]["selector"]
        == labels
    )
    assert (
        kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        == kinds["Deployment"]["metadata"]["name"]
    )
    [container] = pod["spec"]["containers"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["spec"]["volumes"]}
    assert (
        kinds["InferenceService"]["spec"]["predictor"]["model"]["runtime"]
        == kinds["ServingRuntime"]["metadata"]["name"]
    )


@pytest.mark.parametrize(
    "document",
    [each for each in documents() if "kserve" not in each["apiVersion"]],
    ids=lambda each: each["kind"],
)
def test_objects_are_of_the_schema_of_kubernetes(document: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(document, validate.latest_version(), strict=True)
