"""Sums over the memory of peers, on simulated GPUs that run beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from mlxpool.worker.groups.peer_sums import (  # noqa: E402
    ALIGNMENT,
    LIMITS,
    LINE_BYTES,
    BufferShape,
    Launch,
    Limits,
    limits_of,
)
from mlxpool.worker.kernels import device  # noqa: E402
from support import simt  # noqa: E402
from support.peer_ranks import FEW, SimulatedRanks  # noqa: E402

pytestmark = pytest.mark.skipif(device.on_gpu(), reason="two ranks need two GPUs")
both_kernels = pytest.mark.parametrize("by_lines", [False, True], ids=["chunks", "lines"])


@pytest.fixture(scope="module", autouse=True)
def gpus() -> Iterator[set[str]]:
    with simt.simulated() as called:
        yield called


def parts(ranks: int, shape: Sequence[int], dtype: Any, seed: int) -> list[Any]:
    """Returns random arrays to add up, one for each rank."""
    if dtype == mx.int32:
        return [
            mx.array(np.random.default_rng([seed, n]).integers(0, 2**30, shape, np.int32))
            for n in range(ranks)
        ]
    return [
        mx.random.normal(shape, key=mx.random.key(10 * seed + n)).astype(dtype)
        for n in range(ranks)
    ]


def added(every: Sequence[Any], residual: Any = None) -> Any:
    """Returns the sum in the order of the ranks, rounded once."""
    kind = mx.int32 if every[0].dtype == mx.int32 else mx.float32
    total = mx.zeros(every[0].shape, kind)
    for part in [*every, *([] if residual is None else [residual])]:
        total = total + part.astype(kind)
    return total.astype(every[0].dtype)


def bits(x: Any) -> bytes:
    return bytes(np.array(x.view(mx.uint8)).tobytes())


def summed(group: SimulatedRanks, given: Sequence[Any], residual: Any = None) -> list[Any]:
    with simt.together(len(given)) as gpus:
        sums = []
        for rank, part in enumerate(given):
            with gpus.on(rank):
                sums.append(group.sums[rank].sum(part, residual))
    return sums


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(2, "bfloat16"), (2, "float16"), (2, "float32"), (2, "int32"), (3, "bfloat16")],
)
@both_kernels
def test_all_ranks_get_the_sum_in_the_order_of_ranks(
    ranks: int, dtype: str, *, by_lines: bool
) -> None:
    """Sums of several shapes follow each other, by both kernels in turn."""
    group = SimulatedRanks(ranks, FEW, lines=by_lines)
    for seed, shape in enumerate(
        [(1, 64), (7, 64), (64, 64), (5,), (1, 64), (1, 1), (3, 4, 64), (2, 64), (129, 64)]
    ):
        given = parts(ranks, shape, getattr(mx, dtype), seed)
        expected = bits(added(given))
        assert [bits(total) for total in summed(group, given)] == [expected] * ranks, shape
    assert [sums.lost for sums in group.sums] == [None] * ranks


@both_kernels
def test_both_kernels_ran(gpus: set[str], *, by_lines: bool) -> None:
    group = SimulatedRanks(2, FEW, lines=by_lines)
    gpus.clear()
    summed(group, parts(2, (1, 64), mx.bfloat16, 0))
    assert gpus == {"peer_sum"}
    summed(group, parts(2, (64, 64), mx.bfloat16, 0))
    assert gpus == {"peer_sum", "peer_sum_lines" if by_lines else "peer_sum_large"}


@pytest.mark.parametrize("lines", [1, 40])
@both_kernels
def test_a_residual_is_added_behind_the_sum(lines: int, *, by_lines: bool) -> None:
    group = SimulatedRanks(2, FEW, lines=by_lines)
    given, residual = (
        parts(2, (lines, 64), mx.bfloat16, 3),
        parts(1, (lines, 64), mx.bfloat16, 4)[0],
    )
    expected = bits(added(given, residual))
    assert [bits(total) for total in summed(group, given, residual)] == [expected] * 2
    assert expected != bits(added(given) + residual), "it is rounded once"


@pytest.mark.parametrize(("ranks", "lines"), [(2, 1), (2, 50), (3, 2), (3, 40)])
@both_kernels
def test_columns_are_joined_in_the_order_of_ranks(
    ranks: int, lines: int, *, by_lines: bool
) -> None:
    group = SimulatedRanks(ranks, FEW, lines=by_lines)
    given = parts(ranks, (lines, 64), mx.bfloat16, 5)
    with simt.together(ranks) as gpus:
        arrays = []
        for rank, part in enumerate(given):
            with gpus.on(rank):
                arrays.append(group.sums[rank].joined(part))
    expected = bits(mx.concatenate(given, axis=1))
    assert [bits(array) for array in arrays] == [expected] * ranks


@both_kernels
def test_many_sums_follow_each_other_without_the_host(*, by_lines: bool) -> None:
    """A rank may begin a sum while a peer still reads the previous sum, without overwriting it."""
    group = SimulatedRanks(2, FEW, lines=by_lines)
    given = parts(2, (3, 64), mx.float32, 6)
    long = parts(2, (70, 64), mx.float32, 7)
    sums: list[list[Any]] = [[], []]
    with simt.together(2) as gpus:
        for rank in range(2):
            with gpus.on(rank):
                x = given[rank]
                for number in range(24):
                    if number % 5 == 4:
                        sums[rank].append(group.sums[rank].sum(long[rank]))
                    x = group.sums[rank].sum(x)
                    sums[rank].append(x)
    x, expected = added(given), []
    for number in range(24):
        if number % 5 == 4:
            expected.append(added(long))
        expected.append(x)
        x = x + x
    for rank in range(2):
        assert [bits(total) for total in sums[rank]] == [bits(total) for total in expected]


@drawn(
    st.lists(
        st.tuples(st.sampled_from(["sum", "onto", "joined"]), st.integers(1, 300)),
        min_size=1,
        max_size=12,
    ),
    st.integers(2**24, 2**40),
    st.booleans(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_row_of_operations_is_right(
    operations: list[tuple[str, int]], epoch: int, by_lines: bool
) -> None:
    """Any sequence of operations gives right results, and the ranks stay in step.

    `epoch`: the initial value of each rank's count of sums.
    """
    group = SimulatedRanks(2, FEW, lines=by_lines)
    given = [parts(2, (lines, 64), mx.bfloat16, n) for n, (_, lines) in enumerate(operations)]
    outputs: list[list[Any]] = [[], []]
    group.begin_at(epoch)
    with simt.together(2) as gpus:
        for rank, sums in enumerate(group.sums):
            with gpus.on(rank):
                for (kind, _), inputs in zip(operations, given, strict=True):
                    own = inputs[rank]
                    if kind == "joined":
                        outputs[rank].append(sums.joined(own))
                    else:
                        outputs[rank].append(sums.sum(own, inputs[0] if kind == "onto" else None))
    for number, ((kind, lines), inputs) in enumerate(zip(operations, given, strict=True)):
        expected = mx.concatenate(inputs, axis=1) if kind == "joined" else added(inputs)
        if kind == "onto":
            expected = added(inputs, inputs[0])
        assert [bits(rank_outputs[number]) for rank_outputs in outputs] == [bits(expected)] * 2, (
            number,
            kind,
            lines,
        )


@pytest.mark.parametrize("lines", [1, 40])
@both_kernels
def test_a_peer_that_never_comes_is_lost_and_nothing_hangs(lines: int, *, by_lines: bool) -> None:
    group = SimulatedRanks(2, FEW, bound=0.01, lines=by_lines)
    given = parts(2, (lines, 64), mx.bfloat16, 8)
    with simt.together(2) as gpus, gpus.on(0):
        for _ in range(3):  # only the first sum waits for the peer
            group.sums[0].sum(given[0])
    assert [sums.lost for sums in group.sums] == [1, None]
    with simt.together(2) as gpus, gpus.on(1):
        first = group.sums[1].sum(given[1])
        group.sums[1].sum(given[1])
    assert bits(first) == bits(added(given)), "what came before the loss was right"
    assert group.sums[1].lost == 0, "nothing comes of a rank that has lost another"


@pytest.mark.parametrize("lines", [2, 40])
@both_kernels
def test_unlike_sums_never_match(lines: int, *, by_lines: bool) -> None:
    """Ranks that run different operations get an error, not the numbers of another operation."""
    group = SimulatedRanks(2, FEW, bound=0.01, lines=by_lines)
    given = parts(2, (lines, 64), mx.bfloat16, 9)
    with simt.together(2) as gpus:
        with gpus.on(0):
            group.sums[0].sum(given[0])
        with gpus.on(1):
            group.sums[1].joined(given[1])
    assert [sums.lost for sums in group.sums] == [1, 0]


def test_what_is_too_large_or_of_another_kind_is_left_to_others() -> None:
    sums = SimulatedRanks(2, FEW).sums[0]
    assert sums.sum(mx.zeros((2**17, 1), mx.bfloat16)) is None
    assert sums.sum(mx.zeros((0, 8), mx.bfloat16)) is None
    assert sums.sum(mx.zeros((2, 8), mx.uint8)) is None
    assert sums.sum(mx.zeros((2, 8), mx.bfloat16), mx.zeros((2, 8), mx.float32)) is None
    assert sums.joined(mx.zeros((2, 12), mx.bfloat16)) is None, "lines do not begin at 16 bytes"


def test_buffers_have_room_for_what_peers_write() -> None:
    for ranks in (2, 3, 4, 8):
        for by_lines in (False, True):
            shape = BufferShape.of(ranks, lines=by_lines)
            assert shape.size % ALIGNMENT == 0
            assert shape.size <= 96 * 2**20, shape
            assert shape.large_offset >= 2 * (ranks - 1) * 2 * shape.limits.small
            if by_lines:
                assert shape.large_offset % LINE_BYTES == shape.area % LINE_BYTES == 0
                assert shape.area * 15 // 16 >= shape.limits.large, "a sixteenth are tags"
    assert limits_of(2) is LIMITS[2]


def test_flags_of_all_launches_have_the_same_places() -> None:
    """The position of a flag in the buffer does not depend on the size of the launch.

    A flag of one launch may arrive while a peer reads flags of a launch of another size.
    """
    shape = BufferShape(2, Limits(0, 2**20), (Launch(2**18, 1, 4), Launch(2**20, 4, 2)))
    assert shape.chunks == 2**20 // (512 * 16)
    assert [shape.launch_of(size).unroll for size in (1, 2**18, 2**18 + 1, 2**30)] == [1, 1, 4, 4]
