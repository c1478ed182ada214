"""One chat template: compiled in a sandbox, rendered to text.

A template is untrusted input. It runs in jinja2's immutable sandbox and sees plain data only. How
long it may take and how much memory is for the process in which it is rendered, see renderer.py;
so nothing of it is computed where it is only compiled.
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
from mlxpool.worker.prompt.chat_template.process import MEMORY

_FILE = "<template>"  # the name that jinja2 gives to what has none


class Contents(Enum):
    """What a template takes as the `content` of a message."""

    TEXT = auto()
    PARTS = auto()  # a list of {type, text} only
    EITHER = auto()


class _Refused(Exception):
    """The template called raise_exception."""


class Template:
    """One compiled template.

    `where` names it in errors. Raises ModelLoadFailed with the line that does not compile.
    """

    def __init__(self, source: str, where: str = "the chat template") -> None:
        self.source = source
        sandbox = _Sandbox()
        try:
            tree = sandbox.parse(source)
            self.contents = _contents(tree)
            code = sandbox.compile(tree)
            self._compiled = jinja2.Template.from_code(sandbox, code, {**sandbox.globals})
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadFailed(
                f"{where} fails to compile at line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # what is nested too deep fails in Python's own ways
            raise ModelLoadFailed(f"{where} fails to compile: {error!r}") from error

    def render(self, variables: Mapping[str, Any], now: float) -> str:
        """The text; `now` in seconds since 1970, shown to the template as UTC.

        Raises BadRequest with the template's own words, or with the line at which it failed.
        """
        moment = datetime.fromtimestamp(now, UTC)
        try:
            return self._compiled.render(**variables, strftime_now=moment.strftime)
        except _Refused as refusal:
            raise BadRequest(f"the chat template refused the messages: {refusal}") from None
        except Exception as error:  # foreign code may raise whatever it likes
            raise BadRequest(f"the chat template failed{_place(error)}: {_words(error)}") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Unfolded(CodeGenerator):
    """Leaves every expression to the rendering; jinja2 would compute constant ones here."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    code_generator_class = _Unfolded

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[loopcontrols, _Generation],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception


def _contents(tree: nodes.Template) -> Contents:
    """PARTS for a template that goes through the parts and never asks whether there is text."""
    loops = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    asks = any(test.name in ("string", "mapping") for test in tree.find_all(nodes.Test))
    if not loops:
        return Contents.TEXT
    return Contents.EITHER if asks else Contents.PARTS


def _is_content(node: nodes.Node) -> bool:
    """`message.content`, `message['content']`, or a variable of that name."""
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
    """JSON as it is: jinja2's own filter escapes <, > and & for HTML, which a model never saw."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _words(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {MEMORY} bytes of memory"
    return str(error) or type(error).__name__


def _place(error: Exception) -> str:
    """The deepest line of the template that led to the error."""
    line, trace = 0, error.__traceback__
    while isinstance(trace, TracebackType):
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" at line {line}" if line else ""
