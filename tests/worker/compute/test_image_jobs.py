"""Tests the encoding of images between steps, with an engine that computes nothing."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from mlxpool.common.config.schema import Counting
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import Options
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import DeviceLost, Steps
from mlxpool.worker.engine.counting_engine import CountingEngine, piece, token_at
from mlxpool.worker.engine.engine import StepResult
from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import (
    ImageKey,
    MediaSpan,
    overlapping,
    readable_end,
    seen_images,
    slot_items,
)
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.scheduling.scheduler import StepLimits
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.speculation.speculator import Speculator
from support.drafting import ClockedSpeculator

SLOTS = 12  # inputs of an image
FEATURES = 100  # bytes of the features of an image


def small(items: Many[int]) -> list[int]:
    """Returns the items modulo 2**32, so that each fits an id in a blob of token ids."""
    return [item % 2**32 for item in items]


@dataclass(frozen=True, slots=True)
class Sized:
    nbytes: int = FEATURES


class SeeingEngine(CountingEngine):
    """The counting engine for prompts with images.

    `done`: the encoded images and the submitted passes, in the order of the calls.
    """

    def __init__(self, budget: int = 10 * FEATURES) -> None:
        super().__init__(Counting(step_us=0, prefill_us=0, joint=8), 1000)
        self.encoded = EncodedImages(budget)
        self.done: list[ImageKey | tuple[Span, ...]] = []
        self.broken: set[ImageKey] = set()
        self.works = True

    @property
    def limits(self) -> StepLimits:
        return replace(super().limits, lines=16)

    def clip(self, seq: Sequence, tokens: int) -> int:
        start = seq.submitted
        return readable_end(seq.media, start, start + tokens, self.encoded) - start

    def encode(self, image: PreparedImage, pinned: Collection[ImageKey]) -> None:
        if image.key in self.broken:
            raise MemoryError("no room for the image")
        self.done.append(image.key)
        self.encoded.put(image.key, Sized(), pinned)

    def submit(self, spans: Many[Span]) -> bool:
        for span in spans:
            for media_span in overlapping(span.sequence.media, span.start, span.end):
                assert media_span.image in self.encoded, "read before it was encoded"
                assert not media_span.group or (
                    span.start <= media_span.start and media_span.end <= span.end
                )
            for place in range(span.start, span.end):
                for media_span in seen_images(span.sequence.media, place):
                    assert media_span.image in self.encoded, "attended to before it was encoded"
        self.done.append(tuple(spans))
        return super().submit(spans)

    def _draw(self, row: Sequence) -> SampledToken:
        token = token_at(small(row.prompt), row.seed, len(row.ids), self.vocab_size)
        return SampledToken(row, token)

    def device_works(self) -> bool:
        return self.works

    @property
    def images(self) -> list[ImageKey]:
        """The encoded images, in order."""
        return [key for key in self.done if isinstance(key, bytes)]


class Run:
    """Runs sequences in steps on an engine."""

    def __init__(self, engine: SeeingEngine, speculator: Speculator | None = None) -> None:
        self.engine = engine
        self.generations = Generations(engine)
        self.progress = Progress(lambda: None)
        self.steps = Steps(engine, self.generations, self.progress, speculator)
        self.ids: dict[bytes, list[int]] = {}
        self.ends: dict[bytes, str] = {}

    def add(
        self, *parts: int | bytes, name: bytes, ids: int = 4, crossed: bool = False
    ) -> Sequence:
        """Admits a sequence; each part is a number of tokens, or the key of an image.

        With `crossed`, layers of cross-attention read the images.
        """
        slots = 1 if crossed else SLOTS
        items: list[int] = []
        spans, images = [], {}
        for part in parts:
            if isinstance(part, int):
                items += range(part)
                continue
            image = PreparedImage(part, np.zeros(3, np.float32), (1, 3, 4), slots)
            spans.append(MediaSpan(len(items), slots, part, image.grid, not crossed, crossed))
            images[part] = image
            items += slot_items(part, slots)
        seq = Sequence(name, 1, tuple(items), Options(), 5, ids, phase=Phase.WAITING)
        seq.media, seq.images = tuple(spans), images
        admit = Admit(seq, Facts(), Detokenizer(piece, ()), 0.0)
        self.generations.add(Generation.begin(admit, piece))
        self.steps.admit(seq)
        self.ids[name] = []
        return seq

    def step(self) -> None:
        self._take(self.steps.run())

    def finish(self) -> None:
        for _ in range(200):
            if not self.generations:
                return
            self.step()
        raise AssertionError("the sequences do not end")

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.ids[delta.id] += unpack_ids(delta.ids)
            if delta.end is not None:
                assert delta.id not in self.ends, "it ends twice"
                self.ends[delta.id] = str(delta.end.get("code") or delta.end.get("reason"))


A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def right(seq: Sequence) -> list[int]:
    return [token_at(small(seq.prompt), 5, index, 50_000) for index in range(seq.max_tokens)]


def test_each_image_is_encoded_when_its_prompt_comes_to_it() -> None:
    run = Run(SeeingEngine())
    seq = run.add(3, A, 2, B, 3, name=b"x")
    run.finish()
    assert run.ids[b"x"] == right(seq)
    kinds = [step if isinstance(step, bytes) else step[0].end for step in run.engine.done[:5]]
    assert kinds == [3, A, 17, B, 32]


def test_the_same_image_in_two_conversations_is_encoded_once() -> None:
    run = Run(SeeingEngine())
    seqs = [run.add(3, A, 2, name=b"x"), run.add(5, A, 4, name=b"y")]
    run.finish()
    assert run.engine.images == [A]
    assert [run.ids[seq.id] for seq in seqs] == [right(seq) for seq in seqs]


def test_streams_go_on_while_images_are_encoded() -> None:
    """If rows decode, a step encodes one image or reads prompts, not both."""
    run = Run(SeeingEngine())
    run.add(3, name=b"decodes", ids=40)
    run.step()
    run.add(A, B, 2, name=b"x")
    before = len(run.ids[b"decodes"])
    run.finish()
    assert len(run.ids[b"decodes"]) == 40 > before
    for place, step in enumerate(run.engine.done):
        if isinstance(step, bytes):
            spans = run.engine.done[place + 1]
            assert not isinstance(spans, bytes) and all(span.decodes for span in spans)


@pytest.mark.parametrize("budget", [1, FEATURES, 2 * FEATURES])
def test_sequences_with_more_images_than_there_is_room_for_all_end(budget: int) -> None:
    run = Run(SeeingEngine(budget))
    keys = [bytes([number]) * 32 for number in range(6)]
    seqs = [run.add(2, *keys[at:], *keys[:at], 2, name=bytes([65 + at])) for at in range(4)]
    run.finish()
    assert [run.ids[seq.id] for seq in seqs] == [right(seq) for seq in seqs]
    assert run.engine.encoded.nbytes <= max(budget, FEATURES) + FEATURES


def test_an_image_that_fails_ends_its_own_request_alone() -> None:
    run = Run(SeeingEngine())
    run.engine.broken.add(B)
    well = run.add(2, A, 2, name=b"well")
    run.add(2, B, 2, name=b"ill")
    run.finish()
    assert run.ends == {b"well": "length", b"ill": "out_of_memory"}
    assert run.ids[b"well"] == right(well)


def test_a_lost_device_is_charged_to_the_request_of_the_image() -> None:
    run = Run(SeeingEngine())
    run.engine.broken.add(B)
    run.engine.works = False
    run.add(B, 2, name=b"ill")
    with pytest.raises(DeviceLost) as raised:
        run.finish()
    assert raised.value.request == b"ill"


def test_a_sequence_that_lost_its_row_reads_its_image_again_without_encoding_it() -> None:
    run = Run(SeeingEngine())
    seq = run.add(3, A, 2, name=b"x")
    for _ in range(3):
        run.step()
    run.generations.release(seq)
    seq.preempt()
    run.steps.admit(seq)
    run.finish()
    assert run.engine.images == [A]
    assert run.ids[b"x"] == right(seq)


def crossed(run: Run, *parts: int | bytes, name: bytes, ids: int = 4) -> Sequence:
    return run.add(*parts, name=name, ids=ids, crossed=True)


def test_a_stream_keeps_the_images_that_it_attends_to() -> None:
    """Other images must not evict image A, to which the stream attends until its end."""
    run = Run(SeeingEngine(FEATURES))
    seq = crossed(run, 2, A, 2, name=b"x", ids=30)
    for _ in range(3):
        run.step()
    others = [crossed(run, 2, key, 2, name=key[:1]) for key in (B, C)]
    run.finish()
    assert run.engine.images == [A, B, C]
    assert [run.ids[sequence.id] for sequence in (seq, *others)] == [*map(right, (seq, *others))]


@pytest.mark.parametrize("budget", [2 * FEATURES + 1, 3 * FEATURES, 5 * FEATURES])
def test_crossed_images_side_by_side_in_two_sequences_do_not_wait_for_each_other(
    budget: int,
) -> None:
    """Each sequence needs three images at once; the images of two sequences exceed the budget.

    `budget` is the size of the image cache in bytes.
    """
    run = Run(SeeingEngine(budget))
    keys = [bytes([number]) * 32 for number in range(6)]
    seqs = [crossed(run, 2, *keys[at : at + 3], 2, name=bytes([65 + at])) for at in range(4)]
    run.finish()
    assert [run.ids[seq.id] for seq in seqs] == [right(seq) for seq in seqs]
    assert run.engine.encoded.nbytes <= budget + FEATURES


@pytest.mark.parametrize("budget", [1, FEATURES, 2 * FEATURES])
def test_more_crossed_images_side_by_side_than_may_be_kept_end_their_request_alone(
    budget: int,
) -> None:
    run = Run(SeeingEngine(budget))
    well = crossed(run, 2, A, 2, name=b"well", ids=20)
    keys = [bytes([number]) * 32 for number in range(3)]
    crossed(run, 2, *keys, 2, name=b"ill")
    run.finish()
    assert run.ends == {b"well": "length", b"ill": "too_large"}
    assert run.ids[b"well"] == right(well)
    assert run.engine.encoded.nbytes <= budget + FEATURES


def test_features_of_a_later_stream_make_room_for_an_earlier_one() -> None:
    """The later stream waits until its image is encoded again, and gives the same tokens."""
    run = Run(SeeingEngine(FEATURES))
    first = crossed(run, 30, A, 2, name=b"first", ids=30)
    second = crossed(run, B, 1, name=b"second", ids=40)
    run.finish()
    assert [run.ids[sequence.id] for sequence in (first, second)] == [right(first), right(second)]
    assert run.engine.images == [B, A, B]


def test_a_sequence_that_lost_its_row_encodes_what_it_attends_to_again() -> None:
    run = Run(SeeingEngine())
    seq = crossed(run, 3, A, 2, name=b"x")
    for _ in range(3):
        run.step()
    run.generations.release(seq)
    seq.preempt()
    run.engine.encoded.clear()
    run.steps.admit(seq)
    seq.submitted = seq.length - 1  # a prefix cache had all but the last input
    run.finish()
    assert run.engine.images == [A, A]
    assert run.ids[b"x"] == right(seq)


class SlowEngine(SeeingEngine):
    """An engine whose steps take 0.01 s and whose images take 5 s, on a speculator's clock."""

    speculator: ClockedSpeculator

    def submit(self, spans: Many[Span]) -> bool:
        self.speculator.now += 0.01
        return super().submit(spans)

    def encode(self, image: PreparedImage, pinned: Collection[ImageKey]) -> None:
        self.speculator.now += 5.0
        super().encode(image, pinned)


