"""The GPUs that a process, and a model's workers, may use. The tests need no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.common.gpus import (
    GpusUnavailable,
    check_enough,
    chosen_gpus,
    environment_of,
    visible_gpus,
)


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        ("GPU-a, 3", ("GPU-a", "3")),
        ("MIG-GPU-a/1/0", ("MIG-GPU-a/1/0",)),
        ("0,1,0,1", ("0", "1")),  # a GPU counts once, however often it is named
        ("1,-1,0", ("1",)),  # as in CUDA, -1 ends the list
        ("-1", ()),
        ("NoDevFiles", ()),  # Slurm's value for a job without GPUs
        ("0,none,1", ("0",)),
        ("", ()),
        (" , ", ()),
    ],
)
def test_gpus_are_those_that_the_environment_names(
    tmp_path: Path, named: str, gpus: tuple[str, ...]
) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}, tmp_path) == gpus


def test_else_they_are_those_that_the_driver_has(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == ()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")


def test_a_model_may_have_all_or_those_that_it_names_in_its_order() -> None:
    assert chosen_gpus((), ()) == ()
    assert chosen_gpus(("0", "1"), ()) == ("0", "1")
    assert chosen_gpus(("0", "GPU-a", "2"), ("2", "GPU-a")) == ("2", "GPU-a")


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        (("0", "1"), ["gpu_ids has 2, but", "may use are 0, 1", "CUDA_VISIBLE_DEVICES"]),
        (("GPU-a",), ["gpu_ids has 1, 2, but", "may use are GPU-a"]),
        ((), ["gpu_ids is 1, 2, but there is no GPU", "leave gpu_ids out", "nvidia-smi -L"]),
    ],
)
def test_a_gpu_that_is_not_visible_is_refused(visible: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(GpusUnavailable) as caught:
        chosen_gpus(visible, ("1", "2"))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_group_needs_a_gpu_for_each_rank_or_none_at_all() -> None:
    check_enough((), 4)
    check_enough(("0", "1"), 2)
    with pytest.raises(GpusUnavailable, match=r"devices is 3, .* there are 2 .*\(0, 1\): set dev"):
        check_enough(("0", "1"), 3)


@pytest.mark.parametrize(
    ("gpus", "named", "told"),
    [
        ("", "", None),
        ("", "-1", None),
        ("", None, None),
        ("0", " 0", None),
        ("1", "1,-1,0", None),
        ("0,1", "0,1", None),
        ("1", "0,1", "1"),
        ("1,0", "0,1", "1,0"),
        ("0", "0,0", "0"),
        ("0", None, "0"),  # not all: the driver has two GPUs
        ("0,1", None, None),
    ],
)
def test_the_environment_changes_only_where_a_process_would_see_other_gpus(
    tmp_path: Path, gpus: str, named: str | None, told: str | None
) -> None:
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    before = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    given = gpus.split(",") if gpus else ()
    after = {} if told is None else {"CUDA_VISIBLE_DEVICES": told}
    assert environment_of(given, before, tmp_path) == after
