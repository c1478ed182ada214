"""Decides how many workers of each model a cluster runs, and which workers start and end. Pure.

The number comes from the broker, which sees the load (`broker.models.replica_scaling`), or from the
settings if it is fixed there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from mlxpool.cluster.pool_spec import ModelSpec


class WorkerView(Struct, frozen=True):
    """A worker that was started and is not being ended."""

    id: str
    model: str
    fingerprint: str  # digest of the settings with which the worker was started
    node: str = ""  # the id of the worker's node, or of its preferred node; "": none
    placed: bool = False  # whether the worker is on that node, and the node is alive


class Changes(Struct, frozen=True):
    """The workers to start and to end.

    `start` has a model's name for each new worker, `end` the ids of workers.
    """

    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


class NodeView(Struct, frozen=True):
    """A machine of the cluster, with all of its resources, used or not."""

    id: str
    address: str
    cpus: float
    gpus: float


class Report(Struct, frozen=True):
    """The broker's report: the number of workers that models should have, and its uptime."""

    wanted: Mapping[str, int]  # requested model -> number of workers
    uptime: float  # seconds


def wanted_workers(model: ModelSpec, report: Report | None, running: int) -> int:
    """Returns the number of workers that a model should have; `running`: its present number.

    `report` is None if the broker does not answer. A broker that was started a moment ago does not
    know the load yet: its report may start workers, but ends none.
    """
    count = running if report is None else report.wanted.get(model.name, 0)
    if report is not None and report.uptime < model.cool_down:
        count = max(count, running)
    return max(model.min, min(model.max, count))


def changes(
    models: Sequence[ModelSpec],
    report: Report | None,
    workers: Sequence[WorkerView],
    ending: Mapping[str, int],
) -> Changes:
    """Returns the workers to start and to end. `ending`: workers of each model that are ending.

    Workers with old settings are replaced one after the other. The next one is ended only while all
    workers of its model are on live nodes and no worker of the model is ending.
    """
    start: list[str] = []
    end: list[str] = []
    for model in models:
        own = [worker for worker in workers if worker.model == model.name]
        target = wanted_workers(model, report, len(own))
        start += [model.name] * (target - len(own))
        surplus = len(own) - target
        outdated = [worker for worker in own if worker.fingerprint != model.fingerprint]
        if surplus <= 0 and outdated and not ending.get(model.name):
            surplus = all(worker.placed for worker in own)
        end += [worker.id for worker in removal_order(own, model)[: max(0, surplus)]]
    known = {model.name for model in models}
    end += [worker.id for worker in workers if worker.model not in known]
    return Changes(tuple(start), tuple(end))


def removal_order(workers: Sequence[WorkerView], model: ModelSpec) -> list[WorkerView]:
    """Returns the workers of a model in the order in which they are ended.

    First come workers that no live node runs, then workers with old settings, then workers of the
    node with the most workers of the model, then the newest workers.
    """
    on_node = Counter(worker.node for worker in workers)
    newest_first = list(reversed(workers))
    return sorted(
        newest_first,
        key=lambda w: (w.placed, w.fingerprint == model.fingerprint, -on_node[w.node]),
    )


def choose_node(
    nodes: Sequence[NodeView], workers: Sequence[WorkerView], model: ModelSpec, gpus: int
) -> str:
    """Returns the id of the preferred node for a new worker; "" if no node is large enough.

    The preferred node has the fewest workers of the model, then the fewest workers of all models,
    so that the loss of a node ends few replicas. Ray takes another node if the preferred node is
    full.
    """
    of_model = Counter(worker.node for worker in workers if worker.model == model.name)
    of_all = Counter(worker.node for worker in workers)
    able = [node for node in nodes if node.gpus >= gpus and node.cpus >= 1]
    best = min(able, key=lambda n: (of_model[n.id], of_all[n.id], n.id), default=None)
    return "" if best is None else best.id


def gpus_of(model: ModelSpec, nodes: Sequence[NodeView]) -> int:
    """Returns a worker's GPUs: the setting, else one GPU per device if the cluster has GPUs."""
    if model.gpus >= 0:
        return model.gpus
    return model.devices if any(node.gpus >= 1 for node in nodes) else 0
