"""The rows of the answer to `models`: each name, with its model's files. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.broker.models.model import Model
from mlxpool.broker.models.registry import Registry
from mlxpool.broker.workers.worker import SERVING, Worker
from mlxpool.common.answer_format import FORMAT
from mlxpool.common.checks import mapping
from mlxpool.common.config.schema import OFF

DIGEST_DIGITS = 12  # number of shown digits of a digest
MAX_DETAILED = 150  # most models whose details fit into one body
MAX_ERROR = 200  # most characters of an error in rows for clients
BRIEF_KEYS = (
    "name",
    "state",
    "queued",
    "running",
    "workers",
    "context",
    "chat",
    "inspected",
    "memory",
    "expires_in",
)


class Fault(Struct, frozen=True):
    """A name whose model is unavailable or failed to load, with the error that `ps` shows."""

    name: str
    state: str
    error: str


def faults(registry: Registry, now: float) -> Iterator[Fault]:
    """Yields the names with an error, in the order of names."""
    for name in registry.names.offered():
        state, error = _state_and_error(registry, name, now)
        if error:
            yield Fault(name, state, error)


def rows(registry: Registry, now: float) -> list[dict[str, Any]]:
    """Returns a row for each name, for `mlxpool models --json`."""
    return [_row(registry, name, now) for name in registry.names.offered()]


def detailed(registry: Registry, name: str, now: float) -> dict[str, Any]:
    """Returns the row of a known name, with the full description of its model's files."""
    about = dict(registry.names.known[name].about)
    return {**brief([_row(registry, name, now)])[0], "about": about}


def brief(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns shorter rows for clients.

    If there are many models, the rows have only the columns that can change.
    """
    if len(rows) > MAX_DETAILED:
        return [{key: row[key] for key in BRIEF_KEYS} for row in rows]
    return [{**row, "error": row["error"] and row["error"][:MAX_ERROR]} for row in rows]


def _row(registry: Registry, name: str, now: float) -> dict[str, Any]:
    known, model = registry.names.known[name], registry.model(name)
    state, error = _state_and_error(registry, name, now)
    about, workers = known.about, model.workers
    digest = next(filter(None, (worker.digest for worker in workers)), known.digest)
    context = max((worker.context for worker in workers), default=0)
    bounds = (known.config.context, about.get("context"))
    usual = min((bound for bound in bounds if isinstance(bound, int) and bound), default=0)
    shown = _shown_features(about.get("features"), known.config.prefix_cache)
    return {
        "name": name,
        "state": state,
        "queued": len(model.queue),
        "running": sum(len(worker.leases) for worker in workers),
        "workers": sum(worker.state in SERVING for worker in workers),
        "context": context or usual,
        # If only workers elsewhere have a model's files, the files are not inspected here.
        "inspected": (bool(about) and not about.get("partial")) or not model.local_slots,
        "type": about.get("type"),
        "size": about.get("size"),
        "memory": _memory_of(workers),
        "load_progress": _rounded(model.load_progress),
        "expires_in": _rounded(model.expires_in(now)),
        "parameters": about.get("parameters"),
        "modified": mapping(about.get("details")).get("modified"),
        "quantisation": about.get("quantisation"),
        "features": shown,
        "chat": _chat_of(about, shown, known.config.generic_tools),
        "layout": next(filter(None, (worker.beat.layout for worker in workers)), None),
        "digest": digest[:DIGEST_DIGITS] or None,
        "shares": None if model.name == name else model.name,
        "error": error,
    }


def _state_and_error(registry: Registry, name: str, now: float) -> tuple[str, str | None]:
    """Returns the state of a name for operators, and the error of its model."""
    known, model = registry.names.known[name], registry.model(name)
    trouble = registry.unavailable(model, now, name)
    state = model.shown_state(registry.restart_limit)
    if state == "cold" and known.fault is not None:
        state = "failed"
    return state, trouble.message if trouble is not None else _last_error(model) or known.fault


def _chat_of(
    about: Mapping[str, object], features: Sequence[str], generic_tools: str
) -> dict[str, str | None] | None:
    """Returns the formats of a model's chats; None for a model without chats.

    `generic_tools`: the setting for chat templates without tools. It is shown as off if the model
    does not support answer formats.
    """
    chat = about.get("chat")
    if not isinstance(chat, Mapping) or not chat:
        return None
    generic = generic_tools if FORMAT in features else OFF
    return {"tools": chat.get("tools"), "thinking": chat.get("thinking"), "generic_tools": generic}


def _memory_of(workers: Sequence[Worker]) -> int | None:
    """Returns the bytes of weights, KV caches, prefixes and steps of all workers.

    Returns None if no worker has reported its memory.
    """
    totals = [worker.beat.memory.get("total") for worker in workers]
    known = [total for total in totals if type(total) is int]
    return sum(known) if known else None


def _shown_features(features: object, prefix_cache: str) -> list[str]:
    """Returns the features of a model; the prefix tree only if it is enabled."""
    names = features if isinstance(features, list | tuple) else ()
    return [name for name in names if name != "tree" or prefix_cache == "tree"]


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def _last_error(model: Model) -> str | None:
    """Returns why the model's last worker could not load it. The next request clears this error."""
    return None if model.last_error is None else str(model.last_error.get("message", ""))
