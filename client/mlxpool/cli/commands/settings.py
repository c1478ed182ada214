"""`mlxpool config`: the effective settings, their origins and their problems."""

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
    """Adds `config show` and `config check`."""
    config = commands.add_parser("config", help="show or check the settings")
    verbs = config.add_subparsers(dest="verb", metavar="VERB", required=True)
    parser = verbs.add_parser(
        "show",
        parents=[common],
        help="show the effective settings",
        description="Shows the settings that `mlxpool serve` with the same flags would have now"
        " and here, as TOML. Precedence: flag > environment > file > default.",
    )
    parser.add_argument("--origin", action="store_true", help="show the origin of each setting")
    add_settings(parser)
    parser.set_defaults(run=show)
    parser = verbs.add_parser(
        "check",
        parents=[common],
        help="check if a broker could start with the settings",
        description="Exit code 0: the settings are sound; 1: something is missing or unread;"
        " 2: a broker would refuse them.",
    )
    add_settings(parser)
    parser.set_defaults(run=check)


def _settings(options: argparse.Namespace) -> list[Setting]:
    from mlxpool.common.config import origins

    return origins.settings(config_file(options.config), flags_of(options), model_paths_of(options))


def show(options: argparse.Namespace) -> int:
    """Prints the settings as JSON, or as TOML that can be a settings file."""
    settings = _settings(options)
    if options.json:
        file = config_file(options.config)
        rows = [as_map(setting) for setting in settings]
        print(json_text({"file": str(file) if file else None, "settings": rows}))
    else:
        print("\n".join(as_toml(settings, origin=options.origin)))
    return SOUND


def as_toml(settings: Sequence[Setting], *, origin: bool) -> Iterator[str]:
    """Yields the lines of a TOML file, with a section for each table.

    If `origin` is set, a comment after each setting names its origin.
    """
    sections: dict[str, list[tuple[str, str]]] = {}
    for setting in settings:
        section, _, key = setting.key.rpartition(".")
        # TOML has no null: a setting without a value is shown as a comment.
        is_set = setting.value is not None
        text = f"{key} = {_value(setting.value)}" if is_set else f"# {key} is not set"
        sections.setdefault(section, []).append((text, f"# {setting.origin}" if origin else ""))
    for number, (section, lines) in enumerate(sections.items()):
        if number:
            yield ""
        yield f"[{section}]"
        yield from table(lines)


def _value(value: Any) -> str:
    """Returns a value in TOML: as in JSON, but letters outside ASCII are not escaped."""
    return CONTROLS.sub(
        lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False)
    )


def check(options: argparse.Namespace) -> int:
    """Prints missing models and unread variables. Raises ConfigError for wrong settings."""
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
