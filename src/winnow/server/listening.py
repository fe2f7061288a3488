"""Addresses of the server: sockets that are bound before the model loads, so that a wrong address costs no time."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from winnow.errors import ConfigError
from winnow.server.config import ServerConfig

_OPEN_TO_ALL = 0o666
"""Mode of a Unix socket: like a port of this machine, anyone on it may connect."""


@contextmanager
def bound_sockets(config: ServerConfig) -> Iterator[list[socket.socket]]:
    """Bind the sockets that `config` names; they do not listen yet. Raises ConfigError: the address cannot be bound."""
    sockets = _bind_hosts(config) if config.uds is None else [_bind_file(config, config.uds)]
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    address = f"host {config.host!r}, port {config.port}" if config.uds is None else f"uds {config.uds!r}"
    # The system's words, where asyncio has put a sentence of its own.
    reason = os.strerror(error.errno) if error.errno else str(error)
    return ConfigError(f"{address} cannot be listened on: {reason}")


def _bind_hosts(config: ServerConfig) -> list[socket.socket]:
    """Return a socket for each address that a host's name stands for; port 0: the same free one for all."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise cannot_listen(config, OSError(f"no such host ({error})")) from None
    sockets: list[socket.socket] = []
    refused: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            bound = socket.socket(family, kind, protocol)
        except OSError as error:  # a family that this machine does not have
            refused = error
            continue
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if sockets:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            bound.bind(address)
        except OSError as error:
            bound.close()
            refused = error
            if error.errno == errno.EADDRNOTAVAIL:  # one of several, as ::1 where IPv6 is switched off
                continue
            for each in sockets:
                each.close()
            raise cannot_listen(config, error) from None
        sockets.append(bound)
    if not sockets:
        assert refused is not None, "a name stands for at least one address"
        raise cannot_listen(config, refused)
    return sockets


def _bind_file(config: ServerConfig, path: str) -> socket.socket:
    """Return a Unix socket at a path, in place of one that a server which has ended left there.

    It listens at once, since another server that starts takes one that does not for such a leftover.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise OSError("it is there, and no socket")
            if _is_served(path):
                raise OSError(errno.EADDRINUSE, "")
            os.unlink(path)
        bound.bind(path)
        os.chmod(path, _OPEN_TO_ALL)
        bound.listen()
    except OSError as error:
        bound.close()
        raise cannot_listen(config, error) from None
    return bound


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
        return True
