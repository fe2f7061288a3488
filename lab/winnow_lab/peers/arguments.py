"""Options of every comparison."""

import os
from dataclasses import dataclass
from pathlib import Path

from winnow.errors import ConfigError
from winnow_lab.peers.peers import PEERS
from winnow_lab.study import StudyOptions, flag


@dataclass(frozen=True)
class PeerOptions(StudyOptions):
    """Who takes part, how often, and where things are."""

    requests: int | None = flag(None, "in place of the work's own", least=1)
    peers: tuple[str, ...] = flag(tuple(PEERS), choices=PEERS)
    only: list[str] | None = flag(None, "rows whose 'PEER: CONFIGURATION' matches; may be repeated")
    rounds: int = flag(3, least=1)
    threads: int = flag(len(os.sched_getaffinity(0)), "of everyone", least=1)
    timeout: float = flag(900.0, "seconds of one run", least=0)
    folder: Path = flag(Path("runs/peers"), "environments, models")
    prepare: bool = flag(False, "install and convert, measure nothing")
    steps: int | None = flag(None, "stop after this number of runs; needs --journal", least=1)
    journal: Path | None = flag(None, "keep every run there, and run none that it has")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.journal is None:
            raise ConfigError("--steps needs --journal, or what was measured would be lost")
