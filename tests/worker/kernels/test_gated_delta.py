"""Compares the kernel of gated delta nets over token spans with float64 and MLX's operations."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels.kernel_cache import KernelText  # noqa: E402
from mlxpool.worker.kernels.recurrent import gated_delta  # noqa: E402
from mlxpool.worker.kernels.recurrent.gated_delta import (  # noqa: E402
    MAX_WHOLE_SIZE,
    DeltaNetShape,
    DeltaNetWeights,
    block_of,
    refusal,
)
from mlxpool.worker.kernels.recurrent.span_states import (  # noqa: E402
    MAX_SOURCES,
    NO_SOURCE,
    SpanStates,
    StateSlice,
)
from mlxpool.worker.layers import delta_rule  # noqa: E402
from support import simt  # noqa: E402
from support.cubin import needs_of  # noqa: E402

ON_GPU = mx.cuda.is_available()
SMALL = DeltaNetShape(key_heads=1, heads=2, key_dim=32, value_dim=32, width=4, eps=1e-6)
APART = DeltaNetShape(key_heads=2, heads=2, key_dim=64, value_dim=96, width=3, eps=1e-5)
REAL = DeltaNetShape(key_heads=16, heads=16, key_dim=128, value_dim=128, width=4, eps=1e-6)
LARGEST = DeltaNetShape(key_heads=2, heads=6, key_dim=256, value_dim=256, width=4, eps=1e-6)
runs = pytest.mark.usefixtures("machine")


@dataclass(frozen=True, slots=True)
class TestSpan:
    """A span of `count` tokens that begins with a stored state or, by default, with zeros.

    The state is number `index` of array `source`. `every`: the kernel stores the state after each
    token.
    """

    __test__ = False

    count: int
    source: int = NO_SOURCE
    index: int = 0
    every: bool = False


def weights_of(shape: DeltaNetShape) -> DeltaNetWeights:
    draw = np.random.default_rng(1)

    def normal(*size: int) -> Any:
        return mx.array(draw.standard_normal(size).astype(np.float32))

    conv = normal(shape.width, shape.channels) / shape.width**0.5
    return DeltaNetWeights(
        conv, normal(shape.heads), normal(shape.heads), normal(shape.value_dim) / 4 + 1
    )


def lines_of(shape: DeltaNetShape, count: int, dtype: Any, seed: int = 0) -> Any:
    numbers = np.random.default_rng([seed, count]).standard_normal((count, shape.line))
    return mx.array(numbers.astype(np.float32)).astype(dtype)


def held_of(shape: DeltaNetShape, *counts: int) -> tuple[Any, ...]:
    draw = np.random.default_rng(counts)
    return tuple(
        mx.array(draw.standard_normal((count, shape.state)).astype(np.float32) / 4)
        for count in counts
    )


def computed(
    shape: DeltaNetShape, lines: Any, held: tuple[Any, ...], spans: list[TestSpan]
) -> tuple[Any, Any]:
    """Returns the kernel's outputs and states as NumPy arrays."""
    first = written = 0
    plan = []
    for span in spans:
        plan.append((first, span.count, span.source, span.index, written, int(span.every)))
        first += span.count
        written += span.count if span.every else 1
    longest = max(span.count for span in spans)
    states = SpanStates(held, mx.array(plan, dtype=mx.int32), longest, written)
    out, after = gated_delta.delta_net(shape, lines, states, weights_of(shape))
    assert out.dtype == lines.dtype and after.dtype == mx.float32
    return np.array(out.astype(mx.float32)), np.array(after)


def exact(shape: DeltaNetShape, lines: Any, state: Any) -> tuple[Any, list[Any]]:
    """Returns the outputs, and the state after each token, in float64."""
    conv, log_speed, bias, gain = (np.array(x, dtype=np.float64) for x in weights_of(shape))
    keys, heads = shape.key_heads * shape.key_dim, shape.heads
    taps, gates = (shape.width - 1) * shape.channels, shape.channels + heads * shape.value_dim
    before = state[:taps].reshape(-1, shape.channels)
    matrix = state[taps:].reshape(heads, shape.key_dim, shape.value_dim)
    outs, states = [], []
    for line in np.array(lines.astype(mx.float32), dtype=np.float64):
        before = np.concatenate([before, line[None, : shape.channels]])
        mixed = (before * conv).sum(0)
        before = before[1:]
        mixed /= 1 + np.exp(-mixed)
        q, k = (
            np.repeat(
                x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), heads // shape.key_heads, 0
            )
            for x in mixed[: 2 * keys].reshape(2, shape.key_heads, shape.key_dim)
        )
        v = mixed[2 * keys :].reshape(heads, shape.value_dim)
        rate = 1 / (1 + np.exp(-line[gates : gates + heads]))
        decay = np.exp(-np.exp(log_speed) * np.logaddexp(line[gates + heads :] + bias, 0))
        matrix = decay[:, None, None] * matrix
        delta = rate[:, None] * (v - np.einsum("hk,hkv->hv", k, matrix))
        matrix = matrix + k[:, :, None] * delta[:, None]
        read = np.einsum("hk,hkv->hv", q, matrix) * shape.key_dim**-0.5
        normed = read / np.sqrt((read * read).mean(-1, keepdims=True) + shape.eps) * gain
        z = line[shape.channels : gates].reshape(heads, -1)
        outs.append((normed * z / (1 + np.exp(-z))).reshape(-1))
        states.append(np.concatenate([before.reshape(-1), matrix.reshape(-1)]))
    return np.array(outs), states


