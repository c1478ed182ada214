"""Images from a request to its answer: real processes, a small model that reads images."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlxpool.client import Client, Result
from mlxpool.common.errors import BadRequest, ContextExceeded, PoolError, TooLarge
from support import seeing_models as seeing
from support.pool import Pool, until
from support.worker_checkpoints import write_checkpoint

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

FILES = [seeing.file_of(seeing.picture(number)) for number in range(2)]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": seeing.STEPS, "ignore_eos": True}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp("models")
    folders = {
        "eyes": seeing.write_gemma(root / "eyes"),
        "grids": seeing.write_qwen(root / "grids"),
        "crossed": seeing.write_mllama(root / "crossed"),
        "blind": write_checkpoint(root / "blind"),
    }
    tables = [f'[models.{name}]\npath = "{path}"' for name, path in folders.items()]
    with Pool(tmp_path_factory.mktemp("pool"), "\n".join(tables)) as running:
        yield running


def message(prompt: Sequence[str | int], files: Sequence[bytes] = FILES) -> dict[str, Any]:
    """Returns a message with its images in its parts."""
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": files[part]}
        for part in prompt
    ]
    return {"role": "user", "content": parts}


def encoded(pool: Pool, client: Client) -> int:
    """Sends a request and waits until the worker is idle; returns its count of encoded images."""
    sent = time.monotonic()
    client.generate("eyes", "warm", **OPTIONS)

    def rested() -> dict[str, Any] | None:
        milliseconds = 1000 * (time.monotonic() - sent)
        row = pool.worker("eyes/0")
        return row if row["phase"] == "idle" and row["phase_age_ms"] < milliseconds else None

    return int(until(rested, "it rests behind the request")["prefix"]["images"])


@pytest.mark.parametrize(
    ("model", "stored"), [("eyes", "gemma3"), ("grids", "qwen3_vl"), ("crossed", "mllama")]
)
def test_answers_are_those_of_transformers(client: Client, model: str, stored: str) -> None:
    expected = np.load(seeing.EXPECTED / f"{stored}_images.npz")
    for number, prompt in enumerate(seeing.PROMPTS):
        result = client.generate(model, messages=[message(prompt)], **OPTIONS)
        assert list(result.ids) == expected[f"ids_{number}"].tolist()
        assert result.usage["prompt_tokens"] == len(expected[f"prompt_{number}"])


def test_a_text_names_images_by_tags(client: Client) -> None:
    first = client.generate("eyes", "See [img-0]: ", images=FILES[:1], **OPTIONS)
    other = client.generate("eyes", "See [img-0]: ", images=FILES[1:], **OPTIONS)
    both = client.generate("eyes", "See [img-1]: [img-0]", images=FILES, **OPTIONS)
    assert len({tuple(result.ids) for result in (first, other, both)}) == 3
    # 16 inputs of the image, 2 marks, and 4 line ends.
    assert first.usage["prompt_tokens"] == len("See : ") + 16 + 2 + 4


def test_the_same_image_in_two_conversations_is_encoded_once(pool: Pool, client: Client) -> None:
    fresh = [seeing.file_of(seeing.picture(0).rotate(90))]
    before = encoded(pool, client)
    question = message(("Hi ", 0, " a"), fresh)
    first = client.generate("eyes", messages=[question], **OPTIONS)
    more = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    again = client.generate("eyes", messages=[question, *more], **OPTIONS)
    third = client.generate("eyes", messages=[message(("And ", 0, " a"), fresh)], **OPTIONS)
    assert again.usage["cached_tokens"] >= 16, "the prefix was found behind the image"
    assert third.usage["cached_tokens"] < 16 and first.ids != third.ids
    assert encoded(pool, client) == before + 1


def test_another_image_in_the_same_place_is_never_taken_for_it(client: Client) -> None:
    def ask(file: bytes, **options: Any) -> Result:
        answer: Result = client.generate(
            "eyes", messages=[message(("Same ", 0), [file])], **OPTIONS
        )
        return answer

    answers = [ask(file).ids for file in FILES]
    assert answers[0] != answers[1]
    assert [ask(file).ids for file in FILES] == answers
    almost = np.asarray(seeing.picture(0)).copy()
    almost[3:9, 3:9] ^= 255  # a few pixels
    result = ask(seeing.file_of(Image.fromarray(almost)))
    assert result.usage["cached_tokens"] < 16


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_formats(client: Client, kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    file = seeing.file_of(seeing.picture(0), kind, **options)
    result = client.generate("eyes", messages=[message((0, "?"), [file])], **OPTIONS)
    assert len(result.ids) == seeing.STEPS


def refusal(client: Client, *files: bytes, kind: type[PoolError] = BadRequest, **asked: Any) -> str:
    given = asked or {"messages": [message([*range(len(files))], files)]}
    with pytest.raises(kind) as caught:
        client.generate("eyes", **given, **OPTIONS)
    return caught.value.message


def test_what_is_wrong_with_images_is_named_and_nothing_is_lost(pool: Pool, client: Client) -> None:
    pid = pool.in_state("eyes/0", state="ready")["pid"]
    cut = FILES[1][: len(FILES[1]) // 2]
    assert "images[1] is a png of" in refusal(client, FILES[0], cut)
    assert "that is cut off or damaged" in refusal(client, FILES[0], cut)
    assert "has 17 images, at most 16" in refusal(client, *FILES[:1] * 17, kind=TooLarge)
    large = b"\x89PNG\r\n\x1a\n" + bytes(8 * 2**20)
    assert "bytes, at most" in refusal(client, large, kind=TooLarge)
    assert "invalid image index: 1" in refusal(client, prompt="[img-1]", images=FILES[:1])
    long = "[img-0]" * 40
    assert "tokens, the context is" in refusal(
        client, prompt=long, images=FILES[:1], kind=ContextExceeded
    )
    result = client.generate("eyes", messages=[message((0,))], **OPTIONS)
    assert len(result.ids) == seeing.STEPS
    assert pool.worker("eyes/0")["pid"] == pid, "the worker lives"


MARKERS = {  # model -> the template's text for an image; the token in its place, if it differs
    "eyes": ("<start_of_image>", "<image_soft_token>"),
    "grids": ("<|image_pad|>",),
    "crossed": ("<|image|>",),
}


@pytest.mark.parametrize(("model", "marker"), [(m, tag) for m in MARKERS for tag in MARKERS[m]])
def test_a_marker_is_text_in_messages_and_refused_in_prompts(
    client: Client, model: str, marker: str
) -> None:
    text = f"is {marker} a token?"
    asked = {"role": "user", "content": text}
    alone = client.generate(model, messages=[asked], **OPTIONS)
    other = client.generate(model, messages=[{**asked, "content": "is it a token?"}], **OPTIONS)
    longer = len(marker) - len("it")  # a byte is a token in these models
    assert alone.usage["prompt_tokens"] == other.usage["prompt_tokens"] + longer
    history = [asked, {"role": "assistant", "content": f"yes, {marker}"}, message((0, text))]
    assert len(client.generate(model, messages=history, **OPTIONS).ids) == seeing.STEPS
    for images, prompt in (((), text), (FILES[:1], f"[img-0]{text}")):
        with pytest.raises(BadRequest, match="which this model reads as the place of an image"):
            client.generate(model, prompt, images=images, **OPTIONS)


@pytest.mark.parametrize(("model", "slot"), [("eyes", 261), ("grids", 261), ("crossed", 260)])
def test_the_id_of_an_image_is_refused_among_token_ids(
    client: Client, model: str, slot: int
) -> None:
    ids = client.tokenize(model, MARKERS[model][-1])
    assert slot in ids
    with pytest.raises(BadRequest, match=f"has the token id {slot} of .* the place of an image"):
        client.generate(model, tokens=ids, **OPTIONS)


@pytest.mark.parametrize("model", ["eyes", "grids", "crossed", "blind"])
def test_a_prompt_that_is_kept_whole_is_never_cut(client: Client, model: str) -> None:
    """With `num_keep` -1 a prompt that exceeds the context is refused, and nothing of it is cut.

    In one case the cut would be inside an image.
    """
    asked = {**OPTIONS, "num_ctx": 12, "truncate": True, "num_keep": -1}
    prompt, images = "x [img-0] and what is it for you", FILES[:1]
    if model == "blind":
        prompt, images = prompt * 3, []
    with pytest.raises(ContextExceeded, match="keeps the first 11"):
        client.generate(model, prompt, images=images, **asked)


def test_a_long_prompt_names_its_images(client: Client) -> None:
    """The worker checks that a prompt names its images, if the broker cannot.

    The broker does not read prompts of this length, which are sent as blobs.
    """
    long = "x" * 100_000
    asked: dict[str, Any] = {"images": FILES[:1], "truncate": True}
    assert "[img-0] into" in refusal(client, prompt=long, **asked)
    assert "invalid image index: 1" in refusal(client, prompt=f"[img-0][img-1]{long}", **asked)
    assert client.generate("eyes", f"{long}[img-0]", **asked, **OPTIONS).ids


def test_one_image_sixteen_times_is_encoded_once(pool: Pool, client: Client) -> None:
    fresh = [seeing.file_of(seeing.picture(1).rotate(180))]
    before = encoded(pool, client)
    client.generate("eyes", messages=[message([0] * 16, fresh)], **OPTIONS)
    assert encoded(pool, client) == before + 1


def test_a_text_model_refuses_and_models_say_who_takes_images(client: Client) -> None:
    with pytest.raises(BadRequest, match="this model does not support image input"):
        client.generate("blind", messages=[message((0,))], **OPTIONS)
    features = {model["name"]: model["features"] for model in client.models()}
    assert "vision" in features["eyes"] and "vision" in features["grids"]
    assert "vision" not in features["blind"]


@pytest.mark.parametrize("model", ["eyes", "grids"])
def test_images_go_with_shifts_and_truncation(client: Client, model: str) -> None:
    asked = {**OPTIONS, "max_tokens": 120, "num_ctx": 64, "shift": True, "num_keep": 2}
    first = client.generate(model, messages=[message((0, "x" * 10))], **asked)
    again = client.generate(model, messages=[message((0, "x" * 10))], **asked)
    assert len(first.ids) == 120 and first.ids == again.ids
    cut = client.generate(
        model, messages=[message((0, "y" * 80, 1))], **{**OPTIONS, "num_ctx": 60, "truncate": True}
    )
    assert cut.usage["prompt_tokens"] < 60
