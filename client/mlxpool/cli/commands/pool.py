"""The commands about a running pool: each sends one message to the broker's admin socket.

They are ps, models, requests, stats, load, unload, drain, restart, cancel, reload and stop.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.cli.admin import ask
from mlxpool.cli.formatting import count, duration, size, table
from mlxpool.common.errors import BadRequest
from mlxpool.common.escapes import escape_line
from mlxpool.common.protocol import frames

SLOT = re.compile(r"/\d+$")  # the end of a slot's name; no model's name ends so


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the commands about a running pool."""
    for name, text, action in (
        ("ps", "workers: state, phase, memory", ps),
        ("models", "the models that can be asked for", models),
        ("requests", "live requests and their ids", requests),
        ("reload", "have the broker read models, limits and keys anew, as SIGHUP does", reload),
        ("stop", "end the broker for good: its streams end (to restart it, send SIGTERM)", stop),
    ):
        commands.add_parser(name, parents=[common], help=text).set_defaults(run=action)
    sub = commands.add_parser("stats", parents=[common], help="counters since the broker's start")
    sub.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    sub.add_argument(
        "--count", type=count, default=0, metavar="N", help="with --watch: end after N pictures"
    )
    sub.set_defaults(run=stats)
    sub = commands.add_parser("load", parents=[common], help="start a model's workers now")
    sub.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    sub.add_argument(
        "--wait", action="store_true", help="until it is loaded; exit code 1 if it cannot be"
    )
    sub.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=math.inf,
        help="with --wait: exit code 1 if it is not loaded by then (default: no limit)",
    )
    sub.set_defaults(run=load)
    sub = commands.add_parser(
        "unload", parents=[common], help="end a model's workers and the streams they run"
    )
    sub.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    sub.set_defaults(run=unload)
    sub = commands.add_parser(
        "drain",
        parents=[common],
        help="let a worker, a model or the whole pool finish, then end it",
        description="A drained worker's slot is filled again, of a pinned model at once, else"
        " when there is work for it; a drained model stays closed until `mlxpool load`. Without"
        " TARGET the pool finishes what it has accepted, then the broker ends.",
    )
    sub.add_argument(
        "target", nargs="?", metavar="TARGET", help="a slot (demo/0) or a model (demo)"
    )
    sub.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        help="how long streams may go on where they are; then those of a worker move to another,"
        " others end with `draining` (default: drain_grace, 30)",
    )
    sub.set_defaults(run=drain)
    sub = commands.add_parser(
        "restart",
        parents=[common],
        help="replace a worker; its streams go on in the next one",
    )
    sub.add_argument("slot", metavar="SLOT", help="as `mlxpool ps` shows it, such as demo/0")
    sub.set_defaults(run=restart)
    sub = commands.add_parser("cancel", parents=[common], help="cancel a request")
    sub.add_argument("id", metavar="ID", help="32 hexadecimal digits, as `mlxpool requests` shows")
    sub.set_defaults(run=cancel)


def _show(options: argparse.Namespace, answer: Mapping[str, Any], *lines: str) -> int:
    print(json.dumps(answer) if options.json else "\n".join(map(escape_line, lines)))
    return 0


def ps(options: argparse.Namespace) -> int:
    """Print the broker, a row for each worker, and what is wrong."""
    answer = ask(options.admin_target, "ps")
    rows = [_worker_row(worker) for worker in answer["workers"]]
    head = (
        "SLOT", "PID", "STATE", "PHASE", "FOR", "RUN", "WAIT", "WEIGHTS", "KV", "PREFIX", "COMPUTE",
        "TOTAL", "RSS", "RESTARTS", "LAST EXIT",
    )  # fmt: skip
    broker = answer["broker"]
    line = (
        f"broker {broker['pid']} {broker['state']}, up {duration(broker['uptime_s'])},"
        f" {broker['run_dir']}"
    )
    problems = [f"{m['name']}: {m['error']}" for m in answer["models"] if m.get("error")]
    problems += [
        f"{w['slot']}: stacks in {w['last_dump']}" for w in answer["workers"] if w.get("last_dump")
    ]
    return _show(
        options, answer, line, *_gateway(answer.get("gateway")), *table([head, *rows]), *problems
    )


def _gateway(gateway: Mapping[str, Any] | None) -> list[str]:
    """The line of the gateway that the broker runs."""
    if gateway is None:
        return []
    restarts, last = gateway["restarts"], gateway["last_exit"]
    parts = [
        f"gateway {gateway['pid'] or '-'} {gateway['state']}",
        *([f"up {duration(gateway['uptime_s'])}"] if gateway["uptime_s"] is not None else []),
        gateway["url"],
        f"rss {size(gateway['rss'])}",
        *([f"{restarts} restarts, last exit: {last}"] if restarts else []),
    ]
    return [", ".join(parts)]


def _worker_row(worker: Mapping[str, Any]) -> Sequence[str]:
    memory = worker.get("memory") or {}
    shown = ("weights", "kv", "prefix", "compute", "total", "rss")
    sizes = [size(memory.get(key)) for key in shown]
    return (
        worker["slot"],
        str(worker.get("pid") or "-"),
        "suspect" if worker.get("suspect") else worker["state"],
        worker.get("phase") or "-",
        duration(worker.get("phase_age_ms", 0) / 1000),
        str(worker.get("running", 0)),
        str(worker.get("waiting", 0)),
        *sizes,
        str(worker.get("restarts", 0)),
        worker.get("last_exit") or "-",
    )


