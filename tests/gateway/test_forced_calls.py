"""The grammar of a forced call takes what the parser of the same format reads as one call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxpool.gateway.formats import TOOLS
from mlxpool.gateway.formats.events import CallArguments, CallBegin
from mlxpool.gateway.formats.forced_calls import forced_call
from mlxpool.worker.constraints import grammar

NAMES = ("weather", 'a"b\\n', "é")
ASKED: Any = [{"type": "function", "function": {"name": name}} for name in NAMES]


def takes(format: dict[str, Any], text: str) -> bool:
    """Whether a text is a complete answer of this format."""
    grammar.check(format)
    matcher = LLMatcher(LLTokenizer("byte"), grammar.grammar_of(format), log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("tool_format", "written"),
    [
        ("hermes", '<tool_call>\n{"name": NAME, "arguments": {"a": 1}}\n</tool_call>'),
        ("llama_json", '{"name": NAME, "parameters": {"a": 1}}'),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_forced_is_read_as_a_call(tool_format: str, written: str, name: str) -> None:
    text = written.replace("NAME", json.dumps(name, ensure_ascii=False))
    assert takes(forced_call(tool_format, ASKED), text)
    assert not takes(forced_call(tool_format, ASKED), text.replace('"a": 1', '"a":   1'))
    assert not takes(forced_call(tool_format, ASKED), text.replace('{"a": 1}', "[]"))
    parser = TOOLS[tool_format](ASKED)
    events = [*parser.push(text), *parser.finish()]
    assert [one.name for one in events if isinstance(one, CallBegin)] == [name]
    found = "".join(one.text for one in events if isinstance(one, CallArguments))
    assert json.loads(found) == {"a": 1}


@pytest.mark.parametrize("tool_format", ["glm", "mistral", "function_xml", "harmony", None])
def test_other_formats_are_not_forced(tool_format: str | None) -> None:
    assert forced_call(tool_format, ASKED) is None
