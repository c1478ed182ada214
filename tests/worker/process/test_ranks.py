"""The environments of a group's ranks, and what is refused by name. No process is started."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from mlxpool.common.config.schema import ModelConfig, WorkerConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.progress import Block
from mlxpool.worker.process import ranks


def config(slot: str = "big/0", devices: int = 2) -> WorkerConfig:
    return WorkerConfig("", slot, "", "big", ModelConfig(devices=devices))


@pytest.mark.parametrize("slot", ["big/0", "big/1"])
def test_each_rank_sees_one_gpu(monkeypatch: pytest.MonkeyPatch, slot: str) -> None:
    """Of those that the worker sees, which its broker has chosen for it."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5")
    shown = [one["CUDA_VISIBLE_DEVICES"] for one in ranks._environments(config(slot))]
    assert shown == ["7", "5"]


def test_a_group_that_dials_has_the_first_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,6")
    dialling = replace(config(f"big/{os.getpid()}"), dials=True)
    shown = [one["CUDA_VISIBLE_DEVICES"] for one in ranks._environments(dialling)]
    assert shown == ["4", "GPU-a"]


def test_too_few_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ModelLoadFailed) as caught:
        ranks._environments(config(devices=4))
    said = str(caught.value)
    assert "model 'big'" in said and "devices is 4" in said and "there are 3" in said


def test_without_gpus_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ranks._environments(config(devices=3)) == [dict(os.environ)] * 3


def test_other_systems_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ModelLoadFailed, match="model 'big' has devices = 2, which is built for"):
        ranks.start_ranks(config(), Block.private())


def test_the_file_of_addresses_is_read_by_its_descriptor() -> None:
    """MLX opens it by its name, and so do all ranks."""
    descriptor = ranks.hosts_file([4000, 4001])
    try:
        for _ in range(2):
            with open(f"/dev/fd/{descriptor}", encoding="ascii") as file:
                assert json.load(file) == [["127.0.0.1:4000"], ["127.0.0.1:4001"]]
    finally:
        os.close(descriptor)


def test_ports_are_different_and_free() -> None:
    ports = ranks.free_ports(5)
    assert len(set(ports)) == 5 and min(ports) > 0
