"""The chat templates of a model: where they are kept, which one is taken, what it sees.

A template sees only the messages, the tools, the model's token names and `now`, so that the same
request gives the same prompt everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.common.protocol.chat import joined
from mlxpool.worker.prompt.chat_template import output_format
from mlxpool.worker.prompt.chat_template.sandbox import Contents, Template
from mlxpool.worker.weights.json_files import FileLookup, optional_json, read_file
from mlxpool.worker.weights.special_tokens import token_names

DEFAULT, TOOL_USE = "default", "tool_use"
JINJA_FILE = "chat_template.jinja"
JINJA_FOLDER = "additional_chat_templates"
MOST_SOURCE = 2**18  # characters of one template; real ones have 20,000
NO_TEMPLATE = (
    "this model has no chat template, so it takes no `messages`: send the finished text as `prompt`"
)


class Chat:
    """A model's templates by name, none for a model that takes finished text only."""

    def __init__(
        self, templates: Mapping[str, Template], tokens: Mapping[str, str] | None = None
    ) -> None:
        self.templates = dict(templates)
        self.tokens = dict(tokens or {})

    @classmethod
    def from_folder(cls, path: FileLookup) -> Chat:
        """Raises ModelLoadFailed for a file or a template that cannot be read."""
        where, sources = find_sources(path)
        for name, source in sources.items():
            if len(source) > MOST_SOURCE:
                raise ModelLoadFailed(
                    f"{where}: chat template {name!r} has {len(source)} characters, at most"
                    f" {MOST_SOURCE} are allowed"
                )
        templates = {
            name: Template(source, f"{where}: chat template {name!r}")
            for name, source in sources.items()
        }
        return cls(templates, token_names(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        now: float,
        think: bool | str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text of a chat that `check_messages`, `check_tools`, `check_think` let pass.

        Raises BadRequest for a model without a template, see `chat_format.variables`, and
        `Template.render`.
        """
        template = self.template_for(bool(tools))
        shown = [_shown(message, template.contents) for message in messages]
        variables = {
            **self.tokens,
            **output_format.variables(think, template.source),
            "messages": shown,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render(variables, now)

    def template_for(self, tools: bool) -> Template:
        """`tool_use` where there are tools, else `default`, else the first there is."""
        wanted = (TOOL_USE, DEFAULT) if tools else (DEFAULT,)
        for name in (*wanted, *self.templates):
            if name in self.templates:
                return self.templates[name]
        raise BadRequest(NO_TEMPLATE)

    def prompts_generation(self, tools: bool) -> bool:
        """Whether the text may depend on `add_generation_prompt`."""
        return "add_generation_prompt" in self.template_for(tools).source


def _shown(message: Mapping[str, Any], contents: Contents) -> Mapping[str, Any]:
    """The message with its content as the template takes it."""
    content = message.get("content")
    if isinstance(content, list | tuple) and contents is Contents.TEXT:
        return {**message, "content": joined(content)}
    if isinstance(content, str) and contents is Contents.PARTS:
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def find_sources(path: FileLookup) -> tuple[Path, dict[str, str]]:
    """The first place that has templates, and these by name.

    chat_template.jinja with the folder of further ones, tokenizer_config.json,
    chat_template.json; an empty map when there are none.
    """
    single, folder = path / JINJA_FILE, path / JINJA_FOLDER
    files = {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    if single.is_file():
        files[DEFAULT] = single
    if files:
        where = single if single.is_file() else folder
        return where, {name: _read_text(file) for name, file in files.items()}
    for file in (path / "tokenizer_config.json", path / "chat_template.json"):
        found = _named(file, optional_json(file).get("chat_template"))
        if found:
            return file, found
    return single, {}


def _read_text(file: Path) -> str:
    try:
        return read_file(file).decode()
    except UnicodeDecodeError as error:
        raise ModelLoadFailed(f"{file} is not UTF-8: {error}") from error


def _has_name(entry: object) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("name"), str)


def _named(file: Path, value: object) -> dict[str, str]:
    """One template, a list of {name, template} or a map of both."""
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
