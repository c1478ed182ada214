"""`mlxpool check`: a model's properties, its requirements and its problems. Needs no broker."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mlxpool.cli.formatting import feature, json_text, size, table
from mlxpool.cli.pool_flags import add_settings, settings_of
from mlxpool.common.escapes import escape_line
from mlxpool.common.records import as_map

SOUND, UNSOUND = 0, 1
MAX_SHOWN = 40  # the most shown problems; a wrong size in config.json causes one for every tensor
DIAGNOSE_MODULE = "mlxpool.worker.diagnose.check"  # runs as a process: the client imports no worker


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `check`."""
    parser = commands.add_parser(
        "check",
        parents=[common],
        help="examine a model without serving it",
        description="Shows the properties of a model, its needs, and everything that is wrong with"
        " it. Exit code 0: it is sound and can run here; 1: it is not sound, or cannot run here.",
    )
    parser.add_argument(
        "name", metavar="MODEL", help="a name in the settings, a folder or a reference"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="length of the context for which memory is computed (default: the model's own)",
    )
    add_settings(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the report. Returns the exit code."""
    report = diagnose(options)
    if options.json:
        print(json_text(report))
    else:
        print("\n".join(map(escape_line, lines(report))))
    fits = report.get("machine", {}).get("fits", True)
    return UNSOUND if report["problems"] or not fits else SOUND


def diagnose(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the report that a process with the worker's code makes; docs/models.md shows one.

    Raises ValueError if the name is neither in the settings nor a path.
    """
    import subprocess

    settings = settings_of(options)
    spec = settings.models.get(options.name) or _by_path(options.name, settings.models)
    if options.context is not None:
        if options.context < 1:
            raise ValueError(f"--context must be at least 1, got {options.context}")
        spec = replace(spec, context=options.context)
    question = {
        "name": options.name,
        "model": as_map(spec),
        "machine": True,
        "memory_limit": settings.memory_limit,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", DIAGNOSE_MODULE],
        input=json.dumps(question) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode or not done.stdout:
        raise OSError(f"the process that looks at the model ended with code {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _by_path(text: str, known: Mapping[str, Any]) -> Any:
    from mlxpool.common.config.schema import ModelConfig

    if not text:
        raise ValueError("MODEL must not be empty; `.` is the folder you are in")
    if not ("/" in text or ":" in text or Path(text).exists()):
        raise ValueError(
            f"there is no model {text!r} in the settings and no such file here; known:"
            f" {', '.join(known)}; --config names the settings, ./{text} would be a folder"
        )
    return ModelConfig(path=text)


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report as lines of text."""
    model, memory, machine = (report.get(part) for part in ("model", "memory", "machine"))
    rows = [("name", report["name"]), ("path", report["path"])]
    if model:
        rows += _model_rows(model)
    if memory:
        rows += _memory_rows(memory)
    if machine:
        rows += _machine_rows(machine)
    yield from table(rows)
    yield from (f"note: {words}" for words in report.get("notes", ()))
    problems = report["problems"]
    yield ""
    if problems:
        yield f"{len(problems)} problem{'s' * (len(problems) > 1)}:"
    else:
        notes = "it can be used, see the notes" if report.get("notes") else ""
        yield notes or "nothing is wrong with it"
    yield from (f"  - {words}" for words in problems[:MAX_SHOWN])
    if len(problems) > MAX_SHOWN:
        yield f"  … and {len(problems) - MAX_SHOWN} more, which --json lists"
    if machine and not machine["fits"]:
        yield "it cannot run on this machine:"
        yield from (f"  - {words}" for words in machine["why"])


def _model_rows(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("type", f"{model['type']}, {_figure(model['layers'])} layers"),
        ("parameters", _figure(model["parameters"])),
        ("weights", f"{size(model['size'])}, {model['quantisation'] or 'none'}"),
        ("context", f"{model['context']:,} tokens"),
        ("tokenizer", f"{model['tokenizer']}; the model has rows for {model['vocabulary']:,} ids"),
        *_encoder_rows(model),
        ("chat templates", ", ".join(model["templates"]) or _without_template(model)),
        ("end of text", ", ".join(map(str, model["eos_ids"])) or "none"),
        ("supports", ", ".join(map(feature, model["features"]))),
        ("digest", model["digest"]),
    ]


def _encoder_rows(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the table rows that only models that embed, rerank or classify have."""
    rows = [("dimensions", f"{model['dimensions']:,}")] if model.get("dimensions") else []
    for key in ("prompts", "labels"):
        if model.get(key):
            rows.append((key, ", ".join(model[key])))
    return rows


def _without_template(model: Mapping[str, Any]) -> str:
    if "dimensions" in model:
        return "none: it generates no text"
    if model["type"] == "counting":
        return "none: it makes a line of each message, `ROLE: CONTENT`"
    return "none: it takes no messages, only a prompt"


def _figure(value: int | None) -> str:
    """Returns a number as text; "-" if it is only known after the model is loaded."""
    return "-" if value is None else f"{value:,}"


def _kind_of_kv(kv: str) -> str:
    """Returns a note if the KV cache has another number format than the model; else ""."""
    return "" if kv == "auto" else f", kv = {kv}"


def _memory_rows(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    sequences = f"{memory['sequences']} of {memory['context']:,} tokens"
    return [
        ("weights in memory", size(memory["weights"])),
        ("cache, a token", f"{size(memory['token'])}{_kind_of_kv(memory['kv'])}"),
        ("cache, constant", size(memory["fixed"])),
        ("cache, a sequence", f"{size(memory['sequence'])} with {memory['context']:,} tokens"),
        ("cache, all", f"{size(memory['all_sequences'])}, {sequences}"),
        ("prefix cache", f"up to {size(memory['prefix_cache'])}"),
        *(
            [("  on disk", f"up to {size(memory['prefix_disk'])}")]
            if memory.get("prefix_disk")
            else []
        ),
    ]


def _machine_rows(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "limit" not in machine:
        return []
    return [
        (
            "machine",
            f"{machine['device']}, {size(machine['total'])}, {size(machine['free'])} free now",
        ),
        ("a worker may take", f"{size(machine['limit'])}, the pool {size(machine['pool_limit'])}"),
        ("longest that fits", f"{_figure(machine['longest'])} tokens"),
    ]
