"""The commands that change a running pool: load, unload, drain, restart, cancel, reload, stop.

Each command sends one message to the broker's admin socket.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from typing import Any

from mlxpool.cli import admin
from mlxpool.cli.admin import ask
from mlxpool.cli.formatting import duration, json_text
from mlxpool.cli.request_flags import add_connect_timeout, client_of
from mlxpool.common.errors import BadRequest
from mlxpool.common.escapes import escape_line
from mlxpool.common.protocol import frames

ID_DIGITS = 2 * frames.ID_BYTES
MAX_LISTED = 1000  # the most requests in an answer to `requests`
SHOWN_IDS = 5  # the most ids in an error
CHANGES = (  # keys of an answer to `reload`, with their texts
    ("limits", "changed settings"),
    ("added", "new models"),
    ("gone", "models that are gone"),
    ("changed", "changed models"),
    ("keys", "changed keys"),
    ("restart_needed", "only a restart changes"),
)
SLOT = re.compile(r"/\d+$")  # the end of a slot's name; no model's name ends so


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the commands that change a running pool."""
    commands.add_parser(
        "reload",
        parents=[common],
        help="read models, limits and keys again",
        description="Makes the broker read models, limits and keys again, as SIGHUP does.",
    ).set_defaults(run=reload)
    commands.add_parser(
        "stop",
        parents=[common],
        help="end the broker and its workers",
        description="Ends the broker for good: its streams end. To restart it, send it SIGTERM;"
        " its streams then go on in the next broker.",
    ).set_defaults(run=stop)
    sub = commands.add_parser("load", parents=[common], help="start a model's workers now")
    sub.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    sub.add_argument(
        "--wait",
        action="store_true",
        help="wait until the model is loaded; exit code 1 if the load fails",
    )
    sub.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=math.inf,
        help="with --wait: time after which the command ends with exit code 1 (default: no limit)",
    )
    add_connect_timeout(sub)
    sub.set_defaults(run=load)
    sub = commands.add_parser(
        "unload", parents=[common], help="end a model's workers and their streams"
    )
    sub.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    sub.set_defaults(run=unload)
    sub = commands.add_parser(
        "drain",
        parents=[common],
        help="let a worker, a model or the whole pool finish, then end it",
        description="The slot of a drained worker gets a new worker: of a pinned model at once,"
        " else when there is work for it; a drained model stays closed until `mlxpool load`."
        " Without TARGET the pool finishes what it has accepted, then the broker ends.",
    )
    sub.add_argument(
        "target", nargs="?", metavar="TARGET", help="a slot (demo/0) or a model (demo)"
    )
    sub.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        help="time for which streams may go on; then streams of a worker move to another worker,"
        " and other streams end with `draining` (default: drain_grace, 30)",
    )
    sub.set_defaults(run=drain)
    sub = commands.add_parser(
        "restart",
        parents=[common],
        help="replace a worker; its streams go on in the next worker",
    )
    sub.add_argument("slot", metavar="SLOT", help="a slot in `mlxpool ps`, such as demo/0")
    sub.set_defaults(run=restart)
    sub = commands.add_parser("cancel", parents=[common], help="cancel a request, a job or a batch")
    named = sub.add_mutually_exclusive_group(required=True)
    named.add_argument(
        "id",
        metavar="ID",
        nargs="?",
        help="cancel the request with this id of `mlxpool requests`, or with these first digits",
    )
    named.add_argument("--job", metavar="KEY", help="cancel your job with this key")
    named.add_argument(
        "--batch", metavar="KEY", help="cancel your batch with this key, and all its lines"
    )
    add_connect_timeout(sub)
    sub.set_defaults(run=cancel)


def _show(options: argparse.Namespace, answer: Mapping[str, Any], *lines: str) -> int:
    print(json_text(answer) if options.json else "\n".join(map(escape_line, lines)))
    return 0


def load(options: argparse.Namespace) -> int:
    patience = max(admin.ANSWER_TIMEOUT, options.connect_timeout or 0.0)
    answer = ask(options.admin_target, "load", {"model": options.model}, timeout=patience)
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
    drained, seconds = answer["draining"], duration(answer["timeout_ms"] / 1000)
    text = f"{drained}: draining, {seconds} at most; {_after_drain(body, drained)}"
    return _show(options, answer, text)


def _after_drain(body: Mapping[str, Any], drained: str) -> str:
    """Returns a text about the state after a drain, from the answer's body."""
    if "model" in body:
        return f"closed to new requests until `mlxpool load {drained}`"
    return "then its slot is free for a new worker" if "slot" in body else "then the broker ends"


def restart(options: argparse.Namespace) -> int:
    answer = ask(options.admin_target, "restart", {"slot": options.slot})
    return _show(options, answer, f"{answer['slot']}: restarting")


def cancel(options: argparse.Namespace) -> int:
    """Cancels a request; exit code 1 if no request has this id."""
    if options.batch is not None:
        import mlxpool.cli.batch_actions as batches

        return batches.change(options, options.batch, "cancel")
    if options.job is not None:
        with client_of(options) as client:
            fate = client.cancel(key=options.job)
        return _show(options, fate, f"{options.job}: was {fate['state']}, {fate['pos']} tokens")
    text = options.id.lower()
    if not re.fullmatch(f"[0-9a-f]{{1,{ID_DIGITS}}}", text):
        raise BadRequest(
            f"ID is the id of a request or its first digits, 1 to {ID_DIGITS} hexadecimal digits;"
            f" got {options.id!r:.80} (`mlxpool requests` lists ids; of a job give --job KEY)"
        )
    whole = text if len(text) == ID_DIGITS else _whole_id(options, text)
    answer = ask(options.admin_target, "cancel", {}, bytes.fromhex(whole))
    _show(options, answer, f"{whole}: was {answer['state']}, {answer['pos']} tokens sent")
    return 1 if answer["state"] == "unknown" else 0


def _whole_id(options: argparse.Namespace, prefix: str) -> str:
    """Returns the id of the only live request whose id begins with these hexadecimal digits.

    Raises BadRequest if no request matches, or several.
    """
    known: list[str] = [row["id"] for row in ask(options.admin_target, "requests")["requests"]]
    matches = [ident for ident in known if ident.startswith(prefix)]
    if len(matches) > 1:
        shown = ", ".join(matches[:SHOWN_IDS]) + ", …" * (len(matches) > SHOWN_IDS)
        raise BadRequest(f"{len(matches)} live requests begin with {prefix}: {shown}")
    if len(known) >= MAX_LISTED:
        raise BadRequest(f"{MAX_LISTED:,} or more requests are live; give all {ID_DIGITS} digits")
    if not matches:
        raise BadRequest(
            f"no live request begins with {prefix}; `mlxpool requests` lists them; of a job give"
            " --job KEY"
        )
    return matches[0]


def reload(options: argparse.Namespace) -> int:
    """Reloads the settings, and prints the changes. The broker's error names faulty settings."""
    answer = admin.reload(options.admin_target)
    changes = [f"{words}: {', '.join(answer[key])}" for key, words in CHANGES if answer.get(key)]
    return _show(options, answer, "reloaded", *(changes or ["the settings are as they were"]))


def stop(options: argparse.Namespace) -> int:
    answer = ask(options.admin_target, "stop")
    return _show(options, answer, "the broker is stopping")
