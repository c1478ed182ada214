"""Which GPUs workers and the ranks of a group get. No GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.worker.system.gpus import gpus_of_group, own_gpu, replica_of, visible_gpus


def test_gpus_are_those_that_the_environment_names(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, 3"}, tmp_path) == ("GPU-a", "3")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


def test_else_they_are_those_that_the_driver_has(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == ()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")


def test_workers_of_a_model_have_the_gpus_in_turn() -> None:
    found = [own_gpu(("GPU-a", "3"), replica_of(f"org/name/{n}")) for n in range(3)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["GPU-a", "3", "GPU-a"]


def test_there_is_nothing_to_choose_of_one_gpu_or_none() -> None:
    assert own_gpu(("0",), 1) == own_gpu((), 1) == {}
    assert replica_of("dialled") == 0


def test_replicas_share_no_gpu() -> None:
    gpus = ("0", "1", "2", "3")
    assert gpus_of_group(gpus, 0, 2) == ("0", "1")
    assert gpus_of_group(gpus, 1, 2) == ("2", "3")
    with pytest.raises(ValueError, match=r"worker 2 needs GPUs 4 to 5 of those .* which are 4"):
        gpus_of_group(gpus, 2, 2)
