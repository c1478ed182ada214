"""Images through the gateway, with OpenAI's and Ollama's own clients, and from the command line."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from support import seeing_models as seeing
from support.gateway_thread import GatewayThread
from support.pool import Pool, until
from support.worker_checkpoints import write_checkpoint

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

FILES = [seeing.file_of(seeing.picture(number)) for number in range(2)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp("models")
    folders = {"eyes": seeing.write_gemma(root / "eyes"), "blind": write_checkpoint(root / "blind")}
    tables = [f'[models.{name}]\npath = "{path}"' for name, path in folders.items()]
    with Pool(tmp_path_factory.mktemp("pool"), "\n".join(tables)) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(pool: Pool) -> list[str]:
    """Returns, for each prompt, the text of the first tokens that transformers generates."""
    stored = np.load(seeing.EXPECTED / "gemma3_images.npz")
    with pool.client() as client:
        return [client.detokenize("eyes", stored[f"ids_{n}"].tolist()) for n in range(2)]


def content(number: int) -> list[Any]:
    """Returns prompt `number` of support/seeing_models.py as parts of an OpenAI message."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(FILES[part])}}
        for part in seeing.PROMPTS[number]
    ]


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def ask(client: openai.OpenAI, model: str, parts: Any) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        max_tokens=seeing.STEPS,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].message.content or ""


def test_openai_gives_the_answers_of_transformers(api: openai.OpenAI, wanted: list[str]) -> None:
    assert [ask(api, "eyes", content(number)) for number in range(2)] == wanted


@pytest.fixture
def llama(gateway: GatewayThread) -> Iterator[ollama.Client]:
    with ollama.Client(host=gateway.url) as new_client:
        yield new_client


def test_ollama(llama: ollama.Client) -> None:
    client = llama
    options = {"temperature": 0, "num_predict": 12}
    chat = client.chat(
        "eyes", [{"role": "user", "content": "hi", "images": FILES[:1]}], options=options
    )
    same = client.generate("eyes", "hi", images=FILES[:1], options=options)
    assert same.response == chat.message.content
    raw = client.generate("eyes", "see [img-0] hi", images=FILES[:1], raw=True, options=options)
    other = client.generate("eyes", "see [img-0] hi", images=FILES[1:], raw=True, options=options)
    assert raw.response != other.response
    with pytest.raises(ollama.ResponseError, match=r"images\[0\] is named nowhere"):
        client.generate("eyes", "see", images=FILES[:1], raw=True)

    def capabilities(model: str) -> list[str]:
        return client.show(model).capabilities or []

    until(lambda: "vision" in capabilities("eyes"), "the gateway's list has the features")
    assert "vision" not in capabilities("blind")


def test_the_command_line(pool: Pool, tmp_path: Path, wanted: list[str]) -> None:
    files = [tmp_path / f"{number}.png" for number in range(2)]
    for file, data in zip(files, FILES, strict=True):
        file.write_bytes(data)
    flags = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]

    def run(*arguments: str) -> list[int]:
        lines = pool.cli("run", "eyes", *arguments, *flags, "--json").stdout.splitlines()
        return list(json.loads(lines[-1])["ids"])

    images = ["--image", str(files[0]), "--image", str(files[1])]
    in_front, named = run("hi", *images), run("[img-0][img-1]hi", *images)
    assert in_front == named and len(named) == 6
    assert run("[img-1][img-0]hi", *images) != named
    assert len(run("hi", "--chat", *images)) == 6
    missing = pool.cli("run", "eyes", "hi", "--image", str(tmp_path / "none.png"))
    assert missing.returncode != 0 and "images[0] cannot be read" in missing.stderr


def test_images_in_a_chat_of_the_command_line(pool: Pool, tmp_path: Path) -> None:
    """The first image is given by the flag, the second is attached; the third message fails."""
    files = [tmp_path / f"{number}.png" for number in range(2)]
    for file, data in zip(files, FILES, strict=True):
        file.write_bytes(data)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    asked: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "image", "image": file}, {"type": "text", "text": text}],
        }
        for file, text in zip(files, ("one", "two"), strict=True)
    ]
    with pool.client() as client:
        first = client.generate("eyes", messages=asked[:1], **options)
        history = [asked[0], {"role": "assistant", "content": first.text}, asked[1]]
        second = client.generate("eyes", messages=history, **options)
    lines = ["one", f"/image {files[1]}", "two", f"/image {broken}", "three", "four"]
    flags = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--json"]
    done = pool.cli(
        "chat", "eyes", "--image", str(files[0]), *flags, stdin="".join(f"{x}\n" for x in lines)
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer.get("content") for answer in answers[:2]] == [first.text, second.text]
    assert "images[2] is no image that is known" in answers[2]["error"]["message"]
    assert "images[2] is no image that is known" in done.stderr
    assert "bad_request" not in done.stderr, "codes are shown as `run` shows them"
    assert answers[3]["content"], "the broken image went with the message that failed"
    missing = pool.cli("chat", "eyes", "--image", str(tmp_path / "none.png"), stdin="x\n")
    assert missing.returncode == 2 and "images[0] cannot be read" in missing.stderr
