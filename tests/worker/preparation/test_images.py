"""Tests images in lanes (processes that prepare requests); a bad image harms nothing else."""

from __future__ import annotations

import queue
import signal
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.preparation.errors import CANCELLED, error_of_exit
from mlxpool.worker.preparation.jobs import Encode, Encoded, Job, Render, Result, image_of, perform
from mlxpool.worker.preparation.lane import Bounds
from mlxpool.worker.preparation.lane_service import LaneService
from mlxpool.worker.preparation.lanes import ForkServer
from mlxpool.worker.preparation.limits import (
    IMAGE_SECONDS,
    MAX_IMAGE_LANES,
    MAX_LANES,
    SHORT_TEXT,
    Limits,
)
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.prompt.text_model import TextSource
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.system.cpu_threads import CpuThreads
from mlxpool.worker.weights.inspect import inspect
from support import seeing_models as seeing
from support.pool import PATIENCE, until
from support.slow_tokenizer import SLOW, SLOW_PATTERN, split_texts

CONTEXT = 500
SLOT = seeing.FIRST_ID + 1
FILES = [seeing.file_of(seeing.picture(number)) for number in range(2)]


class Lanes:
    """A service for a model that reads images."""

    def __init__(self, folder: Path) -> None:
        self.source: TextSource = ChatTokenizer.from_folder(inspect(folder)).source
        self.results: queue.SimpleQueue[tuple[Hashable, Result]] = queue.SimpleQueue()
        server = ForkServer(self.source, Limits(render=PATIENCE, tokenize=PATIENCE))
        self.service = LaneService(
            server, lambda key, result: self.results.put((key, result)), CpuThreads(None, 1)
        )
        self.service.start()
        self._key = 0

    def do(self, job: Job, size: int = 1) -> Result:
        self._key += 1
        self.service.submit(Waiting(self._key, "", size, job))
        key, result = self.results.get(timeout=PATIENCE)
        assert key == self._key
        return result

    def encoded(self, job: Job, size: int = 1) -> Encoded:
        result = self.do(job, size)
        assert isinstance(result, Encoded), result
        return result

    def error(self, job: Job) -> str:
        result = self.do(job)
        assert isinstance(result, PoolError), result
        assert isinstance(result, BadRequest) or result.code == "context_exceeded"
        return result.message


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    gemma_lanes = Lanes(seeing.write_gemma(tmp_path_factory.mktemp("gemma")))
    yield gemma_lanes
    gemma_lanes.service.close()


def chat(*prompt: str | int, files: list[bytes] = FILES, context: int = CONTEXT) -> Render:
    messages = [{"role": "user", "content": seeing.parts_of(prompt)}]
    return Render(messages, (), None, 0.0, context, files)


def test_a_chat_has_a_slot_for_each_place_and_each_image_once(lanes: Lanes) -> None:
    encoded = lanes.encoded(chat(0, "and", 1, "or", 0))
    ids = unpack_ids(encoded.packed)
    assert ids.count(SLOT) == 3 and list(encoded.named) == [0, 1, 0]
    images = [image_of(fields) for fields in encoded.images]
    assert [(image.pixels.shape, image.grid, image.count) for image in images] == [
        ((32, 32, 3), (1, 8, 8), 16)
    ] * 2
    assert images[0].key != images[1].key
    assert ids[encoded.restore_at] == 259, "the generation prompt follows"


def test_a_text_names_images_by_tags(lanes: Lanes) -> None:
    encoded = lanes.encoded(Encode("[img-1] is not [img-0]", CONTEXT, images=FILES))
    assert list(encoded.named) == [1, 0] and unpack_ids(encoded.packed).count(SLOT) == 2


def test_a_long_chat_keeps_its_images(lanes: Lanes) -> None:
    """A long chat is rendered in one job and encoded in the next; the images move along."""
    job = chat(0, "x" * (SHORT_TEXT + 1), 1, context=10**6)
    encoded = lanes.encoded(job)
    assert list(encoded.named) == [0, 1] and len(encoded.images) == 2
    assert unpack_ids(encoded.packed).count(SLOT) == 2


def test_the_inputs_of_images_count_in_the_context(lanes: Lanes) -> None:
    text = "[img-0]" * 20
    count = len(unpack_ids(lanes.encoded(Encode(text, CONTEXT, images=FILES[:1])).packed))
    whole = count + 20 * 15
    assert f"has {whole} tokens" in lanes.error(Encode(text, whole, images=FILES[:1]))
    assert lanes.encoded(Encode(text, whole + 1, images=FILES[:1]))


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (chat(0, 1, files=[FILES[0], FILES[1][:200]]), "images[1] is a png of 200 bytes that is"),
        (chat(0, files=[b"%PDF-1.4"]), "images[0] is a pdf; png, jpeg, webp and gif are taken"),
        (Encode("[img-0]<image_soft_token>", 99, images=FILES[:1]), "'<image_soft_token>', which"),
        (Encode("[img-0]<start_of_image>", 99, images=FILES[:1]), "'<start_of_image>', which"),
        (Encode("<start_of_image>", 99), "the prompt has the text '<start_of_image>', which"),
        (Encode(b"x" * 90_000, 10**6, images=FILES[:1]), "images[0] is named nowhere"),
        (Encode(b"[img-7][img-0]", 99, images=FILES[:1]), "invalid image index: 7"),
    ],
)
def test_what_is_wrong_with_an_image_is_named(lanes: Lanes, job: Job, why: str) -> None:
    assert why in lanes.error(job)
    assert lanes.encoded(chat(0, files=FILES[:1])), "the next request is served"


