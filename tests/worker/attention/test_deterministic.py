"""With `deterministic` no bit of an answer depends on batch, chunks or preemptions.

Without it, greedy tokens may differ, but only at near-ties.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.weights.locate import DEMO_FOLDER as DEMO
from support.engine_steps import decode, enter
from support.worker_checkpoints import write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.layers.linear import TILE_ROWS, Linear, tiled_matmul  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

ON_GPU = mx.default_device().type == mx.DeviceType.gpu
TIE = 0.1 if ON_GPU else 1e-4  # a margin that rounding can close, in bfloat16 and in float32
on_cpu = pytest.mark.skipif(ON_GPU, reason="a GPU refuses `deterministic`")
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 0, "min_p": 0.05},
    {"temperature": 0.7, "repeat_penalty": 1.5, "repeat_last_n": 9},
    {"temperature": 0.0, "presence_penalty": 0.4},
]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        hidden_size=64,
        intermediate_size=80,
        head_dim=16,
        max_position_embeddings=1024,
    )
    return load(inspect(folder), deterministic=True)


def prompt_of(size: int, salt: int = 0, vocab: int = 264) -> tuple[int, ...]:
    return tuple(np.random.default_rng([size, salt]).integers(0, vocab, size).tolist())


def request(number: int, count: int = 24) -> Sequence:
    size = (3, 255, 300, 40, 600)[number % 5]
    options = Options.parse({**OPTIONS[number % 5], "logprobs": True, "top_logprobs": 2})
    return Sequence(b"", 1, prompt_of(size, number), options, number, count)


def alone(loaded: LoadedModel, seq: Sequence) -> list[SampledToken]:
    """Returns all tokens with log-probabilities from an engine without other requests."""
    engine = model_engine(loaded, prefix="off")
    enter(engine, seq)
    return [decode(engine, [seq])[0] for _ in range(seq.max_tokens)]


def values(drawn: list[SampledToken]) -> list[tuple[int, Any]]:
    return [(sampled.token, sampled.logprob) for sampled in drawn]


@on_cpu
def test_a_tiled_product_does_not_depend_on_the_number_of_rows() -> None:
    draw = np.random.default_rng(0)
    for out, size in ((64, 256), (32, 32), (264, 32), (320, 256)):
        weight = mx.array(draw.standard_normal((out, size), dtype=np.float32))
        bias = mx.array(draw.standard_normal(out, dtype=np.float32))
        x = mx.array(draw.standard_normal((300, size), dtype=np.float32))
        whole = tiled_matmul(x, weight)
        assert mx.allclose(whole, x @ weight.T, rtol=1e-3, atol=1e-3).item()
        assert mx.array_equal(Linear(weight, bias, batch_invariant=True)(x), whole + bias).item()
        for start, count in ((0, 1), (7, 1), (3, TILE_ROWS), (5, 9), (100, 150), (0, 299)):
            part = tiled_matmul(x[start : start + count], weight)
            assert mx.array_equal(part, whole[start : start + count]).item()


@on_cpu
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_the_chunk_size_changes_no_bit(exact: LoadedModel, number: int, chunk: int) -> None:
    expected, seq = alone(exact, request(number, 6)), request(number, 6)
    engine = model_engine(exact, prefix="off")
    enter(engine, seq, chunk)
    assert values([decode(engine, [seq])[0] for _ in range(6)]) == values(expected)


@on_cpu
def test_other_rows_of_a_batch_change_no_bit(exact: LoadedModel) -> None:
    expected = [values(alone(exact, request(number))) for number in range(8)]
    engine, rows = model_engine(exact, prefix="off"), [request(number) for number in range(8)]
    got: list[list[SampledToken]] = [[] for _ in rows]
    for turn in range(100):
        if turn < 16 and turn % 2 == 0:
            enter(engine, rows[turn // 2], 100)
        running = [seq for seq in rows[: turn // 2 + 1] if len(seq.ids) < seq.max_tokens]
        for sampled in decode(engine, running[turn % 3 :] or running):
            got[rows.index(sampled.sequence)].append(sampled)
        if not running:
            break
    assert [values(drawn) for drawn in got] == expected


@on_cpu
@pytest.mark.parametrize("prefix", ["tree", "off"])
def test_a_preemption_changes_no_bit(exact: LoadedModel, prefix: str) -> None:
    for number in range(5):
        expected, seq = values(alone(exact, request(number))), request(number)
        engine, got = model_engine(exact, prefix=prefix), []
        for steps in (1, 10, 13):
            enter(engine, seq, 50)
            got += [decode(engine, [seq])[0] for _ in range(steps)]
            engine.release(seq)
            seq.preempt()
        assert values(got) == expected


@on_cpu
@pytest.mark.parametrize("taken", [1, 5, 23])
def test_a_resume_changes_no_bit(exact: LoadedModel, taken: int) -> None:
    for number in range(5):
        expected, seq = alone(exact, request(number)), request(number)
        seq.ids += [sampled.token for sampled in expected[:taken]]
        engine = model_engine(exact)
        enter(engine, seq)
        got = [decode(engine, [seq])[0] for _ in range(24 - taken)]
        assert values(got) == values(expected[taken:])


@on_cpu
@pytest.mark.parametrize("split", [1, 100, 255, 256, 257, 511, 599])
def test_a_prefix_hit_of_any_length_changes_no_bit(exact: LoadedModel, split: int) -> None:
    expected, seq = values(alone(exact, request(4))), request(4)
    engine = model_engine(exact)
    before = Sequence(b"", 1, (*seq.prompt[:split], 1, 2, 3), Options(temperature=0.0), 0, 3)
    enter(engine, before, 90)
    decode(engine, [before])
    engine.release(before)
    enter(engine, seq)
    assert split <= seq.cached <= split + 2
    assert values([decode(engine, [seq])[0] for _ in range(24)]) == expected


def first_difference(one: list[SampledToken], other: list[SampledToken]) -> int | None:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a.token != b.token), None
    )


def test_without_the_setting_greedy_tokens_differ_at_near_ties_only() -> None:
    loaded = load(inspect(DEMO))
    options = Options.parse({"temperature": 0, "logprobs": True, "top_logprobs": 2})

    def requests() -> list[Sequence]:
        sizes = (1, 30, 100, 255, 256, 500, 700, 900)
        return [Sequence(b"", 1, prompt_of(n, 0, 4096), options, 0, 40) for n in sizes]

    expected = [alone(loaded, seq) for seq in requests()]
    engine, rows = model_engine(loaded, prefix="off"), requests()
    for seq in rows:
        enter(engine, seq, 200)
    steps = [decode(engine, rows) for _ in range(40)]
    for line, wanted in enumerate(expected):
        got = [drawn[line] for drawn in steps]
        at = first_difference(got, wanted)
        for sampled, other in zip(got[:at], wanted[:at], strict=True):
            assert sampled.logprob is not None and other.logprob is not None
            assert sampled.logprob.logprob == pytest.approx(other.logprob.logprob, abs=TIE)
        if at is not None:
            assert margin(wanted[at]) < TIE


def margin(drawn: SampledToken) -> float:
    assert drawn.logprob is not None
    (_, best), (_, second) = drawn.logprob.top
    return best - second
