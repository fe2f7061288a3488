"""Who may ask, and how much: API keys and their tenants, and sites whose pages ask."""

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from winnow.errors import ConfigError
from winnow.openai.errors import ApiError
from winnow.server.config import ServerConfig

MAX_KEY_CHARS = 512
_SAFE = ("GET", "HEAD", "OPTIONS")


class Keys:
    """Keys by which tenants are distinguished. Holds digests alone, and compares all of them in constant time.

    Args:
        keys: tenant -> key; empty: everybody is served, without a tenant.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = [(tenant, _digest(key)) for tenant, key in keys.items()]

    @classmethod
    def of(cls, keys: Sequence[str], file: str | None) -> "Keys":
        """Return nameless keys, and those of a file {tenant: key}. Raises ConfigError: one is unusable."""
        named = {f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}": key for key in keys}
        if file is not None:
            named |= _read_file(Path(file))
        for tenant, key in named.items():
            usable = key.isascii() and key.isprintable() and key == key.strip()
            if not 0 < len(key) <= MAX_KEY_CHARS or not usable:
                what = f"printable ASCII of 1 to {MAX_KEY_CHARS} characters, with no space at its ends"
                raise ConfigError(f"the key of tenant {tenant!r} must be {what}")
        if len(set(named.values())) < len(named):
            raise ConfigError("API keys must differ: two tenants have the same")
        return cls(named)

    @property
    def asked(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: str | None, api_key: str | None = None) -> str | None:
        """Return whose request it is, by its header; None: keys are not asked for. Raises ApiError: no such key."""
        if not self.asked:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else (api_key or "").strip()
        digest = _digest(given)
        found = [tenant for tenant, known in self._digests if hmac.compare_digest(digest, known)]
        if not found:
            fault = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError("invalid_api_key", fault)
        return found[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read_file(path: Path) -> dict[str, str]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_keys_file {path} cannot be read: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values.values()):
        raise ConfigError(f"api_keys_file {path} must hold a JSON object {{tenant: key}}")
    if not values or "" in values:
        what = "name at least one tenant, each by a name"
        raise ConfigError(f"api_keys_file {path} must {what}, got {list(values)}")
    return values


class Sites:
    """Refusal of pages of other sites where a server asks for no keys, since a page knows none.

    What changes something is taken from the server's own pages alone, and from clients that are no browsers, which send
    no Origin. A server on a loopback address is asked under a name of loopback, else the name of another site has been
    pointed at it.
    """

    def __init__(self, config: ServerConfig, keys: Keys) -> None:
        self._checks_origin = not keys.asked
        self._checks_host = not keys.asked and config.uds is None and _is_loopback(config.host)

    def require_own(self, method: str, headers: Mapping[str, str]) -> None:
        """Raise ApiError if a page of another site made the request."""
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
