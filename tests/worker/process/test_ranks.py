"""Tests the environments of a group's ranks, and refused groups, whose errors name the reason.

No process is started.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from mlxpool.common.config.schema import ModelConfig, WorkerConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.progress import Block
from mlxpool.worker.groups.links import LOOPBACK
from mlxpool.worker.process import ranks


def config(slot: str = "big/0", devices: int = 2) -> WorkerConfig:
    return WorkerConfig("", slot, "", "big", ModelConfig(devices=devices))


@pytest.mark.parametrize("slot", ["big/0", "big/1"])
def test_each_rank_sees_one_gpu(monkeypatch: pytest.MonkeyPatch, slot: str) -> None:
    """The worker sees the GPUs that the broker assigned to it; each rank sees one of them."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5")
    shown = [
        environment["CUDA_VISIBLE_DEVICES"] for environment in ranks.environments(config(slot))
    ]
    assert shown == ["7", "5"]


def test_a_group_that_dials_has_the_first_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,6")
    dialling = replace(config(f"big/{os.getpid()}"), dials=True)
    shown = [environment["CUDA_VISIBLE_DEVICES"] for environment in ranks.environments(dialling)]
    assert shown == ["4", "GPU-a"]


def test_too_few_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ModelLoadFailed) as caught:
        ranks.environments(config(devices=4))
    said = str(caught.value)
    assert "model 'big'" in said and "devices is 4" in said and "there are 3" in said


def test_without_gpus_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ranks.environments(config(devices=3)) == [dict(os.environ)] * 3


def test_other_systems_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ModelLoadFailed, match="model 'big' has devices = 2, which is supported"):
        ranks.start_ranks(config(), Block.private())


def test_the_file_of_addresses_is_read_by_its_descriptor() -> None:
    """All ranks read the same open file, which MLX opens by the name /dev/fd/N."""
    descriptor = ranks.hosts_file([4000, 4001])
    try:
        for _ in range(2):
            with open(f"/dev/fd/{descriptor}", encoding="ascii") as file:
                assert json.load(file) == [["127.0.0.1:4000"], ["127.0.0.1:4001"]]
    finally:
        os.close(descriptor)


def test_ports_are_kept_until_the_ranks_listen_there() -> None:
    """No other program can bind a kept port, but the sockets of MLX's ring and of NCCL can.

    The ring sets SO_REUSEADDR and SO_REUSEPORT. NCCL sets SO_REUSEADDR and binds all addresses.
    """
    with ExitStack() as kept:
        ports = ranks.keep_ports(5, kept)
        assert len(set(ports)) == 5 and min(ports) > 0
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((LOOPBACK, port))
        with socket.socket() as of_ring, socket.socket() as peer:
            of_ring.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            of_ring.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            of_ring.bind((LOOPBACK, ports[0]))
            of_ring.listen(0)
            peer.connect((LOOPBACK, ports[0]))
        with socket.socket() as of_nccl:  # NCCL's socket binds all addresses
            of_nccl.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            of_nccl.bind(("", ports[1]))
            of_nccl.listen(1)
    with socket.socket() as other:
        other.bind((LOOPBACK, ports[2]))
