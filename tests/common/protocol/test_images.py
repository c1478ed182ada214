"""Images of a request: their bounds, and their names in a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.images import MAX_IMAGE, MAX_IMAGE_TOTAL, images_of_text


def parsed(blobs: list[bytes], **body: Any) -> Generate:
    return Generate.parse({"model": "m", **body}, blobs)


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def part(index: int) -> dict[str, Any]:
    return {"type": "image", "blob": index}


def test_the_bytes_of_images_count_where_those_of_the_prompt_do() -> None:
    plain = parsed([], prompt="abc [img-0]")
    request = parsed([b"x" * 100], prompt="abc [img-0]", images=1)
    assert request.prompt.images == (b"x" * 100,)
    assert request.size == plain.size + 100
    assert request.text_size == plain.text_size == plain.size


def test_an_image_may_be_named_twice() -> None:
    request = parsed([b"a"], messages=chat(part(0), part(0)), images=1)
    assert request.prompt.images == (b"a",)


def test_without_images_a_text_may_have_tags() -> None:
    assert parsed([], prompt="[img-7]").prompt.images == ()


def test_names_are_of_ascii_digits_and_of_any_number_of_them() -> None:
    assert images_of_text("[img-0][img-007][img-\u0660][img-\uff10][img--1][img-]") == [0, 7]
    for digits in ("1", "9" * 10, "9" * 10_000):
        with pytest.raises(PoolError, match="invalid image index"):
            parsed([b"a"], prompt=f"[img-0][img-{digits}]", images=1)


@pytest.mark.parametrize(
    ("blobs", "body", "code", "words"),
    [
        ([b"a"] * 100, {"prompt": "x", "images": 100}, "too_large", "has 100 images, at most 16"),
        ([b"a"], {"prompt": "[img-1]", "images": 1}, "bad_request", "invalid image index: 1"),
        (
            [b"a"] * 2,
            {"prompt": "[img-0]", "images": 2},
            "bad_request",
            r"images\[1\] is named now",
        ),
        ([b"a"], {"prompt": "[img-0]", "images": 2}, "bad_request", "message has 1 blobs for them"),
        ([b"a", b""], {"prompt": "x", "images": 2}, "bad_request", r"images\[1\] is empty"),
        ([b"a"], {"prompt": "x", "images": "1"}, "bad_request", "must be the number of blobs"),
        ([b"a"], {"prompt": "x", "images": -1}, "bad_request", "got -1"),
        ([b"a"], {"prompt": "x", "images": ["aGk="]}, "bad_request", "got .'aGk='"),
        ([b"1234", b"a"], {"tokens": True, "images": 1}, "bad_request", "images require prompt"),
        ([b"a"], {"messages": chat(part(1)), "images": 1}, "bad_request", "invalid image index: 1"),
        ([], {"messages": chat(part(0))}, "bad_request", "invalid image index: 0; .* 0 images"),
        ([b"a"], {"messages": chat("x"), "images": 1}, "bad_request", "content.0. must be"),
        ([b"a", b"b"], {"prompt": "[img-0]", "images": 1}, "bad_request", "does not mention"),
    ],
)
def test_what_cannot_be_is_refused(
    blobs: list[bytes], body: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(PoolError, match=words) as raised:
        parsed(blobs, **body)
    assert raised.value.code == code


def test_the_bytes_of_an_image_and_of_all_are_bounded() -> None:
    text = "".join(f"[img-{number}]" for number in range(5))
    with pytest.raises(PoolError, match=rf"images\[0\] has {MAX_IMAGE + 1} bytes, at most"):
        parsed([bytes(MAX_IMAGE + 1)], prompt="[img-0]", images=1)
    with pytest.raises(PoolError, match=f"5 images have .* together, at most {MAX_IMAGE_TOTAL}"):
        parsed([bytes(MAX_IMAGE)] * 5, prompt=text, images=5)


def test_a_prompt_or_a_resume_may_not_use_the_bytes_for_images() -> None:
    big = bytes(4 * 2**20 + 4)
    with pytest.raises(PoolError, match="the blob of prompt has 4194308 bytes, at most 4194304"):
        parsed([big], prompt=True)
    with pytest.raises(PoolError, match="the blob of resume has 4194308 bytes, at most 4194304"):
        parsed([big], prompt="x", resume={"count": len(big) // 4})
