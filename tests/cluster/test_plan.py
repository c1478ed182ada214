"""The workers that a cluster starts and ends: pure decisions."""

from __future__ import annotations

from msgspec.structs import replace

from mlxpool.cluster.plan import (
    Changes,
    NodeView,
    Report,
    WorkerView,
    changes,
    choose_node,
    gpus_of,
    removal_order,
    wanted_workers,
)
from mlxpool.cluster.pool_spec import ModelSpec

M = ModelSpec("m", 1, 4, -1, 300.0, "new")
FIXED = ModelSpec("f", 2, 2, 0, 300.0, "new")
LATE = 1000.0  # seconds since the broker's start


def worker(id: str, node: str = "n1", *, model: str = "m", fingerprint: str = "new") -> WorkerView:
    return WorkerView(id, model, fingerprint, node, placed=bool(node))


def test_the_broker_says_how_many_within_bounds() -> None:
    assert wanted_workers(M, Report({"m": 3}, LATE), 1) == 3
    assert wanted_workers(M, Report({"m": 9}, LATE), 1) == 4
    assert wanted_workers(M, Report({}, LATE), 3) == 1  # the report has no number for m
    assert wanted_workers(FIXED, Report({"f": 0}, LATE), 0) == 2


def test_without_an_answer_there_stay_as_many_as_there_are() -> None:
    assert wanted_workers(M, None, 3) == 3
    assert wanted_workers(M, None, 0) == 1
    assert wanted_workers(M, None, 7) == 4


def test_a_broker_that_has_just_started_ends_no_worker() -> None:
    assert wanted_workers(M, Report({"m": 1}, 299.0), 3) == 3
    assert wanted_workers(M, Report({"m": 4}, 1.0), 3) == 4
    assert wanted_workers(M, Report({"m": 1}, 300.0), 3) == 1


def test_missing_workers_are_started_and_surplus_ones_ended() -> None:
    report = Report({"m": 3}, LATE)
    assert changes([M], report, [worker("w1")], {}) == Changes(("m", "m"))
    four = [worker(f"w{number}") for number in range(1, 5)]
    assert changes([M], report, four, {}) == Changes((), ("w4",))
    assert changes([M, FIXED], Report({"m": 1}, LATE), four[:1], {}).start == ("f", "f")


def test_workers_of_a_model_that_has_left_the_settings_are_ended() -> None:
    assert changes([M], None, [worker("w1"), worker("w2", model="gone")], {}).end == ("w2",)


def test_old_settings_are_replaced_one_worker_at_a_time() -> None:
    report = Report({"m": 2}, LATE)
    old = [worker("w1", fingerprint="old"), worker("w2", fingerprint="old")]
    assert changes([M], report, old, {}).end == ("w2",)
    assert changes([M], report, old[:1], {"m": 1}) == Changes(("m",))
    waits = [old[0], worker("w3", "")]
    assert changes([M], report, waits, {}) == Changes()
    assert changes([M], report, [old[0], worker("w3")], {}).end == ("w1",)


def test_who_is_missed_least_goes_first() -> None:
    workers = [
        worker("w1", "n1"),
        worker("w2", "n2"),
        worker("w3", "n2"),
        worker("w4", "n3", fingerprint="old"),
        worker("w5", ""),
    ]
    assert [removed.id for removed in removal_order(workers, M)] == ["w5", "w4", "w3", "w2", "w1"]


NODES = [
    NodeView("a", "10.0.0.1", cpus=8, gpus=0),
    NodeView("b", "10.0.0.2", cpus=8, gpus=2),
    NodeView("c", "10.0.0.3", cpus=8, gpus=2),
    NodeView("d", "10.0.0.4", cpus=0, gpus=2),
]


def test_a_worker_goes_where_its_model_has_the_fewest_workers() -> None:
    assert choose_node(NODES, [], M, 1) == "b"
    assert choose_node(NODES, [worker("w1", "b")], M, 1) == "c"
    assert choose_node(NODES, [worker("w1", "b", model="other")], M, 1) == "c"
    both = [worker("w1", "b", model="other"), worker("w2", "c")]
    assert choose_node(NODES, both, M, 1) == "b"
    assert choose_node(NODES, [], M, 0) == "a"
    assert choose_node(NODES, [], M, 3) == ""
    assert choose_node([], [], M, 0) == ""


def test_a_worker_takes_one_gpu_where_there_are_any() -> None:
    assert gpus_of(M, NODES) == 1
    assert gpus_of(M, NODES[:1]) == 0
    assert gpus_of(replace(M, devices=2), NODES) == 2
    assert gpus_of(replace(M, devices=2), NODES[:1]) == 0
    assert gpus_of(FIXED, NODES) == 0
