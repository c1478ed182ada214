"""`mlxpool config`: the effective settings, the origin of each, and what is wrong with them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlxpool.cli.formatting import json_text, table
from mlxpool.cli.pool_flags import add_settings, flags_of, model_paths_of, settings_of
from mlxpool.common.escapes import CONTROLS, escape_line
from mlxpool.common.paths import config_file
from mlxpool.common.records import as_map

if TYPE_CHECKING:
    from mlxpool.common.config.origins import Setting

SOUND, UNSOUND = 0, 1


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `config show` and `config check`."""
    config = commands.add_parser("config", help="show or check the settings")
    verbs = config.add_subparsers(dest="verb", metavar="VERB", required=True)
    parser = verbs.add_parser(
        "show",
        parents=[common],
        help="every setting as it counts",
        description="The settings that `mlxpool serve` with the same flags, here and now, would"
        " have: flag > environment > file > default. As TOML.",
    )
    parser.add_argument("--origin", action="store_true", help="and where each comes from")
    add_settings(parser)
    parser.set_defaults(run=show)
    parser = verbs.add_parser(
        "check",
        parents=[common],
        help="whether a broker could start with them",
        description="Exit code 0: the settings are sound; 1: something is missing or unread;"
        " 2: a broker would refuse them.",
    )
    add_settings(parser)
    parser.set_defaults(run=check)


def _settings(options: argparse.Namespace) -> list[Setting]:
    from mlxpool.common.config import origins

    return origins.settings(config_file(options.config), flags_of(options), model_paths_of(options))


def show(options: argparse.Namespace) -> int:
    """Print the settings as JSON, or as TOML that can be read again."""
    found = _settings(options)
    if options.json:
        file = config_file(options.config)
        answer = {"file": str(file) if file else None, "settings": [as_map(one) for one in found]}
        print(json_text(answer))
    else:
        print("\n".join(as_toml(found, origin=options.origin)))
    return SOUND


def as_toml(found: Sequence[Setting], *, origin: bool) -> Iterator[str]:
    """The lines of a TOML file, a section for each table; `origin` adds comments."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for one in found:
        section, _, key = one.key.rpartition(".")
        # TOML has no null: what is not set is shown as a comment.
        text = f"{key} = {_value(one.value)}" if one.value is not None else f"# {key} is not set"
        sections.setdefault(section, []).append((text, f"# {one.origin}" if origin else ""))
    for number, (section, lines) in enumerate(sections.items()):
        if number:
            yield ""
        yield f"[{section}]"
        yield from table(lines)


def _value(value: Any) -> str:
    """A value in TOML: the same as in JSON, but other alphabets are not escaped."""
    return CONTROLS.sub(
        lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False)
    )


def check(options: argparse.Namespace) -> int:
    """Print missing models and unread variables. Raises ConfigError as a broker would."""
    from mlxpool.common.config import origins
    from mlxpool.common.transport import sockets

    loaded = settings_of(options)
    sockets.ipc(loaded.run_dir, "admin")
    problems = [
        f"models.{name}.path: there is no {path}"
        for name, path in origins.missing_paths(loaded.models).items()
    ]
    problems += [
        f"${name} is read by nobody" + (f"; did you mean ${near}?" if near else "")
        for name, near in origins.unread_variables().items()
    ]
    file = config_file(options.config)
    if options.json:
        models = sorted(loaded.models)
        answer = {"file": str(file) if file else None, "models": models, "problems": problems}
        print(json_text(answer))
    else:
        lines = [f"file: {file or 'none'}", f"models: {', '.join(sorted(loaded.models))}"]
        lines += problems or ["nothing is wrong with them"]
        print("\n".join(map(escape_line, lines)))
    return UNSOUND if problems else SOUND
