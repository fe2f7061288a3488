"""API keys, and the tenants whose they are."""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from winnow.errors import ConfigError
from winnow.openai.errors import ApiError

MAX_KEY_CHARS = 512


class Keys:
    """Keys by which tenants are distinguished. Holds digests alone, and compares all of them in constant time.

    Args:
        keys: tenant -> key; empty: everybody is served, without a tenant.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = [(tenant, _digest(key)) for tenant, key in keys.items()]

    @classmethod
    def of(cls, keys: Sequence[str], file: str | None) -> "Keys":
        """Return keys as they were given: some without a tenant's name, and a file `{tenant: key}`. Raises ConfigError:
        the file cannot be read, or a key is unusable."""
        named = {f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}": key for key in keys}
        if file is not None:
            named |= _read_file(Path(file))
        for tenant, key in named.items():
            usable = key.isascii() and key.isprintable() and key == key.strip()
            if not 0 < len(key) <= MAX_KEY_CHARS or not usable:
                raise ConfigError(
                    f"the key of tenant {tenant!r} must be printable ASCII of 1 to {MAX_KEY_CHARS} characters, with no "
                    "space at its ends"
                )
        if len(set(named.values())) < len(named):
            raise ConfigError("API keys must differ: two tenants have the same")
        return cls(named)

    @property
    def asked(self) -> bool:
        """Return whether requests need a key."""
        return bool(self._digests)

    def tenant(self, authorization: str | None, api_key: str | None = None) -> str | None:
        """Return whose request it is, by its Authorization or x-api-key header; None: keys are not asked for. Raises
        ApiError: there is no such key."""
        if not self.asked:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else (api_key or "").strip()
        digest = _digest(given)
        found = None
        for tenant, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = tenant
        if found is None:
            raise ApiError(
                "invalid_api_key", "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            )
        return found


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
        raise ConfigError(
            f"api_keys_file {path} must name at least one tenant, each by a name, got {list(values)}"
        )
    return values
