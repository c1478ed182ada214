"""Images in HTTP requests: data URLs, base64, and values that are refused."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.ollama import requests as ollama_requests
from mlxpool.gateway.openai import requests as openai_requests

A, B = b"\x89PNG one", b"GIF89a two"
TEXT = {"type": "text", "text": "what?"}


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{coded(data)}"


def part(address: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, **more}}


def openai_chat(*parts: Any) -> openai_requests.CompletionRequest:
    return openai_requests.chat(
        {"model": "m", "messages": [{"role": "user", "content": [*parts]}], "n": 2}
    )


def test_parts_name_images_by_index() -> None:
    request = openai_chat(part(url(A)), TEXT, part(url(B, "image/gif"), detail="high"))
    content = [{"type": "image", "blob": 0}, TEXT, {"type": "image", "blob": 1}]
    for arguments in request.arguments():
        assert arguments["messages"] == [{"role": "user", "content": content}]
        assert arguments["images"] == [A, B]
    assert len(request.arguments()) == 1 and request.choices == 2


def test_a_url_may_stand_alone_and_be_written_in_lines() -> None:
    text = f"DATA:image/png;BASE64,{coded(A)[:4]}\r\n{coded(A)[4:]}"
    request = openai_chat({"type": "image_url", "image_url": text})
    assert request.prompts[0]["images"] == [A]


def test_without_images_nothing_changes() -> None:
    assert "images" not in openai_chat(TEXT).prompts[0]


WHERE = r"messages\[0\].content\[0\]"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (part("http://example.org/a.png"), "are not fetched from other servers"),
        (part("https://example.org/a.png"), "send the image itself as data:image/png;base64,"),
        (part("file:///etc/passwd"), "must be data:image/TYPE;base64"),
        (part("data:image/png,abc"), "must be data:image/TYPE;base64"),
        (part("data:image/png;base64,a?b"), "is not base64"),
        (part("data:image/png;base64,abc"), "is not base64"),
        (part(None), "must have a data URL, got"),
        (part(5), "must have a data URL, got 5"),
        (part(url(A), detail="huge"), "detail is 'huge', must be auto, low or high"),
        ({"type": "image_url"}, "must have a data URL, got"),
        (part(url(A, "text/plain")), "must be data:image/TYPE;base64"),
        (part(f"data:;base64,{coded(A)}"), "must be data:image/TYPE;base64"),
        ({"type": "input_video"}, "has the type 'input_video': models take text and images only"),
        ({"type": "input_audio"}, "has the type 'input_audio': models take text and images only"),
        ({"type": "input_image", "image_url": "x"}, "must be data:image/TYPE;base64"),
        ({"type": "input_image", "file_id": "x"}, "as a data URL in `image_url`"),
        ({"type": "image", "image": "x"}, "has the type 'image': the type of an image is 'image_u"),
        ({"type": "image", "blob": 0}, "has the type 'image'"),
        ({"x": "no type"}, "has the type None: must be {type: 'text'"),
        ({"type": ["text"]}, r"has the type \['text'\]: must be"),
        (5, "has 5: must be {type: 'text'"),
        ({"type": "text"}, "text must be text, got None"),
    ],
)
def test_what_is_refused_is_named(given: Any, why: str) -> None:
    with pytest.raises(HttpError, match=f"{WHERE}.*{why}") as caught:
        openai_chat(given)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": "x", "images": [coded(A)]}, "images is not supported: .* 'image_url'"),
        ({"content": 5}, "content must be text or a list of parts, got 5"),
    ],
)
def test_a_message_of_another_interface_is_refused(message: dict[str, Any], why: str) -> None:
    with pytest.raises(HttpError, match=rf"^messages\[0\].{why}"):
        openai_requests.chat({"model": "m", "messages": [{"role": "user", **message}]})


def test_a_message_may_have_an_empty_list_of_images() -> None:
    message = {"role": "user", "content": "x", "images": []}
    assert openai_requests.chat({"model": "m", "messages": [message]}).prompts


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": [part(url(A))]}, r"content\[0\] must be .*go into `images` of the message"),
        ({"content": [{"type": "image", "blob": 0}]}, r"content\[0\] must be {type: 'text'"),
        ({"content": 5}, "content must be text, got 5"),
        ({"content": [TEXT], "images": [coded(A)]}, r".* has images, so its content must be text"),
        ({"content": "x", "thinking": 5}, "thinking must be text, got 5"),
        ({"content": "x", "tool_name": []}, r"tool_name must be text, got \[\]"),
    ],
)
def test_errors_are_in_ollamas_words(message: dict[str, Any], why: str) -> None:
    with pytest.raises(HttpError, match=rf"^messages\[0\].?{why}"):
        ollama_requests.chat({"model": "m", "messages": [{"role": "user", **message}]})


def test_ollamas_messages_have_their_images_in_front() -> None:
    request = ollama_requests.chat(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "one", "images": [coded(A), coded(B)]},
                {"role": "assistant", "content": "yes", "images": []},
                {"role": "user", "content": "", "images": [coded(B)]},
            ],
        }
    )
    assert request.images == [A, B, B]
    assert [message["content"] for message in request.messages] == [
        [
            {"type": "image", "blob": 0},
            {"type": "image", "blob": 1},
            {"type": "text", "text": "one"},
        ],
        "yes",
        [{"type": "image", "blob": 2}],
    ]
    assert not any("images" in message for message in request.messages)


def test_ollamas_prompt_has_images() -> None:
    request = ollama_requests.generate({"model": "m", "prompt": "x", "images": [coded(A)]})
    assert request.images == [A]
    assert ollama_requests.generate({"model": "m", "prompt": "x", "images": []}).images == []


@pytest.mark.parametrize(
    ("images", "why"),
    [
        ("abc", "images must be a list of images in base64"),
        ([coded(A), "%"], r"images\[1\] is not base64"),
        ([5], r"images\[0\] must be base64, got 5"),
    ],
)
def test_ollamas_images_are_checked(images: Any, why: str) -> None:
    with pytest.raises(HttpError, match=f"^{why}"):
        ollama_requests.generate({"model": "m", "prompt": "x", "images": images})
    with pytest.raises(HttpError, match=rf"^messages\[0\].{why}"):
        message = {"role": "user", "content": "x", "images": images}
        ollama_requests.chat({"model": "m", "messages": [message]})


def test_images_beside_ollamas_messages_are_refused() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(HttpError, match=r"give them in a message: messages\[n\].images"):
        ollama_requests.chat({"model": "m", "messages": messages, "images": [coded(A)]})
