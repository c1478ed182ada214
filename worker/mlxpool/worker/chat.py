"""Messages -> prompt text, through the model's own chat template in a sandbox.

A template is untrusted input: it runs in jinja2's immutable sandbox and sees only the messages,
the model's token names and `now`, so that the same request gives the same prompt everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker.files import Folder

ROLES = ("system", "user", "assistant", "tool")
NO_TEMPLATE = (
    "this model has no chat template, so it takes no `messages`: send the finished text as `prompt`"
)


class _Refused(Exception):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """One model's chat template; `source` is None for a model that has none."""

    def __init__(self, source: str | None, tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.tokens = dict(tokens or {})

    @classmethod
    def from_folder(cls, path: Folder) -> Template:
        """The template that the folder's files name; ModelLoadFailed for an unreadable file."""
        settings = _read_json(path / "tokenizer_config.json")
        return cls(find_source(path, settings), token_names(settings))

    def render(self, messages: object, *, now: float, add_generation_prompt: bool = True) -> str:
        """The prompt text of a chat; `now` in seconds since 1970, shown to the template as UTC.

        Raises BadRequest for malformed messages, a missing or broken template, and with the
        template's own words when it refuses the messages.
        """
        checked = check_messages(messages)
        moment = datetime.fromtimestamp(now, UTC)
        try:
            return self._compiled.render(
                **self.tokens,
                messages=checked,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=moment.strftime,
            )
        except _Refused as refusal:
            raise BadRequest(f"the chat template refused the messages: {refusal}") from None
        except jinja2.TemplateError as error:
            raise BadRequest(f"the chat template failed: {error}") from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise BadRequest(f"the chat template failed: {error}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if self.source is None:
            raise BadRequest(NO_TEMPLATE)
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise BadRequest(
                f"the model's chat template is broken at line {error.lineno}: {error.message}"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes <, > and & for HTML, which a model never saw."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def find_source(path: Folder, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json, else chat_template.json, else None."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    return _named(settings) or _named(_read_json(path / "chat_template.json"))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadFailed(f"{file} is not UTF-8: {error}") from error


def _named(settings: Mapping[str, Any]) -> str | None:
    found = settings.get("chat_template")
    if isinstance(found, list):
        by_name = {str(entry.get("name")): entry.get("template") for entry in found}
        found = by_name.get("default", next(iter(by_name.values()), None))
    return found if isinstance(found, str) else None


def token_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like of a tokenizer_config.json: name -> literal text."""
    names: dict[str, str] = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text
    return names


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelLoadFailed(f"{file} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages with their text parts joined; other keys go to the template as they are.

    Raises BadRequest naming the message's index and what is wrong with it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadRequest("`messages` must be a list of at least one {role, content}")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages[{index}] must be a map with `role` and `content`")
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"messages[{index}].role is {role!r}, must be one of {', '.join(ROLES)}")
    return {**message, "role": role, "content": _content(index, message.get("content"))}


def _content(index: int, content: object) -> str:
    if isinstance(content, list | tuple):
        return "".join(_part(index, number, part) for number, part in enumerate(content))
    if not isinstance(content, str):
        raise BadRequest(
            f"messages[{index}].content must be text or a list of text parts, "
            f"not {type(content).__name__}"
        )
    return content


def _part(index: int, number: int, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise BadRequest(
            f"messages[{index}].content[{number}] must be {{type: 'text', text: ...}}: "
            "this model takes text only"
        )
    return text