def test_the_time_of_an_image_is_not_that_of_a_step() -> None:
    """The measured times of steps without drafts exclude the time to encode images."""
    engine = SlowEngine()
    engine.speculator = ClockedSpeculator()
    run = Run(engine, engine.speculator)
    run.add(3, name=b"decodes", ids=40)
    for _ in range(5):
        run.step()
    run.add(2, A, 2, B, 2, name=b"x")
    run.finish()
    assert engine.images == [A, B] and len(engine.speculator.seconds) >= 30
    assert max(engine.speculator.seconds) == pytest.approx(0.01)


class AheadEngine(SeeingEngine):
    """An engine that submits a step ahead, and records the progress during each image and step."""

    damaged = b""
    progress: Progress

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[tuple[str, str, int]] = []

    @property
    def limits(self) -> StepLimits:
        return replace(super().limits, ahead=1)

    def _look(self, call: str) -> None:
        look = self.progress.block.read()
        self.looks.append((call, look.phase, look.tokens))

    def encode(self, image: PreparedImage, pinned: Collection[ImageKey]) -> None:
        self._look("encode")
        if image.key == self.damaged:
            raise BadRequest("the image is damaged")
        super().encode(image, pinned)

    def collect(self) -> StepResult:
        self._look("collect")
        return super().collect()


@pytest.mark.parametrize("damaged", [b"", A])
def test_the_step_in_flight_is_awaited_again_behind_an_image(damaged: bytes) -> None:
    """While the image is encoded, the step in flight is not shown as progress.

    Its measured time excludes the image's time, even if the encoding fails.
    """
    engine = AheadEngine()
    engine.damaged = damaged
    run = Run(engine)
    engine.progress = run.progress
    run.add(3, name=b"decodes", ids=40)
    for _ in range(5):
        run.step()
    assert run.steps.in_flight == 1
    run.add(A, 2, name=b"x")
    usual = engine.progress.block.read().usual_step_ns
    engine.looks.clear()
    run.step()
    assert engine.looks == [("encode", "prefill", SLOTS), ("collect", "decode", 0)]
    assert engine.progress.block.read().usual_step_ns == usual
    run.finish()
    assert run.ends[b"x"] == ("bad_request" if damaged else "length")
