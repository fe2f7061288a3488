"""Process of one rank beside the first: `python -m winnow.executor.rank_process RANK FD`, started by `RankTeam`."""

import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from winnow.cache import HostTierError
from winnow.errors import WinnowError, describe_error
from winnow.executor.tensor_parallel import RankExecutor, load_rank
from winnow.process.threads import TeamWait, set_threads

_RESULTS = ("kept_positions", "kept_weights", "read_blocks", "read_states")
"""Methods of whose results the first rank wants each part."""


def serve(rank: int, connection: Connection) -> None:
    """Serve calls until the connection closes: send back results or errors. One that is no user's ends the process."""
    part: Any = None  # the rank's part of the model, and then its executor
    with suppress(EOFError, OSError):  # rank 0 has closed the connection, or ended
        while True:
            name, arguments = connection.recv()
            result: Any = None
            try:
                if name == "load":
                    config, size, directory = arguments
                    set_threads(config.threads, size)
                    part = load_rank(config, rank, size, directory)
                elif name == "build":
                    part = RankExecutor(part, *arguments)
                elif name != "start":
                    found = getattr(part, name)(*arguments)
                    result = found if name in _RESULTS else None
            except (WinnowError, HostTierError) as error:
                result = error
            except Exception as error:
                connection.send((False, describe_error(error)))
                raise SystemExit(1) from None
            connection.send((True, result))


if __name__ == "__main__":
    with TeamWait():
        serve(int(sys.argv[1]), Connection(int(sys.argv[2])))
