"""Decoder of image files: bytes in, an upright RGB image out."""

import io
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from winnow.errors import MediaError
from winnow.process.extras import install_hint
from winnow.values.units import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

# Of an image's file, and of an image, whose pixels take 3 bytes each.
MAX_BYTES, MAX_PIXELS = 32 * 2**20, 2**26
# Formats of pictures; further ones of Pillow's run other programs or are read by code that few use.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N")


def require_pillow(name: str) -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise MediaError(f"{name}: images need the package pillow: {install_hint('vision')}") from None


def decode_image(data: bytes, name: str = "image") -> "Image":
    """Return the first picture of a file of `_FORMATS`, which errors call `name`. Raises MediaError: it is of another
    format, damaged, cut off, or larger than `MAX_BYTES` or `MAX_PIXELS`."""
    require_pillow(name)
    from PIL import Image, UnidentifiedImageError

    if len(data) > MAX_BYTES:
        raise MediaError(f"{name} must be at most {format_bytes(MAX_BYTES)}, got {format_bytes(len(data))}")
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        bomb = isinstance(error, Image.DecompressionBombError)
        what = f"has more than {MAX_PIXELS} pixels" if bomb else f"is no image file ({', '.join(_FORMATS)})"
        raise MediaError(f"{name} of {format_bytes(len(data))} {what}") from None
    except Exception as error:  # Pillow's readers raise what they meet
        raise _damaged(name, error) from None
    return to_rgb(image, name)


def to_rgb(image: "Image", name: str = "image") -> "Image":
    """Return an image as RGB, turned as its EXIF data says, over white where it is transparent.

    16-bit gray values become 8-bit ones; a file of several pictures gives its first. Raises MediaError: it is empty,
    too large or damaged, or its pixels are 32-bit numbers, whose range is not known.
    """
    from PIL import Image, ImageOps

    width, height = image.size
    if min(width, height) < 1 or width * height > MAX_PIXELS:
        raise MediaError(f"{name} must have 1 to {MAX_PIXELS} pixels, got {width} x {height}")
    try:
        image.load()
        with suppress(Exception):  # EXIF data that cannot be read turns nothing
            image = ImageOps.exif_transpose(image)
        if image.mode in _DEEP:
            return _eight_bits(image).convert("RGB")
        if image.mode in ("I", "F"):
            raise MediaError(f"{name} must have values of 8 or 16 bits, got mode {image.mode}")
        if not image.has_transparency_data:
            return image.convert("RGB")
        pixels = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels).convert("RGB")
    except MediaError:
        raise
    except Exception as error:
        raise _damaged(name, error) from None


def _eight_bits(image: "Image") -> "Image":
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


def _damaged(name: str, error: Any) -> MediaError:
    return MediaError(f"{name} is damaged or cut off: {' '.join(str(error).split())!s:.200}")
