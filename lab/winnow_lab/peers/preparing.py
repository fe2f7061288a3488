"""Environments of peers, and the model in the formats that they read."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from winnow_lab.peers.environment import CONVERT_SECONDS, Environment, PeerError, call
from winnow_lab.peers.peers import Peer


class Places:
    """Where a peer's interpreter and model are; made when they are first asked for.

    Args:
        folder: of everything that is made, from one start to the next.
        model: directory of the model that is converted.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._pythons: dict[str, Path | PeerError] = {}
        self._models: dict[tuple[str, str], Path | PeerError] = {}

    def find(self, peer: Peer, weights: str) -> tuple[Path, Path]:
        """The interpreter that runs the peer's script, and the model in that format of the peer's.

        Raises:
            PeerError: the peer cannot be installed, or does not take the model. It is tried once.
        """
        if peer.name not in self._pythons:
            self._pythons[peer.name] = _or_error(lambda: self._install(peer))
        python = _require(self._pythons[peer.name])
        key = peer.name, weights
        if key not in self._models:
            self._models[key] = _or_error(lambda: self._convert(peer, weights, python))
        return python, _require(self._models[key])

    def _install(self, peer: Peer) -> Path:
        if not peer.packages:
            return Path(sys.executable)
        environment = Environment(self._folder / "environments" / peer.name)
        environment.prepare(peer.requirements, peer.unwanted)
        return environment.python

    def _convert(self, peer: Peer, weights: str, python: Path) -> Path:
        if peer.convert is None:
            return self._model
        name = "-".join(word for word in (self._model.name, peer.name, weights) if word)
        converted = self._folder / "models" / name
        if not converted.is_dir():
            unfinished = converted.with_name(f"{name}.unfinished")
            command = peer.convert(self._model, unfinished, weights)
            if command is None:
                return self._model
            shutil.rmtree(unfinished, ignore_errors=True)
            tool, *words = command
            call([python.parent / tool, *words], f"{tool} for {peer.name}", CONVERT_SECONDS)
            unfinished.rename(converted)
        return converted


def _or_error(make: Callable[[], Path]) -> Path | PeerError:
    try:
        return make()
    except PeerError as error:
        return error


def _require(found: Path | PeerError) -> Path:
    if isinstance(found, PeerError):
        raise found
    return found
