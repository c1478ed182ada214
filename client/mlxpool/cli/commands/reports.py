"""`mlxpool ps`, `models` and `requests`: tables of answers of the broker's admin socket.

By default `ps` and `models` have a few columns, which fit 100 characters; with --wide they have all
columns. A narrower terminal shows only the columns that fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mlxpool.cli.admin import ask
from mlxpool.cli.columns import Column, joined
from mlxpool.cli.formatting import duration, feature, jobs_line, json_text, kv_cache, share, size
from mlxpool.cli.load_progress import phase_seconds
from mlxpool.cli.style import UNBOUNDED, Cells, print_table, width_of
from mlxpool.common.load_times import activity

PS_COLUMNS = (
    "Prints a row for each worker. SLOT: its name for logs, drain and restart; PHASE: its activity;"
    " FOR: the duration of the activity; RUN: requests that it computes; WAIT: requests in the"
    " queue of its model; RESTARTS: restarts of the slot."
)


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `ps`, `models` and `requests`."""
    for name, text, about, action in (
        ("ps", "show workers: state, phase, memory, last end", PS_COLUMNS, ps),
        ("models", "show the models: state, size, context, errors", None, models),
        ("requests", "show live requests and their ids", None, requests),
    ):
        parser = commands.add_parser(name, parents=[common], help=text, description=about)
        parser.set_defaults(run=action)
        if action is not requests:
            parser.add_argument("--wide", action="store_true", help="show all columns")


# ---- ps ------------------------------------------------------------------------------------------

PS = (
    Column("SLOT", 0, "text"),
    Column("PID", 6),
    Column("GPU", wide=True),  # hidden if no worker has a GPU
    Column("STATE", 0),
    Column("PHASE", 5),
    Column("FOR", 8),
    Column("RUN", 1),
    Column("WAIT", 2),
    Column("WEIGHTS", wide=True),
    Column("KV CACHE", wide=True),
    Column("PREFIX CACHE", wide=True),
    Column("COMPUTE", wide=True),
    Column("MEMORY", 3),  # the sum of the four columns before it
    Column("RSS", wide=True),
    Column("DRAFTS", wide=True),
    Column("RESTARTS", 4),
    Column("LAST EXIT", wide=True),
)
DRAINED = ("draining", "drained")  # states in which a model accepts no requests
MEMORY = {  # columns, by their keys in a worker's memory report
    "weights": "WEIGHTS",
    "kv": "KV CACHE",
    "prefix": "PREFIX CACHE",
    "compute": "COMPUTE",
    "total": "MEMORY",
    "rss": "RSS",
}


def ps(options: argparse.Namespace) -> int:
    """Prints a line about the broker, a table row for each worker, and errors."""
    answer = ask(options.admin_target, "ps")
    if options.json:
        print(json_text(answer))
        return 0
    workers, broker, width = answer["workers"], answer["broker"], width_of(sys.stdout)
    parts = (
        f"broker {broker['pid']} {broker['state']}",
        f"up {duration(broker['uptime_s'])}",
        broker["run_dir"],
        *([f"status page {broker['metrics']}"] if broker.get("metrics") else []),
    )
    columns = [
        column
        for column in _columns(PS, options)
        if column.name != "GPU" or any(w.get("gpus") for w in workers)
    ]
    drained = {m["name"] for m in answer["models"] if m.get("state") in DRAINED}
    cells_of_rows = [
        cells
        for worker in workers
        for cells in (_worker_cells(worker, drained), *_rank_cells(worker))
    ]
    rows = [tuple(cells.get(column.name, "-") for column in columns) for cells in cells_of_rows]
    dumps = [f"{w['slot']}: stacks in {w['last_dump']}" for w in workers if w.get("last_dump")]
    print_table(
        columns,
        rows,
        above=[
            *joined(parts, width),
            *joined(_gateway(answer.get("gateway")), width),
            *joined(jobs_line(answer.get("jobs")), width),
        ],
        errors=[
            *([broker["trouble"]] if broker.get("trouble") else []),
            *(f"{m['name']}: {m['error']}" for m in answer["models"] if m.get("error")),
        ],
        notes=[
            *filter(None, [broker.get("slow_blas")]),
            *_drained(answer["models"]),
            *([] if options.wide else _last_exits(cells_of_rows)),
            *dumps,
        ],
        width=_width(options),
    )
    return 0


def _gateway(gateway: Mapping[str, Any] | None) -> Sequence[str]:
    """Returns the parts of the line about the broker's gateway; () if there is no gateway."""
    if gateway is None:
        return ()
    restarts, last = gateway["restarts"], gateway["last_exit"]
    return (
        f"gateway {gateway['pid'] or '-'} {gateway['state']}",
        *([f"up {duration(gateway['uptime_s'])}"] if gateway["uptime_s"] is not None else []),
        gateway["url"],
        f"rss {size(gateway['rss'])}",
        *([f"{restarts} restarts, last exit: {last}"] if restarts else []),
    )


def _columns(columns: Sequence[Column], options: argparse.Namespace) -> Sequence[Column]:
    return [column for column in columns if options.wide or not column.wide]


