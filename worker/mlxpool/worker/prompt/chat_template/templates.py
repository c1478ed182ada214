"""The chat templates of a model: the choice of a template, and its variables.

A template sees only the messages, the tools, the model's token names and `now`, so that the same
request gives the same prompt on every worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.common.protocol.chat import NO_TEMPLATE, joined
from mlxpool.worker.prompt.chat_template import output_format
from mlxpool.worker.weights.chat_template_files import DEFAULT, TOOL_USE, find_sources
from mlxpool.worker.weights.json_files import FileLookup
from mlxpool.worker.weights.special_tokens import token_names

if TYPE_CHECKING:
    from mlxpool.worker.prompt.chat_template.sandbox import Template

DEVELOPER = "developer"  # a role that some templates lack
MAX_TEMPLATE_CHARS = 2**18  # characters of a template; real templates have 20,000
NO_TOOLS = "the chat template of this model has no place for tools: leave `tools` out"


class ChatTemplates:
    """A model's templates by name; empty for a model that takes only plain text.

    `notes`: messages on oddities of the template files.
    """

    def __init__(
        self,
        templates: Mapping[str, Template],
        tokens: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.templates = dict(templates)
        self.tokens = dict(tokens or {})
        self.notes = notes

    @classmethod
    def from_folder(cls, path: FileLookup) -> ChatTemplates:
        """Reads the templates. Raises ModelLoadFailed if a file or a template cannot be read."""
        sources = find_sources(path)
        where = sources.where
        for name, source in sources.texts.items():
            if len(source) > MAX_TEMPLATE_CHARS:
                raise ModelLoadFailed(
                    f"{where}: chat template {name!r} has {len(source)} characters, at most"
                    f" {MAX_TEMPLATE_CHARS} are allowed"
                )
        return cls(compiled(sources.texts, where), token_names(path), sources.notes)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        now: float,
        think: bool | str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the text of a chat that `check_messages`, `check_tools`, `check_think` accepted.

        Raises BadRequest for a model without a template, and for tools that the template does not
        read; raises the errors of `output_format.variables` and `Template.render`.
        """
        template = self.template_for(bool(tools))
        if tools and not template.reads_tools:
            raise BadRequest(NO_TOOLS)
        accepted = messages if DEVELOPER in template.source else _as_system(messages)
        adapted = [template.adapted(message) for message in accepted]
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
        """Returns the template to use: `tool_use` for tools, else `default`, else the first."""
        preferred = (TOOL_USE, DEFAULT) if tools else (DEFAULT,)
        for name in (*preferred, *self.templates):
            if name in self.templates:
                return self.templates[name]
        raise BadRequest(NO_TEMPLATE)

    def prompts_generation(self, tools: bool) -> bool:
        """Returns whether the template's source has `add_generation_prompt`."""
        return "add_generation_prompt" in self.template_for(tools).source


def compiled(sources: Mapping[str, str], where: object = "the model") -> dict[str, Template]:
    """Compiles templates by name. Raises ModelLoadFailed on failure.

    `where`: the source of the templates, for error messages.
    """
    if not sources:
        return {}
    # This imports jinja2; a model without a template does not need it.
    from mlxpool.worker.prompt.chat_template.sandbox import Template

    return {
        name: Template(source, f"{where}: chat template {name!r}")
        for name, source in sources.items()
    }


def _as_system(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns messages with role developer as system messages, for templates without this role.

    Such messages at the beginning of a chat are joined with the system message, because templates
    take only one system message.
    """
    if all(message["role"] != DEVELOPER for message in messages):
        return messages
    first = 0
    while first < len(messages) and messages[first]["role"] in ("system", DEVELOPER):
        first += 1
    texts = [joined(message.get("content")) for message in messages[:first]]
    begin = [{"role": "system", "content": "\n\n".join(filter(None, texts))}] if first else []
    rest = [
        {**message, "role": "system"} if message["role"] == DEVELOPER else message
        for message in messages[first:]
    ]
    return [*begin, *rest]