def stats(options: argparse.Namespace) -> int:
    """Print the counters, one a line; with --watch a page each second."""
    if not options.watch:
        answer = ask(options.admin_target, "stats")
        return _show(options, answer, *_counters(answer))
    from mlxpool.cli.terminal import screen
    from mlxpool.cli.watch import snapshots

    if options.json:
        for snapshot in snapshots(options.admin_target, options.count):
            print(json.dumps(_stats_of(snapshot)), flush=True)
        return 0
    with screen() as terminal:
        for snapshot in snapshots(options.admin_target, options.count):
            terminal.show("\n".join(map(escape_line, _counters(_stats_of(snapshot)))))
    return 0


def _stats_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `stats`, from a snapshot of `watch`."""
    return {"broker": snapshot["broker"], **snapshot["stats"]}


def _counters(answer: Mapping[str, Any]) -> list[str]:
    found: dict[str, Any] = {}
    for name, value in answer.items():
        inner = value.items() if isinstance(value, Mapping) else None
        found |= (
            {f"{name}.{key}": one for key, one in inner} if inner is not None else {name: value}
        )
    widest = max(24, *map(len, found))
    return [f"{name:<{widest}} {_plain(value)}" for name, value in found.items()]


def _plain(value: Any) -> str:
    """A counter's value without Python's notation."""
    if isinstance(value, Mapping):
        return " ".join(one for many in value.values() for one in many) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def models(options: argparse.Namespace) -> int:
    """Print a row for each model."""
    answer = ask(options.admin_target, "models")
    rows = [_model_row(model) for model in answer["models"]]
    head = (
        "NAME", "STATE", "TYPE", "SIZE", "QUANTISATION", "CONTEXT", "QUEUED", "LAYOUT", "DIGEST",
        "SUPPORTS",
    )  # fmt: skip
    notes = [
        f"{model['name']} {verb} {model[key]}"
        for key, verb in (("error", "cannot be had:"), ("shares", "shares the workers of"))
        for model in answer["models"]
        if model.get(key)
    ]
    return _show(options, answer, *table([head, *rows]), *notes)


def _model_row(model: Mapping[str, Any]) -> Sequence[str]:
    return (
        model["name"],
        model["state"],
        model.get("type") or "-",
        size(model.get("size")),
        model.get("quantisation") or "-",
        str(model["context"] or "-"),
        str(model["queued"]),
        model.get("layout") or "-",
        model.get("digest") or "-",
        " ".join(model.get("features") or ()) or "-",
    )


def requests(options: argparse.Namespace) -> int:
    """Print a row for each live request."""
    answer = ask(options.admin_target, "requests")
    rows = [
        (r["id"], r["model"], r["state"], str(r["tokens"]), duration(r["age_s"]))
        for r in answer["requests"]
    ]
    return _show(options, answer, *table([("ID", "MODEL", "STATE", "TOKENS", "AGE"), *rows]))


def load(options: argparse.Namespace) -> int:
    answer = ask(options.admin_target, "load", {"model": options.model})
    if not options.wait:
        return _show(options, answer, f"{answer['model']}: starting")
    from mlxpool.cli.load_progress import wait_for

    loaded = wait_for(options.admin_target, options.model, options.timeout)
    return _show(options, answer, f"{loaded}: loaded")


def unload(options: argparse.Namespace) -> int:
    answer = ask(options.admin_target, "unload", {"model": options.model})
    return _show(options, answer, f"{answer['model']}: stopping")


def drain(options: argparse.Namespace) -> int:
    body: dict[str, Any] = {}
    if options.target:
        body["slot" if SLOT.search(options.target) else "model"] = options.target
    if options.timeout is not None:
        body["timeout_ms"] = round(options.timeout * 1000)
    answer = ask(options.admin_target, "drain", body)
    text = f"{answer['draining']}: draining, {duration(answer['timeout_ms'] / 1000)} at most"
    return _show(options, answer, text)


def restart(options: argparse.Namespace) -> int:
    answer = ask(options.admin_target, "restart", {"slot": options.slot})
    return _show(options, answer, f"{answer['slot']}: restarting")


def cancel(options: argparse.Namespace) -> int:
    """Cancel a request; exit code 1 if there is none with this id."""
    try:
        ident = bytes.fromhex(options.id)
    except ValueError:
        ident = b""
    if len(ident) != frames.ID_BYTES:
        raise BadRequest(f"ID must be {2 * frames.ID_BYTES} hexadecimal digits, got {options.id!r}")
    answer = ask(options.admin_target, "cancel", {}, ident)
    _show(options, answer, f"{options.id}: was {answer['state']}, {answer['pos']} tokens sent")
    return 1 if answer["state"] == "unknown" else 0


def reload(options: argparse.Namespace) -> int:
    answer = ask(options.admin_target, "reload")
    return _show(options, answer, "the broker reads its settings; its log says what changes")


def stop(options: argparse.Namespace) -> int:
    answer = ask(options.admin_target, "stop")
    return _show(options, answer, "the broker is stopping")
