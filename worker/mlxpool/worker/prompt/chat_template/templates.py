"""The chat templates of a model: where they are stored, which one applies, which variables it has.

A template sees only the messages, the tools, the model's token names and `now`, so that the same
request gives the same prompt on every worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.common.protocol.chat import joined
from mlxpool.worker.prompt.chat_template import output_format
from mlxpool.worker.prompt.chat_template.sandbox import ContentForm, Template
from mlxpool.worker.weights.json_files import FileLookup, optional_json, read_file
from mlxpool.worker.weights.special_tokens import token_names

DEFAULT, TOOL_USE = "default", "tool_use"
JINJA_FILE = "chat_template.jinja"
JINJA_FOLDER = "additional_chat_templates"
MAX_TEMPLATE_CHARS = 2**18  # characters of one template; real ones have 20,000
NO_TOOLS = "the chat template of this model has no place for tools: leave `tools` out"
NO_TEMPLATE = (
    "this model has no chat template, so it takes no `messages`: send the finished text as `prompt`"
)


class ChatTemplates:
    """A model's templates by name; none for a model that takes finished text only."""

    def __init__(
        self, templates: Mapping[str, Template], tokens: Mapping[str, str] | None = None
    ) -> None:
        self.templates = dict(templates)
        self.tokens = dict(tokens or {})

    @classmethod
    def from_folder(cls, path: FileLookup) -> ChatTemplates:
        """Raises ModelLoadFailed for a file or a template that cannot be read."""
        where, sources = find_sources(path)
        for name, source in sources.items():
            if len(source) > MAX_TEMPLATE_CHARS:
                raise ModelLoadFailed(
                    f"{where}: chat template {name!r} has {len(source)} characters, at most"
                    f" {MAX_TEMPLATE_CHARS} are allowed"
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
        """The prompt text of a chat that `check_messages`, `check_tools`, `check_think` accepted.

        Raises BadRequest for a model without a template, for tools that the template does not
        read, and as `output_format.variables` and `Template.render` do.
        """
        template = self.template_for(bool(tools))
        if tools and not template.reads_tools:
            raise BadRequest(NO_TOOLS)
        adapted = [_adapted(message, template.content_form) for message in messages]
        variables = {
            **self.tokens,
            **output_format.variables(think, template.source),
            "messages": adapted,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render(variables, now)

    def template_for(self, tools: bool) -> Template:
        """The template `tool_use` when there are tools, else `default`, else the first one."""
        wanted = (TOOL_USE, DEFAULT) if tools else (DEFAULT,)
        for name in (*wanted, *self.templates):
            if name in self.templates:
                return self.templates[name]
        raise BadRequest(NO_TEMPLATE)

    def prompts_generation(self, tools: bool) -> bool:
        """Whether the text may depend on `add_generation_prompt`."""
        return "add_generation_prompt" in self.template_for(tools).source


def _adapted(message: Mapping[str, Any], form: ContentForm) -> Mapping[str, Any]:
    """The message with its content in the form that the template expects."""
    content = message.get("content")
    if isinstance(content, list | tuple) and form is ContentForm.TEXT:
        return {**message, "content": joined(content)}
    if isinstance(content, str) and form is ContentForm.PARTS:
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def find_sources(path: FileLookup) -> tuple[Path, dict[str, str]]:
    """The first file that has templates, and its templates by name; an empty map without any.

    Order: chat_template.jinja with the folder of further ones, tokenizer_config.json,
    chat_template.json.
    """
    single, folder = path / JINJA_FILE, path / JINJA_FOLDER
    files = {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    if single.is_file():
        files[DEFAULT] = single
    if files:
        where = single if single.is_file() else folder
        return where, {name: _read_text(file) for name, file in files.items()}
    for file in (path / "tokenizer_config.json", path / "chat_template.json"):
        found = _parse_templates(file, optional_json(file).get("chat_template"))
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


def _parse_templates(file: Path, value: object) -> dict[str, str]:
    """Templates by name from text, a list of {name, template}, or a map of name to template."""
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