@pytest.mark.parametrize("literal", ["<start_of_image>", "<image_soft_token>"])
@pytest.mark.parametrize("size", [1, SHORT_TEXT + 1])
def test_a_marker_in_a_message_is_text(lanes: Lanes, literal: str, size: int) -> None:
    """The marker's text becomes byte tokens, beside an image or alone, also in a long chat."""
    text = f"is {literal} a token?" + "x" * size
    for prompt in ((text,), (text, 0, text)):
        files = FILES[:1] if 0 in prompt else []
        encoded = lanes.encoded(chat(*prompt, files=files, context=10**6))
        ids = unpack_ids(encoded.packed)
        assert ids.count(SLOT) == len(files)
        assert list(encoded.named) == [0] * len(files)
        assert ids[encoded.restore_at] == 259, "the generation prompt follows"
        written = bytes(byte for byte in ids if byte < 256)
        assert written.count(text.encode()) == prompt.count(text)


def test_an_image_that_takes_too_long_ends_its_lane_with_a_reason() -> None:
    error = error_of_exit(-signal.SIGVTALRM, 100, Limits())
    assert isinstance(error, BadRequest)
    assert error.message.startswith("the images of the request were not decoded after 20 s")


def test_the_images_of_a_request_share_one_limit_of_time() -> None:
    """All images of a request together have the time limit of one job.

    Otherwise a request with 16 images could run 16 times as long.
    """
    handler = signal.getsignal(signal.SIGPROF)
    bounds = Bounds(Limits())
    try:
        left = []
        for _ in range(3):
            with bounds.image():
                left.append(signal.getitimer(signal.ITIMER_VIRTUAL)[0])
                # The kernel counts this timer in clock ticks; a busy machine misses some of them.
                while signal.getitimer(signal.ITIMER_VIRTUAL)[0] > left[-1] - 0.02:
                    pass
        assert IMAGE_SECONDS + 0.1 > left[0] > left[1] > left[2]
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
        bounds.begin_job()
        with bounds.image():
            assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > left[1]
    finally:
        signal.signal(signal.SIGPROF, handler)


def test_equal_images_are_read_once(tmp_path: Path) -> None:
    text = CountingReads(ChatTokenizer.from_folder(inspect(seeing.write_gemma(tmp_path))))
    files = [FILES[0], FILES[1], bytes(bytearray(FILES[0])), FILES[1]]
    result = perform(text, Encode("[img-3][img-2][img-0][img-1]", CONTEXT, images=files))
    assert isinstance(result, Encoded)
    assert text.reads == [0, 1] and len(result.images) == 2
    assert list(result.named) == [1, 0, 0, 1]


class CountingReads:
    """A tokenizer that records which images it was asked to read."""

    def __init__(self, text: ChatTokenizer) -> None:
        self._text = text
        self.reads: list[int] = []

    def read_image(self, data: bytes, index: int) -> PreparedImage:
        self.reads.append(index)
        return self._text.read_image(data, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)


def test_texts_and_other_owners_do_not_wait_for_images(tmp_path: Path) -> None:
    """Images of one owner are prepared one after the other, and texts have lanes of their own."""
    folder = seeing.write_gemma(tmp_path)
    split_texts(folder, SLOW_PATTERN)
    lanes = Lanes(folder)
    try:
        for number in range(MAX_LANES):
            job = Encode("[img-0]" + SLOW, 10**6, images=FILES[:1])
            lanes.service.submit(Waiting(("a", number), "a", 1, job))
        lanes.service.submit(Waiting(("b", 0), "b", 1, job))
        lanes.service.submit(Waiting(("c", 0), "c", 1, job))

        def load() -> tuple[int, int]:
            return lanes.service.load.running, lanes.service.load.waiting

        expected = (MAX_IMAGE_LANES, MAX_LANES + 2 - MAX_IMAGE_LANES)
        until(lambda: load() == expected, "one of each of two owners runs")
        for size in (1, SHORT_TEXT + 1):
            lanes.service.submit(Waiting(size, "a", size, Encode("a" * size, 10**6)))
            key, result = lanes.results.get(timeout=PATIENCE)
            assert key == size and isinstance(result, Encoded)
        until(lambda: load() == expected, "the images still run and wait")
        lanes.service.cancel(("a", 0))
        assert lanes.results.get(timeout=PATIENCE) == (("a", 0), CANCELLED)
        until(lambda: load() == (expected[0], expected[1] - 1), "the next one runs")
    finally:
        lanes.service.close()


def test_a_model_without_images_refuses_them(tmp_path: Path) -> None:
    text = ChatTokenizer.from_folder(inspect(seeing.write_gemma(tmp_path, preprocessor=None)))
    result = perform(text, chat(0, files=FILES[:1]))
    assert isinstance(result, BadRequest)
    assert result.message.startswith("this model does not support image input")
