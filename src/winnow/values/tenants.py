"""Tenants, on whose accounts requests run: their weights and shares."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from winnow.errors import ConfigError, known_names
from winnow.values.checks import check_number, require
from winnow.values.units import parse_bytes

TenantName = str | None
OTHERS = "*"
"""The name whose settings serve every tenant that is not named, each by itself."""


@dataclass(frozen=True)
class Tenant:
    """Entitlements of a tenant.

    Attributes:
        weight: its part of the tokens under scheduling_policy=fair, next to the weights of others.
        guarantee: part of the blocks that it gets back within one step, also where others have borrowed them.
        limit: part of the blocks beyond which it does not borrow.
        host_limit: part of the host tier that its swapped requests may fill.
        session_memory: bytes of all its sessions, of which the least recently used are forgotten; None: no limit.
    """

    name: str
    weight: float = 1.0
    guarantee: float = 0.0
    limit: float = 1.0
    host_limit: float = 1.0
    session_memory: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.name) and isinstance(self.name, str), "tenants: name", "a text", self.name)
        check_number(f"tenants: weight of {self.name}", self.weight, 1e-6, 1e6)
        for name in ("guarantee", "limit", "host_limit"):
            check_number(f"tenants: {name} of {self.name}", getattr(self, name), 0.0, 1.0)
        if self.session_memory is not None:
            size = parse_bytes(self.session_memory, f"tenants: session_memory of {self.name}")
            object.__setattr__(self, "session_memory", size)
        if self.limit <= 0:
            raise ConfigError(f"tenants: limit of {self.name} must be greater than 0, got {self.limit:g}")
        if self.guarantee > self.limit:
            raise ConfigError(
                f"tenants: guarantee of {self.name} must be at most its limit ({self.limit:g}), "
                f"got {self.guarantee:g}"
            )

    @property
    def has_quota(self) -> bool:
        return self.guarantee > 0 or self.limit < 1


def parse_tenants(value: Any) -> tuple[Tenant, ...]:
    """Read tenants: a file's path, JSON text {"NAME": {"weight": 2, ...}, ...}, such a mapping, or `Tenant`s. Raises
    ConfigError, which names the tenant, the field and the limit."""
    if isinstance(value, str | Path):
        value = _read(value)
    if isinstance(value, Mapping):
        value = tuple(_tenant(name, settings) for name, settings in value.items())
    require(
        isinstance(value, tuple | list) and all(isinstance(each, Tenant) for each in value),
        "tenants",
        'a JSON object {"NAME": {"weight": 1, "guarantee": 0, "limit": 1}, ...} or the file of one',
        value,
    )
    names = [each.name for each in value]
    if len(set(names)) < len(names):
        raise ConfigError(f"tenants must name each once, got {', '.join(names)}")
    total = sum(each.guarantee for each in value)
    if total > 1 + 1e-9:
        raise ConfigError(f"tenants: the guarantees must add up to at most 1, got {total:g}")
    if any(each.name == OTHERS and each.guarantee > 0 for each in value):
        raise ConfigError(f"tenants: {OTHERS} can have no guarantee, for how many there will be is not known")
    return tuple(value)


def _read(text: str | Path) -> Any:
    where = "tenants"
    if isinstance(text, Path) or not text.lstrip().startswith(("{", "[")):
        where = f"tenants: {text}"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot be read: {error}") from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from None


def _tenant(name: str, settings: Any) -> Tenant:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"tenants: {name} must be an object, got {settings!r}")
    known = [each.name for each in fields(Tenant) if each.name != "name"]
    for key in settings:
        if key not in known:
            raise ConfigError(f"tenants: {name} has an unknown field {key!r}. {known_names(str(key), known)}")
    return Tenant(name, **settings)


class TenantTable:
    """Settings of tenants by name; `named` are those with settings of their own."""

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self.named = {tenant.name: tenant for tenant in tenants}
        self._others = self.named.pop(OTHERS, Tenant(OTHERS))
        self.has_quotas = self._others.has_quota or any(each.has_quota for each in self.named.values())

    def of(self, tenant: TenantName) -> Tenant:
        """Return the settings of a tenant, or those of "*" if it has none."""
        return self.named.get(tenant or OTHERS, self._others)