def assert_exact(
    shape: DeltaNetShape, lines: Any, held: tuple[Any, ...], spans: list[TestSpan], within: float
) -> None:
    """Compares the kernel with float64.

    `within`: the largest allowed error, divided by the largest output.
    """
    out, after = computed(shape, lines, held, spans)
    first = written = 0
    for span in spans:
        state = np.zeros(shape.state)
        if span.source != NO_SOURCE:
            state = np.array(held[span.source][span.index], dtype=np.float64)
        end = first + span.count
        wanted, states = exact(shape, lines[first:end], state)
        assert np.abs(out[first:end] - wanted).max() < within * np.abs(wanted).max()
        taps = (shape.width - 1) * shape.channels
        for expected in states if span.every else states[-1:]:
            assert np.array_equal(after[written][:taps], expected[:taps].astype(np.float32))
            error = np.abs(after[written] - expected)[taps:].max()
            assert error < 1e-5 * np.abs(expected[taps:]).max()
            written += 1
        first = end
    assert (first, written) == (len(out), len(after))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[TestSpan], list[int]]:
    """Draws spans of up to 40 tokens, and the number of states in each array of stored states."""
    held = draw(st.lists(st.integers(1, 3), max_size=MAX_SOURCES))
    places = [(NO_SOURCE, 0)]
    places += [(source, index) for source, count in enumerate(held) for index in range(count)]
    counts = draw(st.lists(st.integers(1, 5) | st.integers(6, 40), min_size=1, max_size=5))
    spans = [
        TestSpan(count, *draw(st.sampled_from(places)), every=count <= 5 and draw(st.booleans()))
        for count in counts
    ]
    return spans, held


def test_any_batch_of_spans_equals_float64() -> None:
    @settings(max_examples=40)
    @given(batches())
    def check(batch: tuple[list[TestSpan], list[int]]) -> None:
        spans, held = batch
        lines = lines_of(SMALL, sum(span.count for span in spans), mx.float32)
        assert_exact(SMALL, lines, held_of(SMALL, *held), spans, 2e-5)

    if ON_GPU:
        check()
    else:
        with simt.simulated() as called:
            check()
            assert called == {"gated_delta", "gated_norm"}


MORE = [
    (LARGEST, "bfloat16"),
    (REAL, "bfloat16"),
    (REAL, "float16"),
    (replace(REAL, heads=32, key_dim=96, width=1), "float32"),
    (replace(REAL, heads=32, value_dim=256, width=8), "bfloat16"),
]


@runs
@pytest.mark.parametrize(
    ("shape", "dtype"), [(APART, "bfloat16"), *(MORE if ON_GPU else [])], ids=str
)
def test_shapes_and_dtypes_equal_float64(shape: DeltaNetShape, dtype: str) -> None:
    kind = getattr(mx, dtype)
    within = 2e-5 if dtype == "float32" else 8e-3
    held = held_of(shape, 3, 1)
    for spans in (
        [TestSpan(1, 0, 2), TestSpan(1), TestSpan(3, 1, 0, every=True)],
        [TestSpan(1, 0, 0), TestSpan(21, 0, 1), TestSpan(2, every=True)],
    ):
        lines = lines_of(shape, sum(span.count for span in spans), kind)
        assert_exact(shape, lines, held, spans, within)


@runs
def test_mlx_operations_and_the_kernel_agree() -> None:
    """The trial at load compares the kernel with MLX's operations.

    It accepts our kernel, and rejects a kernel with a wrong state.
    """
    assert delta_rule.kernel_serves(SMALL, mx.float32)
    right = gated_delta.delta_net
    with pytest.MonkeyPatch.context() as patch:

        def wrong(*given: Any) -> tuple[Any, Any]:
            out, after = right(*given)
            return out, after.at[-1, -1].add(after.max())

        patch.setattr(gated_delta, "delta_net", wrong)
        delta_rule.kernel_serves.cache_clear()
        assert not delta_rule.kernel_serves(SMALL, mx.float32)
    delta_rule.kernel_serves.cache_clear()


