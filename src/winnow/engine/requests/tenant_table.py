"""Settings of tenants, those that are not named included."""

from collections.abc import Iterable

from winnow.values.tenants import OTHERS, Tenant, TenantName


class TenantTable:
    """Settings of tenants by name.

    Attributes:
        named: those with settings of their own.
        has_quotas: whether any tenant has a guarantee or a limit.
    """

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self.named = {tenant.name: tenant for tenant in tenants}
        self._others = self.named.pop(OTHERS, Tenant(OTHERS))
        self.has_quotas = self._others.has_quota or any(each.has_quota for each in self.named.values())

    def of(self, tenant: TenantName) -> Tenant:
        """Return the settings of a tenant, or those of "*" if it has none."""
        return self.named.get(tenant or OTHERS, self._others)
