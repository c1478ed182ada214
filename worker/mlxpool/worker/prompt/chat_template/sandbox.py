"""One chat template: compiled in a sandbox, rendered to text.

A template is untrusted input. It runs in jinja2's immutable sandbox and sees only plain data. The
process that renders it has bounds of time and memory, see worker/preparation. The worker itself
only compiles templates, so the compilation must not evaluate any expression of a template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum, auto
from types import TracebackType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.common.protocol.chat import joined

MAX_MEMORY = 2**30  # bytes of address space that the process may take to render a chat
_FILE = "<template>"  # jinja2's file name for a template without a name


class ContentForm(Enum):
    """The form that a template expects of the `content` of a message."""

    TEXT = auto()
    PARTS = auto()  # only a list of {type, text}
    EITHER = auto()


class _Refused(Exception):
    """The template called raise_exception."""


class Template:
    """One compiled template.

    `where` is the template's name in errors. `reads_tools`: the template mentions the variable
    `tools`. Raises ModelLoadFailed with the line that does not compile.
    """

    def __init__(self, source: str, where: str = "the chat template") -> None:
        self.source = source
        sandbox = _Sandbox()
        try:
            tree = sandbox.parse(source)
            self.content_form = _content_form(tree)
            self.reads_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
            code = sandbox.compile(tree)
            self._compiled = jinja2.Template.from_code(sandbox, code, {**sandbox.globals})
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadFailed(
                f"{where} fails to compile at line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # Python's errors for too deeply nested expressions
            raise ModelLoadFailed(f"{where} fails to compile: {error!r}") from error

    def render(self, variables: Mapping[str, Any], now: float) -> str:
        """Returns the rendered text; `now`: seconds since 1970, which the template sees as UTC.

        Raises BadRequest with the template's own message, or with the line of its failure.
        """
        moment = datetime.fromtimestamp(now, UTC)
        try:
            return self._compiled.render(**variables, strftime_now=moment.strftime)
        except _Refused as refusal:
            raise BadRequest(f"the chat template refused the messages: {refusal}") from None
        except Exception as error:  # untrusted code may raise any error
            raise BadRequest(
                f"the chat template failed{_line_of(error)}: {_message_of(error)}"
            ) from error

    def adapted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the message with its content in the form that the template expects."""
        content = message.get("content")
        if isinstance(content, list | tuple) and self.content_form is ContentForm.TEXT:
            return {**message, "content": joined(content)}
        if isinstance(content, str) and self.content_form is ContentForm.PARTS:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _NoConstantFolding(CodeGenerator):
    """A code generator that evaluates no constant expressions at compilation, unlike jinja2's."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandboxed jinja2 environment in which one template is compiled and rendered."""

    code_generator_class = _NoConstantFolding

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[loopcontrols, _GenerationTag],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception


def _content_form(tree: nodes.Template) -> ContentForm:
    """Returns PARTS if a template loops over content parts and never tests for plain text."""
    loops = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    asks = any(test.name in ("string", "mapping") for test in tree.find_all(nodes.Test))
    if not loops:
        return ContentForm.TEXT
    return ContentForm.EITHER if asks else ContentForm.PARTS


def _is_content(node: nodes.Node) -> bool:
    """Returns whether a node is `message.content`, `message['content']` or a name `content`."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON, as in training texts; jinja2's filter escapes <, > and & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _message_of(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {MAX_MEMORY} bytes of memory"
    return str(error) or type(error).__name__


def _line_of(error: Exception) -> str:
    """Returns " at line N", the innermost line of the template in the traceback, or ""."""
    line, trace = 0, error.__traceback__
    while isinstance(trace, TracebackType):
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" at line {line}" if line else ""
