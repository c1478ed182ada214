"""How many workers of each model a cluster should run, which are ended, where one is started. Pure.

The number comes from the broker, which sees the load (`broker.models.replica_scaling`), or from the
settings where it is fixed.
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
    fingerprint: str  # of the settings that it was started with
    node: str = ""  # the id of the one that it is on, or should be; "": there is none
    placed: bool = False  # it is on that node, which is alive


class Changes(Struct, frozen=True):
    """`start`: models, one entry for each new worker. `end`: ids of workers."""

    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


class NodeView(Struct, frozen=True):
    """A machine of the cluster, with all that it has, whoever uses it."""

    id: str
    address: str
    cpus: float
    gpus: float


class Report(Struct, frozen=True):
    """What the broker says: the workers that models should have, and how long it has looked."""

    wanted: Mapping[str, int]  # of models that were asked for something
    uptime: float  # seconds


def wanted_workers(model: ModelSpec, report: Report | None, running: int) -> int:
    """How many workers of a model there should be; `running` are there now.

    None: the broker does not answer. A broker that was started a moment ago does not know the load
    yet: it may ask for more workers, but none is ended.
    """
    wanted = running if report is None else report.wanted.get(model.name, 0)
    if report is not None and report.uptime < model.cool_down:
        wanted = max(wanted, running)
    return max(model.min, min(model.max, wanted))


def changes(
    models: Sequence[ModelSpec],
    report: Report | None,
    workers: Sequence[WorkerView],
    ending: Mapping[str, int],
) -> Changes:
    """What to start and to end now. `ending`: workers of each model that are being ended.

    Workers with old settings are replaced one after the other: one is ended while all others of its
    model have a place.
    """
    start: list[str] = []
    end: list[str] = []
    for model in models:
        own = [worker for worker in workers if worker.model == model.name]
        wanted = wanted_workers(model, report, len(own))
        start += [model.name] * (wanted - len(own))
        surplus = len(own) - wanted
        outdated = [worker for worker in own if worker.fingerprint != model.fingerprint]
        if surplus <= 0 and outdated and not ending.get(model.name):
            surplus = all(worker.placed for worker in own)
        end += [worker.id for worker in removal_order(own, model)[: max(0, surplus)]]
    known = {model.name for model in models}
    end += [worker.id for worker in workers if worker.model not in known]
    return Changes(tuple(start), tuple(end))


def removal_order(workers: Sequence[WorkerView], model: ModelSpec) -> list[WorkerView]:
    """The workers of a model, the one that is missed least first.

    One without a place, one with old settings, one of the node that has most of them, the newest.
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
    """The id of the node that a new worker should be on; "": none has what it needs.

    The node with the fewest workers of the model, then the fewest at all, so that the loss of one
    takes few replicas. It is a preference: Ray takes another node if this one is full.
    """
    of_model = Counter(worker.node for worker in workers if worker.model == model.name)
    of_all = Counter(worker.node for worker in workers)
    able = [node for node in nodes if node.gpus >= gpus and node.cpus >= 1]
    best = min(able, key=lambda n: (of_model[n.id], of_all[n.id], n.id), default=None)
    return "" if best is None else best.id


def gpus_of(model: ModelSpec, nodes: Sequence[NodeView]) -> int:
    """The GPUs of one worker: as the settings say, else one a device where the cluster has any."""
    if model.gpus >= 0:
        return model.gpus
    return model.devices if any(node.gpus >= 1 for node in nodes) else 0
