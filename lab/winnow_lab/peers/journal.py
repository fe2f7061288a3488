"""What has been measured so far, so that a comparison may be made in pieces and survives being killed."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from winnow.report.journal import create_journal, owner_differences, parse_object, whole_lines
from winnow.report.provenance import commit
from winnow_lab.peers.environment import PeerError
from winnow_lab.peers.peers import Configuration, Peer

FORM, VERSION = "winnow_peers", 1


@dataclass(frozen=True)
class Entry:
    """One run of one configuration: its result, as JSON values, or why there is none."""

    result: dict[str, Any] | None
    error: str | None
    commit: str | None
    date: str


class Journal:
    """A file to which every run is added when it ends; None: nothing is kept.

    Args:
        identity: of the work; runs of another are not mixed in.

    Raises:
        PeerError: the file is another work's.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any]) -> None:
        self._path = path
        self._found: dict[str, Entry] = {}
        if path is None:
            return
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            create_journal(path, FORM, VERSION, identity)
        with path.open("rb") as file:
            found = owner_differences(file.readline(), FORM, VERSION, identity)
            if found is None:
                raise PeerError(f"--journal {path} is no journal of this benchmark")
            if found.every:
                raise PeerError(f"--journal {path} is of another work: {'; '.join(found.every)}")
            for record in map(parse_object, whole_lines(file)):
                if record is not None:
                    key = record.pop("key")
                    self._found[key] = Entry(**record)

    def find(self, peer: Peer, configuration: Configuration, number: int) -> Entry | None:
        """What came of the round with that number."""
        return self._found.get(_key(peer, configuration, number))

    def add(
        self,
        peer: Peer,
        configuration: Configuration,
        number: int,
        result: dict[str, Any] | None,
        error: str | None,
    ) -> Entry:
        """Keep what came of a round."""
        entry = Entry(result, error, commit(), datetime.now(UTC).isoformat(timespec="seconds"))
        key = _key(peer, configuration, number)
        self._found[key] = entry
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key} | asdict(entry)) + "\n")
        return entry


def _key(peer: Peer, configuration: Configuration, number: int) -> str:
    """By what decides the result: a row that means something else now is measured again."""
    row = [peer.name, configuration.name, configuration.weights, configuration.options, number]
    return json.dumps(row, sort_keys=True)
