"""One chat template: compiled in a sandbox, rendered within bounds of time and size.

A template is untrusted input. It runs in jinja2's immutable sandbox and sees plain data only. The
clock is looked at in every turn of a loop and in every call of a macro, so that one that never
ends is stopped, and one that takes long leaves most of the processor to the model's steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import Enum, auto
from types import TracebackType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxpool.common.errors import BadRequest, ModelLoadFailed

LIMIT = 2.0  # seconds of one rendering
FREE = 0.01  # seconds before it pauses for the first time
SLICE, PAUSE = 0.0005, 0.0025  # seconds of work, then of rest
MAX_REPEATED = 2**24  # items or characters that one `*` may make
MAX_BITS = 4096  # of an integer that `*` or `**` may make

_FILE = "<template>"  # the name that jinja2 gives to what has none


class Contents(Enum):
    """What a template takes as the `content` of a message."""

    TEXT = auto()
    PARTS = auto()  # a list of {type, text} only
    EITHER = auto()


class _Refused(Exception):
    """The template called raise_exception."""


class _TooLong(Exception):
    """The template was rendered for LIMIT seconds."""


class Template:
    """One compiled template; rendered by one thread at a time.

    `where` names it in errors. Raises ModelLoadFailed with the line that does not compile.
    """

    def __init__(
        self,
        source: str,
        where: str = "the chat template",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.source = source
        self._sandbox = _Sandbox(clock, sleep)
        try:
            tree = self._sandbox.parse(source)
            self.contents = _contents(tree)
            code = self._sandbox.compile(_guarded(tree, self._sandbox))
            self._compiled = jinja2.Template.from_code(
                self._sandbox, code, {**self._sandbox.globals}
            )
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
        self._sandbox.begin()
        moment = datetime.fromtimestamp(now, UTC)
        try:
            return self._compiled.render(**variables, strftime_now=moment.strftime)
        except _Refused as refusal:
            raise BadRequest(f"the chat template refused the messages: {refusal}") from None
        except _TooLong:
            raise BadRequest(
                f"the chat template was not done after {LIMIT:g} s: it was stopped"
            ) from None
        except Exception as error:  # foreign code may raise whatever it likes
            raise BadRequest(f"the chat template failed{_place(error)}: {_words(error)}") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self._clock, self._sleep = clock, sleep
        self._end = self._rest_at = 0.0

    def begin(self) -> None:
        """From now on the time of a rendering counts."""
        now = self._clock()
        self._end, self._rest_at = now + LIMIT, now + FREE

    def tick(self) -> None:
        """Called wherever a template may go round; raises _TooLong at the end of its time."""
        now = self._clock()
        if now >= self._end:
            raise _TooLong
        if now >= self._rest_at:
            self._sleep(PAUSE)
            self._rest_at = self._clock() + SLICE

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`*` and `**` can make in one step what fills the memory."""
        if operator == "*":
            _check_product(left, right)
        else:
            _check_power(left, right)
        return super().call_binop(context, operator, left, right)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    items, times = (left, right) if isinstance(right, int) else (right, left)
    made = len(items) * times if isinstance(items, str | list | tuple) else 0
    if made > MAX_REPEATED:
        raise SecurityError(f"a repetition makes {made} items, at most {MAX_REPEATED}")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise SecurityError(f"a number of {bits} bits, at most {MAX_BITS}")


def _guarded(tree: nodes.Template, sandbox: _Sandbox) -> nodes.Template:
    """The template with a look at the clock in every loop, macro and called block."""
    for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        statement = nodes.ExprStmt(tick).set_lineno(node.lineno).set_environment(sandbox)
        node.body.insert(0, statement)
    return tree


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
    return str(error) or type(error).__name__


def _place(error: Exception) -> str:
    """The deepest line of the template that led to the error."""
    line, trace = 0, error.__traceback__
    while isinstance(trace, TracebackType):
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" at line {line}" if line else ""
