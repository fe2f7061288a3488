"""Check of the site whose page asks: browsers send what any site's page wants to a server of this machine alone."""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from winnow.openai.errors import ApiError
from winnow.server.config import ServerConfig
from winnow.server.keys import Keys

_SAFE = ("GET", "HEAD", "OPTIONS")


class Sites:
    """Refusal of pages of other sites where a server asks for no keys, since a page knows none.

    What changes something is taken from the server's own pages alone, and from clients that are no browsers, which send
    no Origin. A server on a loopback address is asked under a name of loopback, else the name of another site has been
    pointed at it.
    """

    def __init__(self, config: ServerConfig, keys: Keys) -> None:
        self._checks_origin = not keys.asked
        self._checks_host = not keys.asked and config.uds is None and _is_loopback(config.host)

    def require_own(self, method: str, headers: Headers) -> None:
        """Refuse a request that a page of another site made. Raises ApiError: names the header."""
        host = headers.get("host")
        if self._checks_host and host is not None and not _is_loopback(_name(host)):
            raise ApiError("cross_site", f"Host must be a name of this machine's loopback, got {host!r:.80}")
        if not self._checks_origin or method in _SAFE:
            return
        site = headers.get("sec-fetch-site")
        if site is not None:
            if site not in ("same-origin", "none"):
                raise ApiError("cross_site", f"Sec-Fetch-Site must be same-origin, got {site!r:.80}")
            return
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError("cross_site", f"Origin must be this server's own, got {origin!r:.80}")


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """Return a Host header without its port and brackets, in lower case; empty where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
