"""Finds a model's chat templates in its files, by precedence of the files. No MLX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.json_files import FileLookup, is_present, optional_json, read_file

DEFAULT, TOOL_USE = "default", "tool_use"
JINJA_FILE = "chat_template.jinja"
JSON_FILE = "chat_template.json"
JINJA_FOLDER = "additional_chat_templates"
SETTINGS = "tokenizer_config.json"


class TemplateSources(Struct, frozen=True):
    """A model's chat templates by name, their file or folder, and notes on contradictions."""

    where: Path
    texts: Mapping[str, str]
    notes: tuple[str, ...] = ()


def named_files(path: FileLookup) -> list[Path]:
    """Returns the files of additional templates, without hidden files such as macOS creates."""
    files = sorted((path / JINJA_FOLDER).glob("*.jinja"))
    return [file for file in files if not file.name.startswith(".")]


def all_regular(path: FileLookup) -> bool:
    """Returns whether all template files are regular: no dangling link, folder, pipe or device."""
    files = (path / JINJA_FILE, path / JSON_FILE, *named_files(path))
    return all(file.is_file() or not os.path.lexists(file) for file in files)


def find_sources(path: FileLookup) -> TemplateSources:
    """Returns the templates of the first file that has templates; may be empty.

    transformers uses the same order: chat_template.jinja with the folder of additional templates,
    tokenizer_config.json, chat_template.json. Raises ModelLoadFailed with the name of an unreadable
    file.
    """
    single = path / JINJA_FILE
    files = {file.stem: file for file in named_files(path)}
    if is_present(single):
        files[DEFAULT] = single
    for file in (path / SETTINGS, path / JSON_FILE):
        templates = _parsed(file, optional_json(file).get("chat_template"))
        if files:
            return _of_jinja_files(path, files, templates)
        if templates:
            return TemplateSources(file, templates, tuple(_notes(templates)))
    return TemplateSources(single, {})


def _of_jinja_files(
    path: FileLookup, files: Mapping[str, Path], settings: Mapping[str, str]
) -> TemplateSources:
    """Returns the templates of Jinja files.

    `settings`: the templates of tokenizer_config.json. If `files` have no default template, the
    default template of `settings` is added. All other templates of `settings` are ignored.
    """
    texts = {name: _read_text(file) for name, file in files.items()}
    notes = []
    if DEFAULT not in texts and DEFAULT in settings:
        texts[DEFAULT] = settings[DEFAULT]
    differ = [name for name, text in settings.items() if texts.get(name) != text]
    if differ:
        notes.append(
            f"{JINJA_FILE if DEFAULT in files else JINJA_FOLDER} and chat_template of {SETTINGS}"
            f" differ ({', '.join(sorted(differ))}): the first is taken, as transformers does;"
            " remove the other"
        )
    where = path / (JINJA_FILE if DEFAULT in files else JINJA_FOLDER)
    return TemplateSources(where, texts, (*notes, *_notes(texts)))


def _notes(texts: Mapping[str, str]) -> list[str]:
    if DEFAULT in texts or not texts:
        return []
    return [
        f"no chat template is named {DEFAULT!r}: {next(iter(texts))!r} is taken, and transformers"
        " takes none"
    ]


def _read_text(file: Path) -> str:
    try:
        return read_file(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelLoadFailed(f"{file} is not UTF-8: {error}") from error


def _has_name(entry: object) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("name"), str)


def _parsed(file: Path, value: object) -> dict[str, str]:
    """Returns templates by name, from a text, a list of {name, template}, or a map by name.

    Raises ModelLoadFailed for any other value.
    """
    if isinstance(value, list) and all(_has_name(entry) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if value is None or isinstance(value, str):
        return {} if value is None else {DEFAULT: value}
    if isinstance(value, Mapping):
        texts = {name: text for name, text in value.items() if isinstance(text, str)}
        if len(texts) == len(value) and all(isinstance(name, str) for name in texts):
            return texts
    raise ModelLoadFailed(
        f"{file}: chat_template must be text or a list of {{name, template}}, both text"
    )
