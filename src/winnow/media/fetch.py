"""Images of http(s) URLs, from hosts that the operator names and addresses of the public internet alone."""

import asyncio
import socket
from collections.abc import Callable, Collection
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import urljoin

from winnow.errors import MediaError
from winnow.media.decode import MAX_BYTES
from winnow.values.units import format_bytes

Address = IPv4Address | IPv6Address

_MAX_REDIRECTS = 3
_NAT64 = IPv6Network("64:ff9b::/96")
# Reserved, whatever this version of Python says of them.
_RESERVED = (IPv4Network("192.0.0.0/24"), IPv6Network("64:ff9b:1::/48"))


def is_public(address: Address) -> bool:
    """Return whether an address, and each that is written into it, is of the public internet."""
    inside: list[Address | None] = []
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        inside = [address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        if address.scope_id is not None or address.is_site_local:
            return False
    if not address.is_global or address.is_multicast or any(address in each for each in _RESERVED):
        return False
    return all(is_public(each) for each in inside if each is not None)


class Fetcher:
    """Fetcher of images.

    A connection goes to the address that was checked, not to a name that may be resolved anew; the environment's
    proxies, behind which no address is known, are not used. A redirect is checked as the first URL is.

    Args:
        domains: hosts that may be asked, as the URL writes them.
        allows: whether an address may be connected to.
        seconds: in which an image must have come, redirects included.
    """

    def __init__(
        self, domains: Collection[str], allows: Callable[[Address], bool] = is_public, seconds: float = 10.0
    ) -> None:
        self._domains = frozenset(each.lower().rstrip(".") for each in domains)
        self._allows, self._seconds = allows, seconds

    def check(self, url: str, name: str) -> Any:
        """Return a URL that may be asked for, as httpx reads it. Raises MediaError: it may not, or is no URL."""
        import httpx

        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError, TypeError):
            raise MediaError(f"{name} must be a URL, got {url!r:.200}") from None
        host = parsed.raw_host.decode().lower().rstrip(".")
        if parsed.scheme not in ("http", "https") or not host or parsed.userinfo:
            raise MediaError(f"{name} must be an http(s) URL of a host without a password, got {url!r:.200}")
        if host not in self._domains:
            allowed = ", ".join(sorted(self._domains)) or "none"
            raise MediaError(
                f"{name}: images are fetched from allowed_media_domains alone ({allowed}), got {host!r:.200}"
            )
        return parsed

    async def fetch(self, url: str, name: str) -> bytes:
        """Return what stands at a URL. Raises MediaError: as `check`, or it answers late, with an error or too much."""
        import httpx

        try:
            async with (
                asyncio.timeout(self._seconds),
                httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=self._seconds) as client,
            ):
                for _ in range(_MAX_REDIRECTS + 1):
                    parsed = self.check(url, name)
                    target, location = await self._get(client, parsed, name)
                    if location is None:
                        return target
                    url = urljoin(url, location)
            raise MediaError(f"{name}: {url!r:.200} is redirected more than {_MAX_REDIRECTS} times")
        except TimeoutError:
            raise MediaError(f"{name}: {url!r:.200} has not come within {self._seconds:g} seconds") from None
        except (httpx.HTTPError, OSError, UnicodeError) as error:
            raise MediaError(f"{name}: {url!r:.200} cannot be fetched: {error!s:.200}") from None

    async def _get(self, client: Any, url: Any, name: str) -> tuple[bytes, str | None]:
        """Return the body of one answer; or where it redirects to."""
        address = await self._address(url, name)
        headers = {"Host": url.netloc.decode(), "Accept-Encoding": "identity", "Accept": "image/*"}
        pinned = url.copy_with(host=str(address))
        names = {"sni_hostname": url.raw_host.decode()}
        async with client.stream("GET", pinned, headers=headers, extensions=names) as response:
            if response.is_redirect:
                return b"", response.headers.get("location", "")
            if response.status_code != 200:
                raise MediaError(f"{name}: {str(url)!r:.200} answers with status {response.status_code}")
            data = bytearray()
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > MAX_BYTES:
                    raise MediaError(f"{name}: {str(url)!r:.200} has more than {format_bytes(MAX_BYTES)}")
            return bytes(data), None

    async def _address(self, url: Any, name: str) -> Address:
        """Return the address to connect to; every one of the host's must be allowed."""
        host, port = url.raw_host.decode(), url.port or (443 if url.scheme == "https" else 80)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [ip_address(entry[4][0]) for entry in found]
        refused = next((each for each in addresses if not self._allows(each)), None)
        if refused is not None or not addresses:
            raise MediaError(
                f"{name}: {host!r:.200} must have addresses of the public internet, got {refused}"
            )
        return addresses[0]
