"""Image files: type by content, bounds before decoding, damaged files, orientation and alpha."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from mlxpool.common.errors import BadRequest
from mlxpool.worker.media.decode import MAX_PIXELS, decode, prepared_image
from mlxpool.worker.media.settings import ImageSettings
from mlxpool.worker.preparation.limits import IMAGE_MEMORY
from support.seeing_models import file_of

SETTINGS = ImageSettings(4, 2, 2, 1 / 255, (0.5,) * 3, (0.5,) * 3, height=32, width=32)
FREE = ImageSettings(4, 2, 3, 1 / 255, (0.5,) * 3, (0.5,) * 3, min_pixels=256, max_pixels=4096)
RED, BLUE = (250, 10, 20), (10, 20, 250)


def halves(width: int = 40, height: int = 20, mode: str = "RGB") -> Image.Image:
    """Returns an image whose left half is red and whose right half is blue."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image.convert(mode)


def near(pixel: Any, colour: tuple[int, int, int]) -> bool:
    return all(abs(int(a) - b) < 12 for a, b in zip(pixel, colour, strict=True))


def error(data: bytes, index: int = 3, settings: ImageSettings = SETTINGS) -> str:
    with pytest.raises(BadRequest) as caught:
        prepared_image(data, index, settings)
    assert caught.value.message.startswith(f"images[{index}] ")
    return caught.value.message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(kind: str) -> None:
    image = decode(file_of(halves(), kind))
    assert image.mode == "RGB" and image.size == (40, 20)
    assert near(image.getpixel((5, 10)), RED) and near(image.getpixel((35, 10)), BLUE)


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "RGBA", "LA", "I;16"])
def test_modes_become_rgb(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    if mode == "I;16":
        image = Image.fromarray(np.full((20, 40), 51_400, np.uint16))
    else:
        image = halves(mode=mode)
    picture = decode(file_of(image, kind))
    assert picture.mode == "RGB" and picture.size == (40, 20)
    if mode == "I;16":
        assert picture.getpixel((3, 3)) == (200, 200, 200)


def test_transparent_parts_are_white() -> None:
    image = halves().convert("RGBA")
    image.putalpha(Image.new("L", image.size, 0))
    image.paste((*RED, 255), (0, 0, 20, 20))
    picture = decode(file_of(image, "PNG"))
    assert picture.getpixel((5, 5)) == RED and picture.getpixel((35, 5)) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert decode(file_of(palette, "GIF", transparency=0)).getpixel((1, 1)) == (255, 255, 255)


def test_an_image_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    picture = decode(file_of(halves(), "JPEG", exif=exif))
    assert picture.size == (20, 40)
    assert near(picture.getpixel((10, 5)), RED) and near(picture.getpixel((10, 35)), BLUE)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_counts(kind: str) -> None:
    first, second = Image.new("RGB", (8, 8), RED), Image.new("RGB", (8, 8), BLUE)
    picture = decode(file_of(first, kind, save_all=True, append_images=[second], duration=50))
    assert near(picture.getpixel((4, 4)), RED)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"%PDF-1.7 and more", "is a pdf; png, jpeg, webp and gif are taken"),
        (b"BM" + bytes(60), "is a bmp;"),
        (b"II*\0" + bytes(60), "is a tiff;"),
        (b"\0\0\1\0" + bytes(60), "is an ico;"),
        (b"\0\0\0\x20ftypavif" + bytes(20), "is an avif file"),
        (b"<svg xmlns='x'></svg>", "is an svg;"),
        (b"\0\0\0\x20ftypheic" + bytes(20), "is a heic file"),
        (b"RIFF\0\0\0\0WAVE" + bytes(20), "begins with b'RIFF"),
        (b"hello, I am a text", "is no image that is known: it begins with b'hello, I'"),
        (b"\x89PNG\r\n\x1a\n", "is a png of 8 bytes that is cut off or damaged"),
        (b"\xff\xd8\xff\xe0", "is a jpeg of 4 bytes that is cut off or damaged"),
        (b"GIF89a", "is a gif of 6 bytes that is cut off or damaged"),
    ],
)
def test_other_files_are_named(data: bytes, what: str) -> None:
    assert what in error(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_files_that_are_cut_off(kind: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = file_of(Image.fromarray(noise), kind)
    said = error(data[: int(len(data) * share)])
    assert said.endswith("that is cut off or damaged"), "no word of the decoder's own"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_damaged_files_give_an_error_or_an_image(kind: str) -> None:
    data = bytearray(file_of(halves(), kind))
    draw = np.random.default_rng(1)
    for _ in range(150):
        broken = bytearray(data)
        for place in draw.integers(0, len(data), 4):
            broken[place] = draw.integers(0, 256)
        try:
            assert prepared_image(bytes(broken), 0, SETTINGS).pixels.shape == (32, 32, 3)
        except BadRequest as refused:
            assert refused.message.startswith("images[0] is ")


def bomb(width: int, height: int) -> bytes:
    """Returns a PNG of a few bytes whose header claims `width` x `height` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))
        )

    head = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(10_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(50_000, 50_000), (MAX_PIXELS + 1, 1), (0, 5)])
def test_pixels_are_bounded_before_they_are_decoded(width: int, height: int) -> None:
    message = error(bomb(width, height))
    if width:
        assert f"is a png of {width} x {height} pixels, must have from 1 to {MAX_PIXELS}" in message


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
@pytest.mark.skipif(sys.platform != "linux", reason="the bound is a feature of Linux")
def test_the_largest_image_fits_the_memory_of_a_lane(mode: str) -> None:
    """Decoding stays within IMAGE_MEMORY, the bound of a lane's address space.

    A lane is a process that prepares requests.
    """
    script = (
        "import resource, sys; from mlxpool.worker.media.decode import decode;"
        "base = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        f"resource.setrlimit(resource.RLIMIT_AS, (base + {IMAGE_MEMORY},) * 2);"
        "print(decode(sys.stdin.buffer.read()).size)"
    )
    data = file_of(Image.new(mode, (8192, 8192)), "PNG")
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True)
    assert done.stdout == b"(8192, 8192)\n", done.stderr.decode()


def test_an_image_gets_the_size_of_the_model() -> None:
    image = prepared_image(file_of(halves(), "PNG"), 0, SETTINGS)
    assert image.pixels.shape == (32, 32, 3) and image.pixels.dtype == np.uint8
    assert image.grid == (1, 8, 8) and image.count == 16
    expected = np.asarray(halves().resize((32, 32), Image.Resampling.BILINEAR))
    assert (image.pixels == expected).all()


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [(40, 21, (24, 40)), (400, 200, (40, 88)), (5, 5, (16, 16)), (8, 100, (96, 8))],
)
def test_an_image_keeps_its_proportions(width: int, height: int, size: tuple[int, int]) -> None:
    image = prepared_image(file_of(halves(width, height), "PNG"), 0, FREE)
    assert image.pixels.shape == (*size, 3)
    assert image.grid == (1, size[0] // 4, size[1] // 4)
    assert image.count == size[0] * size[1] // 64


def test_a_stripe_is_refused_where_proportions_stay() -> None:
    assert "is 1000 x 4 pixels: one side may be at most 200 times" in error(
        file_of(halves(1000, 4), "PNG"), settings=FREE
    )


@pytest.mark.parametrize(
    ("height", "width", "size", "canvas"),
    [  # as transformers 5.23 has them
        (480, 640, (480, 640), (560, 1120)),
        (1080, 1920, (630, 1120), (1120, 1120)),
        (3000, 500, (2240, 373), (2240, 560)),
        (100, 100, (560, 560), (560, 560)),
        (1, 1000, (1, 1000), (560, 1120)),
        (1121, 1119, (1120, 1118), (1120, 1120)),
    ],
)
def test_the_canvas_of_an_image_on_tiles(
    height: int, width: int, size: tuple[int, int], canvas: tuple[int, int]
) -> None:
    tiles = replace(SETTINGS, patch=14, merge=1, height=560, width=560, tiles=4)
    assert tiles.size_of(height, width) == size
    assert tiles.canvas_of(height, width) == canvas
    grid = tiles.grid_of(*canvas)
    assert grid == (1, canvas[0] // 14, canvas[1] // 14) and tiles.count_of(grid) == 1


def test_an_image_on_tiles_lies_in_the_corner_of_a_black_canvas() -> None:
    tiles = replace(SETTINGS, merge=1, height=16, width=16, tiles=4)
    image = prepared_image(file_of(Image.new("RGB", (33, 90), RED), "PNG"), 0, tiles)
    assert image.pixels.shape == (48, 16, 3) and image.grid == (1, 12, 4)
    assert (image.pixels[:43] == RED).all() and not image.pixels[43:].any()
    wide = prepared_image(file_of(Image.new("RGB", (20, 10), RED), "PNG"), 0, tiles)
    assert wide.pixels.shape == (16, 32, 3)
    assert (wide.pixels[:10, :20] == RED).all() and not wide.pixels[:, 20:].any()


def test_keys_differ_by_content_and_preprocessing() -> None:
    other = Image.new("RGB", (40, 20), RED)
    files = [file_of(halves(), "PNG"), file_of(other, "PNG")]
    keys = {
        prepared_image(data, 0, settings).key for data in files for settings in (SETTINGS, FREE)
    }
    assert len(keys) == 4
    as_webp = prepared_image(file_of(halves(), "WEBP", lossless=True), 5, SETTINGS)
    assert as_webp.key == prepared_image(files[0], 0, SETTINGS).key, "the same pixels"
