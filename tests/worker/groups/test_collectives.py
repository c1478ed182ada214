"""Tests the sums over ranks: by our kernels over peers' memory, or else by MLX."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from mlxpool.common.errors import OutOfMemory  # noqa: E402
from mlxpool.worker.engine.opening import Warmed, limits_of  # noqa: E402
from mlxpool.worker.groups import collectives, peer_exchange  # noqa: E402
from mlxpool.worker.groups.collectives import AUTO, NCCL, Collectives, RankLost  # noqa: E402
from mlxpool.worker.groups.group_engine import Group, GroupPasses  # noqa: E402
from mlxpool.worker.groups.links import LOOPBACK, Meeting  # noqa: E402
from mlxpool.worker.groups.messages import Ended  # noqa: E402
from mlxpool.worker.groups.part_layers import SummedLinear  # noqa: E402
from mlxpool.worker.groups.peer_memory import PeerMemoryError  # noqa: E402
from mlxpool.worker.groups.peer_sums import BufferShape, Limits  # noqa: E402
from mlxpool.worker.groups.pipes import Orders  # noqa: E402
from mlxpool.worker.process.ranks import hosts_file  # noqa: E402
from mlxpool.worker.scheduling.scheduler import longest_chunk  # noqa: E402

SHAPE = BufferShape(2, Limits(64, 64))


class Peers:
    """Stands for PeerSums of two ranks that have the same numbers."""

    shape = SHAPE

    def __init__(self) -> None:
        self.lost: int | None = None
        self.bound = 0.0

    def set_bound(self, seconds: float) -> None:
        """Records the time limit in seconds, after which a peer is treated as lost."""
        self.bound = seconds

    def takes(self, size: int, dtype: Any) -> bool:
        """Returns whether `sum` supports arrays of `size` bytes of this dtype."""
        return size <= SHAPE.limits.large

    def sum(self, x: Any, residual: Any = None) -> Any:
        """Returns the sum of both ranks' arrays, which are equal here, and of `residual`."""
        if not self.takes(x.nbytes, x.dtype):
            return None
        return 2 * x if residual is None else 2 * x + residual

    def joined(self, x: Any) -> Any:
        """Returns the joined arrays [T, 2 * n] of both ranks, which are equal here."""
        return mx.concatenate([x, x], axis=1) if self.takes(x.nbytes, x.dtype) else None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Collectives:
    """A group of two ranks with a fake back end: a sum returns three times its input."""
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: 3 * x)
    monkeypatch.setattr(mx.distributed, "all_gather", lambda x, group: mx.concatenate([x, x + 1]))
    return Collectives(cast(Any, SimpleNamespace(rank=lambda: 0, size=lambda: 2)))


@pytest.fixture
def peers(group: Collectives, monkeypatch: pytest.MonkeyPatch) -> Peers:
    """The fake kernels over peers' memory, connected to the group."""
    fake_peers = Peers()
    monkeypatch.setattr(peer_exchange, "connect", lambda *given: fake_peers)
    group.connect_gpus(30.0)
    return fake_peers


SMALL, LARGE = mx.ones((2, 4)), mx.ones((20, 4))


