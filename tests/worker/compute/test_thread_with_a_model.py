"""Tests the compute thread with real weights: preemptions, races, failed steps and odd sizes."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.messages import StepDeltas, Unusable
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.spans import Span
from support.compute_harness import ComputeHarness, end_of, ids_of
from support.pool import PATIENCE, until
from support.worker_checkpoints import write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_slabs.slab_layout import SlabLayout  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.engine.settings import EngineSettings  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.sampling import sampler  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402
from support.model_sources import source_of  # noqa: E402

GREEDY = {"temperature": 0.0, "ignore_eos": True}
OPTIONS: list[dict[str, Any]] = [GREEDY, {"temperature": 0.8, "ignore_eos": True}]
TIE = 1e-4  # a log-probability margin of the two best tokens within rounding
on_cpu = pytest.mark.skipif(device.on_gpu(), reason="a GPU refuses `deterministic`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def prompt_of(size: int, salt: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng([size, salt]).integers(0, 256, size).tolist()
    return ids


def admit(harness: ComputeHarness, name: int, size: int, count: int, **options: Any) -> None:
    chosen = {**OPTIONS[name % 2], "logprobs": True, "top_logprobs": 2, **options}
    harness.admit(name, prompt_of(size, name), count, **chosen)


def test_at_debug_each_admission_is_logged_with_what_the_prefix_cache_had(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "mlxpool.worker"):
        harness = ComputeHarness(source=source_of(folder)).ready()
        for name in (1, 2):
            harness.admit(name, prompt_of(300), 4, ignore_eos=True)
            harness.until_ended({name})
    records = [record for record in caplog.records if record.message.startswith("prefix ")]
    assert [record.message for record in records] == ["prefix miss", "prefix hit"]
    shown = [
        {key: getattr(record, key) for key in ("reason", "cached", "left")} for record in records
    ]
    assert shown == [
        {"reason": "nothing is cached", "cached": 0, "left": 300},
        {"reason": "all but the last token is cached", "cached": 299, "left": 1},
    ]
    first, second = (record.__dict__ for record in records)
    assert first["kv_tokens"] == 0 and second["kv_tokens"] == 299 < second["kv_bytes"]
    assert first["id"] != second["id"] and len(first["id"]) == 32


def test_at_info_no_admission_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mlxpool.worker"):
        harness = ComputeHarness(source=source_of(folder)).ready()
        harness.admit(1, prompt_of(300), 1)
        harness.until_ended({1})
    assert not [record for record in caplog.records if record.message.startswith("prefix ")]


SIZES = {0: (255, 262), 1: (250, 266), 2: (254, 264)}  # three blocks each, the last begun late


@pytest.fixture(scope="module")
def answers_alone(folder: Path) -> Callable[[bool], dict[int, list[Delta]]]:
    """Returns a function from the setting `deterministic` to the answers of the requests in SIZES.

    Each request runs alone. The answers are lists of deltas, by the number of the request.
    """

    @functools.cache
    def found(deterministic: bool) -> dict[int, list[Delta]]:
        harness = ComputeHarness(source=source_of(folder, deterministic=deterministic)).ready()
        alone = {}
        for name, (size, count) in SIZES.items():
            admit(harness, name, size, count)
            alone[name] = harness.until_ended({name})[name]
        return alone

    return found


@pytest.mark.parametrize(
    ("deterministic", "prefix", "lookahead"),
    [
        pytest.param(True, "tree", False, marks=on_cpu),
        pytest.param(True, "off", False, marks=on_cpu),
        pytest.param(True, "tree", True, marks=on_cpu),
        pytest.param(True, "off", True, marks=on_cpu),
        (False, "tree", False),
        (False, "tree", True),
    ],
)
def test_preemption_does_not_change_tokens(
    folder: Path,
    answers_alone: Callable[[bool], dict[int, list[Delta]]],
    deterministic: bool,
    prefix: str,
    lookahead: bool,
) -> None:
    expected = answers_alone(deterministic)
    tight = source_of(
        folder, deterministic=deterministic, blocks=6, prefix=prefix, lookahead=lookahead
    )
    harness = ComputeHarness(source=tight).ready()
    for name, (size, count) in SIZES.items():
        admit(harness, name, size, count)
    streams = harness.until_ended(set(SIZES))
    assert harness.progress.preemptions >= 1
    for name, (_, count) in SIZES.items():
        assert end_of(streams[name])["usage"]["completion_tokens"] == count
        if deterministic:
            assert ids_of(streams[name]) == ids_of(expected[name])
        elif name % 2 == 0:  # greedy
            same_but_for_ties(streams[name], expected[name])


def same_but_for_ties(found: list[Any], wanted: list[Any]) -> None:
    for delta, other in zip(found, wanted, strict=True):
        if delta.ids != other.ids:
            first, second = other.logprobs[0]["top"]
            assert first["logprob"] - second["logprob"] < TIE
            return


class Failing(ModelEngine):
    """An engine whose allocations fail at `place`, in a step with sequence 2."""

    place = ""
    hit = False

    def submit(self, spans: Many[Span]) -> bool:
        type(self).hit = any(span.sequence.id[:1] == b"\2" for span in spans)
        return super().submit(spans)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Failing]:
    """An engine for which MLX raises at the evaluation or during the build of a step."""
    evaluate, draw = mx.eval, sampler.sample_batch

    def fail_at(place: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if Failing.hit and Failing.place == place:
                Failing.hit = False
                raise RuntimeError("[malloc] Unable to allocate 123 bytes.")
            return otherwise(*arguments, **options)

        return call

    monkeypatch.setattr(mx, "eval", fail_at("eval", evaluate))
    monkeypatch.setattr(sampler, "sample_batch", fail_at("build", draw))
    return Failing


@pytest.mark.parametrize("place", ["eval", "build"])
@pytest.mark.parametrize("size", [1, 100])  # 1 fails in decode, 100 in prefill
def test_a_failed_allocation_ends_the_requests_it_hit(
    folder: Path, failing: type[Failing], place: str, size: int
) -> None:
    harness = ComputeHarness(source=source_of(folder, failing)).ready()
    admit(harness, 4, 50, 40)
    expected = ids_of(harness.until_ended({4})[4])
    failing.place = place
    harness.admit(2, prompt_of(size), 500, **GREEDY)
    error = end_of(harness.until_ended({2})[2])
    assert error["code"] == "out_of_memory" and "Unable to allocate 123" in error["message"]
    admit(harness, 4, 50, 40)
    assert ids_of(harness.until_ended({4})[4]) == expected


@pytest.mark.parametrize("spoiled", ["raises", "is wrong"])
def test_a_device_works_while_it_computes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoiled: str
) -> None:
    loaded = load(inspect(folder), deterministic=False)
    engine = model_engine(loaded, ChatTokenizer.from_folder(loaded.folder), blocks=40)
    assert engine.device_works()

    def numbers(count: int) -> Any:
        if spoiled == "raises":
            raise RuntimeError("an illegal memory access was encountered")
        return mx.zeros(count)

    monkeypatch.setattr(mx, "arange", numbers)
    assert not engine.device_works()


def test_a_device_out_of_memory_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(count: int) -> Any:
        raise RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory")

    monkeypatch.setattr(mx, "arange", full)
    assert device.device_computes()


@pytest.mark.parametrize("place", ["eval", "build"])
@pytest.mark.parametrize("size", [1, 100])  # 1 fails in decode, 100 in prefill
def test_a_lost_device_ends_the_worker_and_no_request(
    folder: Path,
    failing: type[Failing],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    size: int,
) -> None:
    harness = ComputeHarness(source=source_of(folder, failing)).ready()
    monkeypatch.setattr(device, "device_computes", lambda: False)
    failing.place = place
    harness.admit(2, prompt_of(size), 500, **GREEDY)
    while isinstance(mail := harness.mail.get(timeout=PATIENCE), StepDeltas):
        assert all(delta.end is None for delta in mail.deltas)
    assert isinstance(mail, Unusable)
    assert "the device is lost: RuntimeError: [malloc]" in mail.error.message


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("prefix", ["tree", "single", "off"])
@pytest.mark.parametrize(
    ("context", "size", "count"),
    [
        (16, 1, 15),
        (16, 15, 1),
        (None, 1, 1),
        (None, KV_BLOCK_TOKENS - 1, 1),
        (None, KV_BLOCK_TOKENS, KV_BLOCK_TOKENS),
        (None, 2 * KV_BLOCK_TOKENS, 1),
        (None, 2047, 1),
        (600, 500, 100),
    ],
)
def test_sizes_that_just_fit(
    folder: Path, context: int | None, size: int, count: int, prefix: str, lookahead: bool
) -> None:
    settings: dict[str, Any] = {"context": context, "prefix": prefix, "lookahead": lookahead}
    harness = ComputeHarness(source=source_of(folder, blocks=9, **settings)).ready()
    for _ in range(2):
        admit(harness, 2, size, count)
        deltas = harness.until_ended({2})[2]
        assert end_of(deltas)["reason"] == "length" and len(ids_of(deltas)) == count
    assert harness.progress.preemptions == 0


class Growing(ModelEngine):
    """An engine whose number of blocks falls from CAPACITY to LEFT once a row has GROWN tokens.

    The simulated cause is memory that the process uses outside of MLX.
    """

    CAPACITY, LEFT, GROWN = 7, 2, 3 * KV_BLOCK_TOKENS
    outside = 0  # simulated bytes of the process outside of MLX

    def __init__(self, loaded: Any, text: Any, settings: EngineSettings, **parts: Any) -> None:
        settings = replace(settings, blocks=None, limit=2**30, layout="slabs")
        super().__init__(loaded, text, settings, **parts)
        self._grow_to(self.CAPACITY)
        self._settled = self.outside

    def _grow_to(self, blocks: int) -> None:
        self.memory()
        more = self.blocks.capacity - blocks
        type(self).outside += more * self.inspect().budget.block
        self.memory()
        assert self.blocks.capacity == blocks

    def submit(self, spans: Many[Span]) -> bool:
        if self.blocks.capacity > self.LEFT and any(
            span.decodes and span.sequence.length >= self.GROWN for span in spans
        ):
            self._grow_to(self.LEFT)
        return super().submit(spans)


@pytest.mark.parametrize("prefix", ["tree", "off"])
def test_running_rows_keep_their_promised_blocks_when_capacity_shrinks(
    folder: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growing, "outside", 0)
    monkeypatch.setattr(device, "non_mlx_bytes", lambda: Growing.outside)
    harness = ComputeHarness(source=source_of(folder, Growing, blocks=None, prefix=prefix)).ready()
    sizes = {
        0: (3 * KV_BLOCK_TOKENS - 10, KV_BLOCK_TOKENS + 30),
        1: (2 * KV_BLOCK_TOKENS - 5, KV_BLOCK_TOKENS + 30),
    }
    for name, (size, count) in sizes.items():
        admit(harness, name, size, count)
    streams = harness.until_ended(set(sizes))
    for name, (_, count) in sizes.items():
        assert end_of(streams[name])["reason"] == "length", end_of(streams[name])
        assert len(ids_of(streams[name])) == count
    assert harness.progress.preemptions >= 1
    assert harness.progress.capacity_tokens == Growing.LEFT * KV_BLOCK_TOKENS
    admit(harness, 3, 2 * KV_BLOCK_TOKENS, 2 * KV_BLOCK_TOKENS)
    error = end_of(harness.until_ended({3})[3])
    assert error["details"]["capacity_tokens"] == Growing.LEFT * KV_BLOCK_TOKENS


class Books(ModelEngine):
    """A ModelEngine class that keeps its newest instance in `last`, for checks of its memory."""

    last: Books

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        type(self).last = self


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("prefix", ["tree", "single", "off"])
def test_many_cancels_deadlines_and_prefix_hits_in_little_memory(
    folder: Path, prefix: str, lookahead: bool
) -> None:
    draw, blocks = random.Random(prefix), 4
    source = source_of(folder, Books, blocks=blocks, prefix=prefix, lookahead=lookahead)
    harness = ComputeHarness(source=source, sequences=5).ready()
    whole = prompt_of(700)
    for name in range(1, 61):
        size, count = draw.choice([1, 20, 255, 256, 300, 600]), draw.choice([1, 3, 20])
        count = 258 if name % 20 == 0 else count
        left = draw.choice([1e9] * 5 + [0.0, 0.05])
        harness.admit(name, whole[:size], count, left, **draw.choice(OPTIONS))
        if draw.random() < 0.3:
            harness.drop(draw.choice([name, max(1, name - 3)]))
    streams = harness.until_ended(set(range(1, 61)))
    for deltas in streams.values():
        end = end_of(deltas)
        assert end.get("reason") in ("length", "cancelled") or end["code"] == "deadline_exceeded"
    until(lambda: harness.progress.phase == "idle", "it is idle")
    engine = Books.last
    assert not engine.inspect().rows and engine.memory().kv == 0
    assert engine.memory().prefix <= blocks * engine.inspect().budget.block
    if prefix != "single":
        layout = engine.inspect().layout
        assert not isinstance(layout, SlabLayout) or layout.slabs.nbytes == 0
