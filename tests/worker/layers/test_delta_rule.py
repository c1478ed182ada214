"""Compares the delta rule in chunks with a float64 implementation that goes token by token."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.layers import delta_rule  # noqa: E402
from mlxpool.worker.layers.delta_rule import CHUNK, GatedDeltaRule  # noqa: E402
from mlxpool.worker.layers.layer_types import RecurrentState  # noqa: E402

HEADS, RATIO, KEY, VALUE = 2, 3, 8, 5
Inputs = tuple[np.ndarray, ...]


def inputs_of(count: int, *, alike: float = 0.0, batch: int = 2) -> Inputs:
    """Returns random q, k, v, log_decay, rate and state.

    `alike`: how similar the keys are to each other; 0: not at all.
    """
    draw = np.random.default_rng(count)

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal((batch, *shape)).astype(np.float32)

    heads = HEADS * RATIO
    q, k = (mx.array(normal(count, HEADS, KEY) + shift) for shift in (0.0, alike))
    # A few tokens clear nearly the whole state, most tokens next to nothing.
    decay = np.where(np.abs(normal(count, heads)) > 1.5, -300.0, -1e-3).astype(np.float32)
    rate = 1 / (1 + np.exp(-4 * normal(count, heads)))
    units = (np.array(delta_rule.l2_normalised(x)) for x in (q, k))
    return *units, normal(count, heads, VALUE), decay, rate, normal(heads, KEY, VALUE)


def token_by_token(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, decay, rate, state = (x.astype(np.float64) for x in inputs)
    q, k = np.repeat(q, RATIO, axis=2), np.repeat(k, RATIO, axis=2)
    outs = []
    for t in range(q.shape[1]):
        state = np.exp(decay[:, t])[..., None, None] * state
        read = np.einsum("bhk,bhkv->bhv", k[:, t], state)
        delta = rate[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, ..., None] * delta[..., None, :]
        outs.append(np.einsum("bhk,bhkv->bhv", q[:, t], state))
    return np.stack(outs, axis=1), state


def assert_near(ours: object, batch_invariant: np.ndarray) -> None:
    assert np.abs(np.array(ours) - batch_invariant).max() < 1e-5 * np.abs(batch_invariant).max()


@pytest.mark.parametrize("alike", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("count", [1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_chunks_equal_single_tokens(count: int, alike: float) -> None:
    inputs = inputs_of(count, alike=alike)
    for ours, batch_invariant in zip(
        delta_rule.delta_rule(*(mx.array(x) for x in inputs)), token_by_token(inputs), strict=True
    ):
        assert_near(ours, batch_invariant)


def test_a_state_without_decay_stays_exact() -> None:
    """The state stays exact for keys that are nearly alike, with a rate of 1 and without decay.

    A solution by powers of the chunk's matrix would overflow here.
    """
    q, k, v, decay, rate, state = inputs_of(400, alike=3.0)
    inputs = (q, k, v, np.zeros_like(decay), np.ones_like(rate), state)
    out, after = delta_rule.delta_rule(*(mx.array(x) for x in inputs))
    batch_invariant = token_by_token(inputs)
    assert_near(out, batch_invariant[0])
    assert_near(after, batch_invariant[1])


def rule_of(width: int) -> tuple[GatedDeltaRule, int]:
    channels = 2 * HEADS * KEY + HEADS * RATIO * VALUE
    draw = np.random.default_rng(width)
    conv, speed, bias = (
        mx.array(draw.standard_normal(shape).astype(np.float32))
        for shape in ((width, channels), (HEADS * RATIO,), (HEADS * RATIO,))
    )
    return GatedDeltaRule(HEADS, conv, speed, bias), channels


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_convolution_continues_across_calls(width: int) -> None:
    rule, channels = rule_of(width)
    x = np.random.default_rng(0).standard_normal((1, 9, channels)).astype(np.float32)
    padded = np.concatenate([np.zeros((1, width - 1, channels), np.float32), x], axis=1)
    taps = np.array(rule.conv)
    batch_invariant = sum(padded[:, tap : tap + 9] * taps[tap] for tap in range(width))
    state = mx.zeros((1, width - 1, channels))
    outs = []
    for start, end in ((0, 1), (1, 3), (3, 9)):
        out, state = delta_rule.causal_convolution(mx.array(x[:, start:end]), rule.conv, state)
        outs.append(np.array(out))
    assert np.allclose(np.concatenate(outs, axis=1), batch_invariant, atol=1e-6)
    assert np.array_equal(np.array(state), padded[:, 9:])


@pytest.mark.parametrize("cuts", [[1] * 40, [7, 1, 32], [40]])
def test_splitting_the_tokens_changes_nothing(cuts: list[int]) -> None:
    rule, channels = rule_of(4)
    draw = np.random.default_rng(1)
    sizes = (channels, HEADS * RATIO, HEADS * RATIO)
    inputs = [mx.array(draw.standard_normal((1, 40, size)).astype(np.float32)) for size in sizes]
    begin = (mx.zeros((1, 3, channels)), mx.zeros((1, HEADS * RATIO, KEY, VALUE)))
    whole, end = rule(tuple(inputs), begin)
    state: RecurrentState = begin
    at, outs = 0, []
    for count in cuts:
        out, state = rule(tuple(x[:, at : at + count] for x in inputs), state)
        outs.append(np.array(out))
        at += count
    assert_near(np.concatenate(outs, axis=1), np.array(whole))
    for ours, batch_invariant in zip(state, end, strict=True):
        assert_near(ours, np.array(batch_invariant))