def test_kernels_add_up_what_they_take_and_the_back_end_the_rest(
    group: Collectives, peers: Peers
) -> None:
    assert (group.all_sum(SMALL).max().item(), group.all_sum(LARGE).max().item()) == (2, 3)
    assert group.sum_onto(SMALL, SMALL).max().item() == 3
    assert group.sum_onto(LARGE, LARGE).max().item() == 4
    assert (group.adds(32, mx.float32), group.adds(65, mx.float32)) == (True, False)
    assert group.joined(SMALL).shape == (2, 8)
    assert group.joined(LARGE)[0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert (group.nbytes, peers.bound) == (SHAPE.size, 30.0)


def test_without_kernels_the_back_end_adds_up_everything(group: Collectives) -> None:
    assert group.all_sum(SMALL).max().item() == 3
    assert group.sum_onto(SMALL, SMALL).max().item() == 4
    assert not group.adds(32, mx.float32)
    assert group.nbytes == 0
    group.check()


def test_the_load_log_says_what_adds_up(
    group: Collectives, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any) -> Any:
        raise PeerMemoryError("cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_HANDLE")

    monkeypatch.setattr(peer_exchange, "connect", refuse)
    with caplog.at_level("INFO", logger=collectives.log.name):
        group.connect_gpus(30.0, NCCL)
        group.connect_gpus(30.0, AUTO)
        monkeypatch.setattr(peer_exchange, "connect", lambda *given: Peers())
        group.connect_gpus(30.0, AUTO)
    chosen, refused, connected = caplog.records
    assert chosen.levelname == "INFO" and "NCCL computes" in chosen.message
    assert refused.levelname == "WARNING" and "INVALID_HANDLE" in vars(refused)["why"]
    assert "over the memory of each other" in connected.message


def test_a_summed_product_is_added_to_the_residual_where_a_kernel_does_it(
    group: Collectives, peers: Peers
) -> None:
    layer = SummedLinear(cast(Any, lambda x: 5 * x), group)
    output = layer.add_to(SMALL, SMALL)
    assert output is not None and output.max().item() == 11
    assert layer.add_to(SMALL, LARGE) is None
    assert layer.add_to(SMALL, SMALL.astype(mx.float16)) is None


class FailingPipeline:
    """A pipeline with two passes in flight; `start` discards both and raises OutOfMemory.

    `sent`: the number of new passes that are treated as sent to the other ranks before the error.
    """

    def __init__(self, orders: Orders, sent: int) -> None:
        self.orders, self.sent = orders, sent
        self.flights = ["a pass", "a pass"]

    def start(self, spans: Any, **_: Any) -> bool:
        self.flights.clear()
        self.orders.passes += self.sent
        raise OutOfMemory("no block is free")

    def collect(self) -> Any:
        return "tokens"


def orders_of(passes: int, broken: bool = False) -> tuple[Orders, list[Any]]:
    sent: list[Any] = []
    return cast(Any, SimpleNamespace(send=sent.append, passes=passes, broken=broken)), sent


def test_a_lost_rank_ends_the_pass_before_its_numbers_are_used(
    group: Collectives, peers: Peers
) -> None:
    orders, sent = orders_of(1)
    passes = GroupPasses(cast(Any, FailingPipeline(orders, 0)), orders, group)
    assert cast(Any, passes.collect()) == "tokens"
    assert sent == [Ended()] and orders.passes == 0
    peers.lost = 1
    orders.passes = 1
    with pytest.raises(RankLost, match="rank 1 did not join a sum of rank 0 within 30 s"):
        passes.collect()
    assert orders.passes == 1, "the group cannot go on: see device_works"


@pytest.mark.parametrize("sent", [0, 1])
def test_passes_in_flight_end_on_all_ranks_when_a_pass_fails_before_it_is_sent(
    group: Collectives, sent: int
) -> None:
    """The other ranks end the passes; if the failing pass was already sent, the group ends."""
    orders, messages = orders_of(2)
    with pytest.raises(OutOfMemory):
        passes = GroupPasses(cast(Any, FailingPipeline(orders, sent)), orders, group)
        passes.start([], at_once=True)
    assert messages == ([] if sent else [Ended(), Ended()])
    assert orders.passes == (3 if sent else 0)


def test_a_rank_that_got_no_message_ends_the_group(group: Collectives) -> None:
    """The group ends after any failed message, even without a pass in flight."""
    assert not Group(orders_of(0, broken=True)[0], group).work()
    assert Group(orders_of(0)[0], group).work()


@pytest.mark.parametrize(("sizes", "second"), [((1, 2048), 2048), ((), 1265)])
def test_a_pass_of_a_group_has_the_pairs_of_all_ranks(
    group: Collectives, sizes: tuple[int, ...], second: int
) -> None:
    """Without compiled passes, later chunks of a long prompt are shorter than the first.

    Each token of a later chunk attends to more keys, and the pairs of queries and keys in a pass
    are limited. Compiled passes have the same length for all chunks.
    """
    layout = SimpleNamespace(sizes=sizes, store=SimpleNamespace(stateful=False))
    parts = SimpleNamespace(
        loaded=SimpleNamespace(deterministic=True),
        memory=SimpleNamespace(layout=layout, context=8192),
        devices=Group(orders_of(0)[0], group),
        batch=2048,
        lookahead=True,
    )
    limits = limits_of(cast(Any, parts), Warmed(0.04))
    assert longest_chunk(2048, limits.pairs) == second


def test_a_rank_whose_port_is_taken_names_it() -> None:
    """The error names the rank whose port another program uses and does not share."""
    with socket.create_server((LOOPBACK, 0), reuse_port=False) as taken:
        port = taken.getsockname()[1]
        hosts = hosts_file([port, 1])
        try:
            with pytest.raises(RuntimeError) as caught:
                Collectives.join(Meeting.of(0, 2, hosts, 0))
        finally:
            os.close(hosts)
    said = str(caught.value)
    assert "rank 0 of 2 cannot join its group: " in said and "Couldn't bind" in said
    assert f"it listens on 127.0.0.1:{port} and connects to 127.0.0.1:1" in said


def test_the_place_where_gpus_meet_is_named() -> None:
    places = [Meeting(rank, 2, "", 4567).nccl_places for rank in range(2)]
    assert places == ["it listens on 127.0.0.1:4567", "it connects to 127.0.0.1:4567"]