def _width(options: argparse.Namespace) -> int | None:
    """Returns the width of a table; None means the width of standard output."""
    return UNBOUNDED if options.wide else None


def _drained(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines about models that accept no requests because an operator has drained them."""
    return [
        f"{m['name']} is {m['state']}: closed to new requests until `mlxpool load {m['name']}`"
        for m in models
        if m.get("state") in DRAINED
    ]


def _last_exits(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns a line for each worker's last exit; only wide tables have a column for it."""
    exits = ((cells["SLOT"], cells.get("LAST EXIT", "-")) for cells in rows)
    return [f"{slot}: last exit: {last}" for slot, last in exits if last != "-"]


def _rank_cells(worker: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """Returns the cells, by column, of each rank of a group from rank 1 on.

    Cells about the whole worker are left out.
    """
    gpus = dict(enumerate(worker.get("gpus") or ()))
    return [
        {
            "SLOT": f"  rank {rank['rank']}",
            "PID": str(rank["pid"] or "-"),
            "GPU": gpus.get(rank["rank"], "-"),
            "PHASE": rank["phase"],
            "FOR": duration(rank["progress_age_ms"] / 1000),
            "RSS": size(rank["rss"]),
        }
        for rank in worker.get("ranks", ())
    ]


def _phase(worker: Mapping[str, Any]) -> tuple[str, float]:
    """Returns the activity of a worker, and how long it has lasted, in seconds."""
    seconds = worker.get("phase_age_ms", 0) / 1000
    loading = worker.get("load_phase") if worker.get("phase") == "load" else None
    return (
        activity(worker.get("phase") or "-", loading or ""),
        seconds if loading is None else phase_seconds(worker),
    )


def _worker_cells(worker: Mapping[str, Any], drained: Collection[str]) -> Mapping[str, str]:
    """Returns the table cells of a worker, by column.

    The cells of a group have the GPU of its first rank. A slot without a worker is shown as drained
    if its model is drained.
    """
    state = "suspect" if worker.get("suspect") else worker["state"]
    memory = worker.get("memory") or {}
    phase, seconds = _phase(worker)
    return {
        "SLOT": worker["slot"],
        "PID": str(worker.get("pid") or "-"),
        "GPU": next(iter(worker.get("gpus") or ()), "-"),
        "STATE": "drained" if state == "none" and worker.get("model") in drained else state,
        "PHASE": phase,
        "FOR": duration(seconds),
        "RUN": str(worker.get("running", 0)),
        "WAIT": str(worker.get("waiting", 0)),
        **{name: size(memory.get(key)) for key, name in MEMORY.items()},
        "DRAFTS": share(worker.get("acceptance")),
        "RESTARTS": str(worker.get("restarts", 0)),
        "LAST EXIT": worker.get("last_exit") or "-",
    }


# ---- models --------------------------------------------------------------------------------------

MODELS = (
    Column("NAME", 0, "text"),
    Column("STATE", 0),
    Column("TYPE", 3, "text"),
    Column("SIZE", 1),
    Column("QUANTISATION", 5),
    Column("CONTEXT", 2),
    Column("QUEUED", 4),
    Column("KV CACHE", wide=True),
    Column("DIGEST", wide=True),
    Column("SUPPORTS", wide=True),
)


def models(options: argparse.Namespace) -> int:
    """Prints a table row for each model, and the errors of unavailable models."""
    answer = ask(options.admin_target, "models")
    if options.json:
        print(json_text(answer))
        return 0
    rows = answer["models"]
    columns = _columns(MODELS, options)
    print_table(
        columns,
        [_model_row(model)[: len(columns)] for model in rows],
        errors=[f"{m['name']} cannot be had: {m['error']}" for m in rows if m.get("error")],
        notes=[f"{m['name']} shares the workers of {m['shares']}" for m in rows if m.get("shares")],
        width=_width(options),
    )
    return 0


def _model_row(model: Mapping[str, Any]) -> Cells:
    return (
        model["name"],
        model["state"],
        model.get("type") or "-",
        size(model.get("size")),
        model.get("quantisation") or "-",
        str(model["context"] or "-"),
        str(model["queued"]),
        kv_cache(model.get("layout")),
        model.get("digest") or "-",
        " ".join(map(feature, model.get("features") or ())) or "-",
    )


# ---- requests ------------------------------------------------------------------------------------

REQUESTS = (
    Column("ID", 0, "id"),
    Column("MODEL", 1, "text"),
    Column("STATE", 0),
    Column("TOKENS", 2),
    Column("AGE", 3),
)


def requests(options: argparse.Namespace) -> int:
    """Prints a table row for each live request; narrow tables have prefixes of ids."""
    answer = ask(options.admin_target, "requests")
    if options.json:
        print(json_text(answer))
        return 0
    rows = [
        (row["id"], row["model"], row["state"], str(row["tokens"]), duration(row["age_s"]))
        for row in answer["requests"]
    ]
    print_table(REQUESTS, rows)
    return 0
