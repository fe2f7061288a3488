"""Quotas of tenants by the minute."""

import time
from collections.abc import Callable

from winnow.openai.errors import RATE_LIMIT, ApiError

_MINUTE = 60.0


class TokenQuota:
    """A bucket per tenant that fills by `per_minute` tokens a minute, and holds as many.

    A request is let in while its tenant's bucket holds anything, and is charged what it used, so that no server has to
    guess an answer's length. A long one leaves a debt.

    Args:
        per_minute: None: no limit.
        clock: seconds, monotonic.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str | None, tuple[float, float]] = {}  # tokens, and when that was their number

    def require(self, tenant: str | None) -> None:
        """Refuse a tenant whose bucket is empty. Raises ApiError: says when to come again."""
        if self._per_minute is None:
            return
        tokens = self._tokens(tenant)
        if tokens < 1:
            wait = (1 - tokens) * _MINUTE / self._per_minute
            raise ApiError(
                RATE_LIMIT,
                f"tokens of a tenant must be at most {self._per_minute} in a minute",
                retry_after=wait,
            )

    def charge(self, tenant: str | None, tokens: int) -> None:
        """Take tokens that a request used."""
        if self._per_minute is not None:
            self._buckets[tenant] = (self._tokens(tenant) - tokens, self._clock())

    def _tokens(self, tenant: str | None) -> float:
        most = float(self._per_minute or 0)
        tokens, since = self._buckets.get(tenant, (most, self._clock()))
        return min(most, tokens + (self._clock() - since) * most / _MINUTE)
