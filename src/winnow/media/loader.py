"""Images as callers name them - URLs, paths, bytes, PIL images - opened under the operator's limits."""

import asyncio
import base64
import binascii
import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from winnow.config import MediaConfig
from winnow.errors import MediaError
from winnow.media.decode import MAX_BYTES, MAX_PIXELS, decode_image, require_pillow, to_rgb
from winnow.media.fetch import Fetcher
from winnow.values.units import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_TOTAL_PIXELS = 4 * MAX_PIXELS  # of all images of a prompt
_DATA = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_REMOTE = re.compile(r"https?:", re.IGNORECASE)


class MediaLoader:
    """Loader of the images of prompts. Thread-safe.

    A source is a data: URI in Base64, an http(s) or file:// URL, a path, the bytes of a file, or a PIL image.
    """

    def __init__(self, config: MediaConfig, fetcher: Fetcher | None = None) -> None:
        limit, root = config.limit_mm_per_prompt, config.allowed_local_media_path
        assert isinstance(limit, int), "the config holds the number of images"
        self._limit = limit
        self._fetcher = fetcher or Fetcher(config.allowed_media_domains)
        self._root = None if root is None else Path(root).resolve()

    def check(self, sources: Sequence[Any]) -> None:
        """Refuse images before one is read. Raises MediaError: there are too many, one may not be asked for, or Pillow
        is missing."""
        if not sources:
            return
        require_pillow(_name(0))
        if len(sources) > self._limit:
            raise MediaError(
                f"images of a prompt must be at most {self._limit} (limit_mm_per_prompt), got {len(sources)}"
            )
        for index, source in enumerate(sources):
            if _is_remote(source):
                self._fetcher.check(source, _name(index))

    async def fetch(self, sources: Sequence[Any]) -> list[Any]:
        """Return sources with the bytes of remote ones in place of their URLs, fetched at once. Raises MediaError: as
        `check`, or one cannot be fetched; names which."""
        self.check(sources)

        async def bytes_of(index: int, source: Any) -> Any:
            return await self._fetcher.fetch(source, _name(index)) if _is_remote(source) else source

        return list(await asyncio.gather(*(bytes_of(*each) for each in enumerate(sources))))

    def load(self, sources: Sequence[Any]) -> "list[Image]":
        """Return RGB images, in order; what is remote is fetched. Raises MediaError: as `check`, or one cannot be read;
        names which."""
        self.check(sources)
        if any(map(_is_remote, sources)):
            with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop that runs
                sources = thread.submit(asyncio.run, self.fetch(sources)).result()
        images, total = [], 0
        for index, source in enumerate(sources):
            images.append(self._open(source, _name(index)))
            total += images[-1].width * images[-1].height
            if total > MAX_TOTAL_PIXELS:
                raise MediaError(
                    f"images of a prompt must have at most {MAX_TOTAL_PIXELS} pixels, got {total} in {index + 1}"
                )
        return images

    def _open(self, source: Any, name: str) -> "Image":
        from PIL.Image import Image

        if isinstance(source, Image):
            return to_rgb(source, name)
        if isinstance(source, str) and source[:5].lower() == "data:":
            source = _bytes_of_uri(source, name)
        elif isinstance(source, str | Path):
            source = self._read(source, name)
        if not isinstance(source, bytes | bytearray | memoryview):
            raise MediaError(
                f"{name} must be a URL, a path, bytes or a PIL image, got {type(source).__name__}"
            )
        return decode_image(bytes(source), name)

    def _read(self, source: str | Path, name: str) -> bytes:
        text = str(source)
        if text[:5].lower() == "file:":
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                raise MediaError(f"{name} must be a file of this machine, got host {parts.netloc!r:.80}")
            text = unquote(parts.path)
        elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
            raise MediaError(f"{name} must be a URL of scheme data, http, https or file, got {text!r:.80}")
        if self._root is None:
            raise MediaError(f"{name}: files are read below allowed_local_media_path alone, which is not set")
        try:
            path = (self._root / text).resolve()
            if not path.is_relative_to(self._root):
                raise MediaError(f"{name} must lie below allowed_local_media_path, got {text!r:.200}")
            # Links are resolved: what has become one since is not followed, and no pipe is waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise MediaError(f"{name} must be a file, got {text!r:.200}")
                return file.read(MAX_BYTES + 1)
        except (OSError, ValueError, RuntimeError) as error:  # also loops of links
            if isinstance(error, MediaError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise MediaError(f"{name}: {text!r:.200} cannot be read: {reason}") from None


def _name(index: int) -> str:
    return f"images[{index}]"


def _is_remote(source: Any) -> bool:
    return isinstance(source, str) and bool(_REMOTE.match(source))


def _bytes_of_uri(uri: str, name: str) -> bytes:
    match = _DATA.match(uri[:1024])
    if match is None or match[2].lower().split(";")[-1] != "base64":
        raise MediaError(f"{name} must be a data: URI in Base64, got {uri[:40]!r}")
    kind = match[1].strip().lower()
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise MediaError(f"{name} must be an image, got a data: URI of type {kind!r:.80}")
    text = uri[match.end() :]
    if len(text) > MAX_BYTES * 3 // 2:
        raise MediaError(
            f"{name} must be at most {format_bytes(MAX_BYTES)} in Base64, got {len(text)} characters"
        )
    try:
        text = "".join(unquote(text).split())
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name} must be Base64 behind the comma: {error}") from None
