"""Decodes image files with Pillow, in the processes that prepare requests.

The format of a file follows from its content. The number of pixels is checked before any pixel is
decoded. Errors describe the image; `prepared_image` adds its index in the request.
"""

from __future__ import annotations

import warnings
from io import BytesIO

import numpy as np
from PIL import (
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from mlxpool.common.errors import BadRequest
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.settings import ImageSettings

MAX_PIXELS = 2**26  # pixels of a stored image: 8192 x 8192
WHITE = (255, 255, 255)
TAKEN = "png, jpeg, webp and gif are taken"
# Formats by the first bytes of a file; a format without a class is refused with its name.
READERS: dict[str, type[ImageFile.ImageFile]] = {
    "png": PngImagePlugin.PngImageFile,
    "jpeg": JpegImagePlugin.JpegImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
    "gif": GifImagePlugin.GifImageFile,
}
SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"%PDF", "pdf"),
    (b"<svg", "svg"),
    (b"<?xml", "xml or svg"),
    (b"\0\0\1\0", "ico"),
    (b"8BPS", "psd"),
    (b"PK\x03\x04", "zip archive"),
)
AN = (
    "avif",
    "ico",
    "iso",
    "m4",
    "mp",
    "svg",
    "xml",
)  # beginnings of names with a spoken vowel
_SHOWN = 8  # first bytes of an unknown file that the error shows


def prepared_image(data: bytes, index: int, settings: ImageSettings) -> PreparedImage:
    """Returns image `index` of a request, resized for the model.

    Raises BadRequest with the image's index, its description, and the exceeded bound.
    """
    try:
        image = decode(data)
        height, width = settings.size_of(image.height, image.width)
        resized = image.resize((width, height), Image.Resampling(settings.resample))
    except BadRequest as error:
        raise BadRequest(f"images[{index}] {error.message}") from None
    high, wide = settings.canvas_of(image.height, image.width)
    if (high, wide) != (height, width):
        canvas = Image.new("RGB", (wide, high))
        canvas.paste(resized)
        resized = canvas
    grid = settings.grid_of(high, wide)
    return PreparedImage.of(np.asarray(resized), grid, settings.count_of(grid), settings.version)


def decode(data: bytes) -> Image.Image:
    """Returns the image in a file as RGB: the first frame, upright, transparent parts on white.

    Raises BadRequest for another format, too many pixels, and a file that is cut off or damaged.
    """
    kind = format_of(data)
    try:
        with warnings.catch_warnings():  # Pillow warns of many pixels, which are bounded here
            warnings.simplefilter("ignore")
            image: Image.Image = READERS[kind](BytesIO(data))
            check_pixels(kind, *image.size)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)  # no copy of an upright image
            return as_rgb(image)
    except BadRequest:
        raise
    except MemoryError:
        raise BadRequest(f"is a {kind} that needs too much memory to be decoded") from None
    except Exception:  # each of Pillow's readers raises its own exceptions
        raise BadRequest(f"is a {kind} of {len(data)} bytes that is cut off or damaged") from None


def format_of(data: bytes) -> str:
    """Returns png, jpeg, webp or gif, by the first bytes; raises BadRequest for other formats."""
    name = next((name for begin, name in SIGNATURES if data.startswith(begin)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        name = "webp"
    elif data[4:8] == b"ftyp":
        name = f"{data[8:12].decode('ascii', 'replace').strip()} file (heif, avif or a video)"
    if name in READERS:
        return name
    what = f"no image that is known: it begins with {data[:_SHOWN]!r}"
    if name:
        what = f"{'an' if name.startswith(AN) else 'a'} {name}"
    raise BadRequest(f"is {what}; {TAKEN}")


def check_pixels(kind: str, width: int, height: int) -> None:
    """Raises BadRequest for an image that has no pixels or too many pixels."""
    if not 0 < width * height <= MAX_PIXELS:
        raise BadRequest(
            f"is a {kind} of {width} x {height} pixels, must have from 1 to {MAX_PIXELS};"
            " make it smaller"
        )


def as_rgb(image: Image.Image) -> Image.Image:
    """Returns an image as RGB: 16-bit grey is scaled to 8 bits, transparent parts are white."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        sheet = Image.new("RGB", layer.size, WHITE)
        sheet.paste(layer, mask=layer.getchannel("A"))
        return sheet
    return image.convert("RGB")