@runs
def test_parts_of_a_chunk_give_the_bits_of_the_whole() -> None:
    """The bits depend neither on the division of a sequence into passes nor on other spans."""
    count, draw = 37, random.Random(1)
    lines = lines_of(SMALL, count, mx.float32)
    held = held_of(SMALL, 1)
    whole, state = computed(SMALL, lines, held, [TestSpan(count, 0)])
    cuts = [[n] for n in range(1, count)]
    cuts += [sorted(draw.sample(range(1, count), k)) for k in (2, 5, 12)]
    cuts += [list(range(1, count))]  # token by token
    for cut in cuts:
        now: tuple[Any, ...] = held
        outs = []
        for begin, end in itertools.pairwise([0, *cut, count]):
            beside = draw.choice([0, 1, 7])
            spans = [TestSpan(end - begin, 0)] + [TestSpan(beside)] * bool(beside)
            some = mx.concatenate([lines[begin:end], lines_of(SMALL, beside, mx.float32, seed=1)])
            out, after = computed(SMALL, some, now, spans)
            outs.append(out[: end - begin])
            now = (mx.array(after[:1]),)
        assert np.array_equal(np.concatenate(outs), whole), cut
        assert np.array_equal(np.array(now[0]), state), cut


@runs
def test_the_states_of_a_check_are_those_of_its_tokens_one_by_one() -> None:
    for count in (2, 4, 5):  # with a thread block for a whole head, and without
        lines = lines_of(SMALL, count, mx.float32)
        held = held_of(SMALL, 2)
        out, states = computed(SMALL, lines, held, [TestSpan(count, 0, 1, every=True)])
        now, place = held, 1
        for n in range(count):
            output, after = computed(SMALL, lines[n : n + 1], now, [TestSpan(1, 0, place)])
            assert np.array_equal(output[0], out[n]) and np.array_equal(after[0], states[n])
            now, place = (mx.array(after),), 0


def test_a_slice_gives_the_arrays_of_a_state() -> None:
    whole = mx.arange(30).reshape(2, 15)
    taps, matrix = StateSlice(whole, 1).arrays(((3, 1), (3, 2, 2)))
    assert taps.tolist() == [[15], [16], [17]]
    assert matrix.reshape(-1).tolist() == list(range(18, 30))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"key_dim": 8}, "keys of a head have 8 numbers, and our kernel takes multiples of 32"),
        ({"value_dim": 320}, "values of a head have 320 numbers, .* of 32 up to 256"),
        ({"heads": 17}, "17 heads cannot share 16 key heads"),
        ({"width": 9}, "the convolution has 9 tokens, and our kernel takes up to 8"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_serve_is_said(
    change: dict[str, int], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape = replace(REAL, **change)
    assert re.search(why, refusal(shape, mx.bfloat16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.cuda, "is_available", lambda: True)
        delta_rule.kernel_serves.cache_clear()
        assert not delta_rule.kernel_serves(shape, mx.bfloat16)
        delta_rule.kernel_serves.cache_clear()
    assert len(caplog.records) == 1 and re.search(why, caplog.text)


def test_inputs_of_integers_are_refused() -> None:
    assert "inputs are mlx.core.int32" in refusal(REAL, mx.int32)
    assert refusal(REAL, mx.bfloat16) == refusal(LARGEST, mx.float32) == ""


@pytest.mark.parametrize("shape", [REAL, LARGEST], ids=str)
def test_the_state_stays_in_registers(shape: DeltaNetShape) -> None:
    """The kernel needs no stack, and a thread block's registers do not exceed 2**16.

    This is checked in the machine code of NVIDIA's compiler.
    """
    if simt.nvidia() is None:
        pytest.skip("NVIDIA's compiler is not installed")
    texts: list[KernelText] = []

    def noted(**given: Any) -> Any:
        inputs, outputs = (tuple(given[key]) for key in ("input_names", "output_names"))
        texts.append(KernelText(given["name"], inputs, outputs, given["header"], given["source"]))
        return lambda **_: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "cuda_kernel", noted)
        for whole in (False, True)[: 1 + (shape.value_dim <= MAX_WHOLE_SIZE)]:
            _, threads = block_of(shape, whole=whole)
            kernel = gated_delta._delta_kernel.__wrapped__(shape, whole, mx.bfloat16)
            floats = [(mx.float32, True)] * (4 + MAX_SOURCES)
            inputs = [(mx.bfloat16, True), (mx.int32, True), *floats]
            kernel(inputs=[mx.zeros(1)] * len(inputs), output_shapes=[], output_dtypes=[])
            outputs = [mx.bfloat16 if whole else mx.float32, mx.float32]
            needs = needs_of(simt.machine_code(texts[-1], inputs, outputs))
            assert needs.stack == 0 and needs.registers * threads <= 2**16
