"""Process of one rank beside the first: `python -m winnow.executor.rank_process RANK FD`, started by `RankTeam`."""

import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from winnow.cache import CacheLayout, CacheSize, HostTierError
from winnow.config import EngineConfig, ModelConfig
from winnow.errors import WinnowError, describe_error
from winnow.executor.rank_executor import RankExecutor, load_rank
from winnow.models import LoadedModel
from winnow.process.threads import TeamWait, set_threads

_RESULTS = ("kept_positions", "kept_weights", "read_blocks", "read_states")
"""Methods of whose results the first rank wants each part."""


class RankProcess:
    """Process of one rank, which serves calls until the connection closes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._loaded: LoadedModel | None = None
        self._executor: RankExecutor | None = None

    def serve(self, connection: Connection) -> None:
        """Serve calls: send back results or errors. An error that is not a user's ends the process."""
        with suppress(EOFError, OSError):  # rank 0 has closed the connection, or ended
            while True:
                self._answer(connection, *connection.recv())

    def _answer(self, connection: Connection, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = self._run(name, arguments)
        except (WinnowError, HostTierError) as error:
            result = error
        except Exception as error:
            connection.send((False, describe_error(error)))
            raise SystemExit(1) from None
        connection.send((True, result))

    def _run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        own: dict[str, Callable[..., None]] = {
            "start": lambda: None,
            "load": self._load,
            "build": self._build,
        }
        if name in own:
            return own[name](*arguments)
        found = getattr(self._executor, name)(*arguments)
        return found if name in _RESULTS else None

    def _load(self, config: ModelConfig, size: int, directory: Path) -> None:
        set_threads(config.threads, size)
        self._loaded = load_rank(config, self._rank, size, directory)

    def _build(self, config: EngineConfig, layout: CacheLayout, size: CacheSize) -> None:
        assert self._loaded is not None, "loaded first"
        self._executor = RankExecutor(self._loaded, config, layout, size)


if __name__ == "__main__":
    with TeamWait():
        RankProcess(int(sys.argv[1])).serve(Connection(int(sys.argv[2])))
