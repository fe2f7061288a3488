"""Odd files of images: each gives the right picture, or an error that says what is wrong with it."""

import io
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image
from PIL.ImageCms import ImageCmsProfile, createProfile

from winnow.errors import MediaError, WinnowError
from winnow.media.decode import MAX_BYTES, MAX_PIXELS, decode_image, to_rgb

WHITE, RED, GREEN, BLUE, GRAY = (255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def plain(mode: str, color: Any, size: tuple[int, int] = (8, 6)) -> Image.Image:
    return Image.new(mode, size, color)


def noise(size: tuple[int, int] = (64, 48)) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int, height: int, depth: int = 8, color: int = 0, rows: bytes = b"", extra: bytes = b""
) -> bytes:
    """A PNG by its parts, whatever they say."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def palette(*, transparent: bool) -> Image.Image:
    image = Image.new("P", (8, 6), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    if transparent:
        image.info["transparency"] = 1
    return image


def frames(kind: str) -> bytes:
    first, second = plain("RGB", RED), plain("RGB", BLUE)
    lossless = {"lossless": True} if kind == "WEBP" else {}
    return saved(first, kind, save_all=True, append_images=[second], duration=10, **lossless)


def deep_rgb() -> bytes:
    row = b"\0" + struct.pack(">HHH", 65535, 0, 0) * 3
    return png(3, 2, 16, 2, row * 2)


RIGHT: dict[str, tuple[Callable[[], bytes], tuple[int, int, int]]] = {
    "rgb": (lambda: saved(plain("RGB", RED)), RED),
    "one bit": (lambda: saved(plain("1", 1)), WHITE),
    "gray": (lambda: saved(plain("L", 128)), GRAY),
    "gray of two bits": (lambda: png(4, 1, 2, 0, b"\0\xaa"), (170, 170, 170)),
    "gray of 16 bits": (lambda: saved(plain("I;16", 128 * 257)), GRAY),
    "gray of 16 bits, dark": (lambda: saved(plain("I;16", 257)), (1, 1, 1)),
    "gray of 16 bits, as TIFF": (lambda: saved(plain("I;16", 128 * 257), "TIFF"), GRAY),
    "rgb of 16 bits": (deep_rgb, RED),
    "gray with alpha": (lambda: saved(plain("LA", (0, 0))), WHITE),
    "half a gray over white": (lambda: saved(plain("LA", (0, 127))), (128, 128, 128)),
    "rgba, opaque": (lambda: saved(plain("RGBA", (*BLUE, 255))), BLUE),
    "rgba, clear": (lambda: saved(plain("RGBA", (*BLUE, 0))), WHITE),
    "rgba, half": (lambda: saved(plain("RGBA", (*RED, 128))), (255, 127, 127)),
    "rgba, webp": (lambda: saved(plain("RGBA", (0, 0, 0, 0)), "WEBP", lossless=True), WHITE),
    "a colour that is clear": (lambda: saved(plain("RGB", RED), transparency=RED), WHITE),
    "palette": (lambda: saved(palette(transparent=False)), BLUE),
    "palette, clear": (lambda: saved(palette(transparent=True), transparency=1), WHITE),
    "palette, gif": (lambda: saved(palette(transparent=False), "GIF"), BLUE),
    "palette with alphas": (lambda: saved(palette(transparent=True), transparency=b"\xff\x00"), WHITE),
    "cmyk jpeg": (lambda: saved(plain("CMYK", (0, 0, 0, 0)), "JPEG", quality=100), WHITE),
    "cmyk jpeg, cyan and magenta": (lambda: saved(plain("CMYK", (255, 255, 0, 0)), "JPEG", quality=100), BLUE),
    "cmyk tiff": (lambda: saved(plain("CMYK", (255, 0, 255, 0)), "TIFF"), GREEN),
    "ycbcr jpeg": (lambda: saved(plain("YCbCr", (76, 85, 255)), "JPEG", quality=100), (254, 0, 0)),
    "bmp": (lambda: saved(plain("RGB", GREEN), "BMP"), GREEN),
    "bmp of 1 bit": (lambda: saved(plain("1", 0), "BMP"), (0, 0, 0)),
    "webp": (lambda: saved(plain("RGB", GREEN), "WEBP", lossless=True), GREEN),
    "tiff": (lambda: saved(plain("RGB", GREEN), "TIFF", compression="tiff_lzw"), GREEN),
    "gif of two frames": (lambda: frames("GIF"), RED),
    "webp of two frames": (lambda: frames("WEBP"), RED),
    "apng of two frames": (lambda: frames("PNG"), RED),
    "tiff of two pages": (lambda: frames("TIFF"), RED),
    "one pixel": (lambda: saved(plain("RGB", RED, (1, 1))), RED),
    "one column": (lambda: saved(plain("RGB", RED, (1, 3000))), RED),
    "one row": (lambda: saved(plain("RGB", RED, (3000, 1))), RED),
    "bytes behind the end": (lambda: saved(plain("RGB", RED)) + b"<html>" * 100, RED),
    "EXIF data that is none": (lambda: saved(plain("RGB", RED), exif=b"Exif\0\0" + b"\xff" * 40), RED),
    "a colour profile": (
        lambda: saved(plain("RGB", RED), icc_profile=ImageCmsProfile(createProfile("sRGB")).tobytes()), RED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_the_picture_is_right(name: str) -> None:
    make, color = RIGHT[name]
    image = decode_image(make())
    assert image.mode == "RGB"
    pixels = np.asarray(image).reshape(-1, 3).astype(int)
    assert np.abs(pixels - color).max() <= 1, (pixels[0], color)


PHOTO = saved(noise(), "JPEG", quality=90)
LOSSLESS = saved(noise())
NO_IMAGE = "is no image file"
DAMAGED = "is damaged or cut off"
SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'

WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", NO_IMAGE),
    "text": (lambda: b"not an image, whatever its name is" * 9, NO_IMAGE),
    "html": (lambda: b"<!doctype html><html><body>404</body></html>", NO_IMAGE),
    "svg": (lambda: SVG, NO_IMAGE),
    "pdf": (lambda: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", NO_IMAGE),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", NO_IMAGE),
    "a format that few use": (lambda: saved(plain("RGB", RED), "PPM"), NO_IMAGE),
    "an icon": (lambda: saved(plain("RGB", RED, (16, 16)), "ICO"), NO_IMAGE),
    "a zip": (lambda: b"PK\x03\x04" + bytes(60), NO_IMAGE),
    "a png's first bytes": (lambda: LOSSLESS[:8], NO_IMAGE),
    "png, half": (lambda: LOSSLESS[: len(LOSSLESS) // 2], DAMAGED),
    "png, a checksum": (lambda: LOSSLESS[:40] + b"\xff\xff" + LOSSLESS[42:], "is "),
    "png without rows": (lambda: png(9, 9), DAMAGED),
    "png of no width": (lambda: png(0, 9), "is |must have"),
    "png of no height": (lambda: png(9, 0), "is |must have"),
    "jpeg, half": (lambda: PHOTO[: len(PHOTO) // 2], DAMAGED),
    "jpeg, its header": (lambda: PHOTO[:30], "is "),
    "gif, half": (lambda: saved(noise(), "GIF")[:2000], DAMAGED),
    "webp, half": (lambda: saved(noise(), "WEBP")[:900], "is "),
    "bmp, half": (lambda: saved(noise(), "BMP")[:2000], DAMAGED),
    "tiff, half": (lambda: saved(noise(), "TIFF")[:2000], "is "),
    "pixels of 32 bits": (lambda: saved(plain("I", 70000), "TIFF"), "8 or 16 bits, got mode I"),
    "float pixels": (lambda: saved(plain("F", 0.5), "TIFF"), "8 or 16 bits, got mode F"),
    "a bomb: 20,000 x 20,000 in few bytes": (lambda: png(20_000, 20_000, 1, 0, bytes(2501)), "pixels"),
    "a bomb: 9,000 x 9,000": (lambda: png(9_000, 9_000, 1), "pixels, got 9000 x 9000"),
    "a header of 2^31 pixels a side": (lambda: png(2**31 - 1, 2**31 - 1), "pixels"),
    "a gif of 65,535 a side": (lambda: b"GIF89a\xff\xff\xff\xff" + saved(noise(), "GIF")[10:], "pixels"),
    "a compressed text of 4 MB": (
        lambda: png(2, 1, rows=bytes(3), extra=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(4 * 10**6)))), DAMAGED,
    ),
    "a file above the limit": (lambda: LOSSLESS + bytes(MAX_BYTES), "at most 32.0 MiB, got 32.0 MiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_error_says_what_is_wrong(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(MediaError, match=f"^images\\[3\\] .*(?:{message})") as caught:
        decode_image(make(), "images[3]")
    assert isinstance(caught.value, WinnowError)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_turns_pictures(orientation: int, kind: str) -> None:
    """The red corner of an upright picture of 16 x 8 is at the top left, the blue one at the bottom right."""
    upright = Image.new("RGB", (16, 8), WHITE)
    upright.paste(RED, (0, 0, 8, 4))
    upright.paste(BLUE, (8, 4, 16, 8))
    turn = Image.Transpose
    # How a camera lays an upright picture down, by the rule of EXIF 2.32: what row 0 and column 0 stand for.
    laid = {
        1: [], 2: [turn.FLIP_LEFT_RIGHT], 3: [turn.ROTATE_180], 4: [turn.FLIP_TOP_BOTTOM], 5: [turn.TRANSPOSE],
        6: [turn.ROTATE_90], 7: [turn.TRANSVERSE], 8: [turn.ROTATE_270],
    }[orientation]  # fmt: skip
    stored = upright
    for each in laid:
        stored = stored.transpose(each)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    image = decode_image(saved(stored, kind, exif=exif, **options))
    assert image.size == (16, 8)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(upright)).max() <= 2
    assert to_rgb(image).size == (16, 8), "turned twice"


def test_exif_turns_16_bits_and_palettes() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for image in (
        plain("I;16", 0, (8, 4)),
        palette(transparent=True).resize((8, 4)),
        plain("LA", (9, 9), (8, 4)),
    ):
        assert decode_image(saved(image, exif=exif)).size == (4, 8)


def test_callers_images_are_converted_and_left_alone() -> None:
    image = plain("RGBA", (*BLUE, 0))
    assert to_rgb(image).getpixel((0, 0)) == WHITE
    assert image.mode == "RGBA"
    with pytest.raises(MediaError, match="got 0 x 5"):
        to_rgb(plain("RGB", RED, (0, 5)))
    assert to_rgb(plain("La", (0, 0))).getpixel((0, 0)) == WHITE
    assert to_rgb(palette(transparent=False).convert("PA")).getpixel((0, 0)) == BLUE
    with pytest.raises(MediaError, match="pixels, got"):
        to_rgb(plain("1", 0, (MAX_PIXELS // 1000 + 1, 1000)))


def test_nothing_imports_pillow_before_there_is_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MediaError, match=r"package pillow: .*\[vision\]"):
        decode_image(LOSSLESS)
