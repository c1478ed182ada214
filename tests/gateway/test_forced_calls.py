"""The grammars of calls take what the parser of the same format reads as calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxpool.gateway.formats import TOOLS
from mlxpool.gateway.formats.events import CallArguments, CallBegin
from mlxpool.gateway.formats.forced_calls import forced_call, strict_calls
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
    assert strict_calls(tool_format, ASKED) is None


FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
MIXED: Any = [
    {"type": "function", "function": {"name": "bound", "parameters": FLAG, "strict": True}},
    {"type": "function", "function": {"name": "free", "parameters": FLAG}},
]
HERMES = '<tool_call>{"name": "NAME", "arguments": ARGUMENTS}</tool_call>'
LLAMA = '{"name": "NAME", "parameters": ARGUMENTS}'


@pytest.mark.parametrize(("tool_format", "call"), [("hermes", HERMES), ("llama_json", LLAMA)])
def test_strict_functions_are_bound_and_others_are_not(tool_format: str, call: str) -> None:
    def written(name: str, arguments: str) -> str:
        return call.replace("NAME", name).replace("ARGUMENTS", arguments)

    format = strict_calls(tool_format, MIXED)
    assert takes(format, written("bound", '{"on": true}'))
    assert not takes(format, written("bound", '{"on": 1}'))
    assert takes(format, written("free", '{"any": 1}')) and takes(format, written("free", "{}"))
    assert not takes(format, written("free", "[]"))
    assert not takes(format, written("other", "{}"))


@pytest.mark.parametrize("tool_format", ["hermes", "llama_json"])
def test_an_answer_may_call_no_strict_function(tool_format: str) -> None:
    format = strict_calls(tool_format, MIXED)
    for text in ("", "Hello,\n\nI am <b>.", "a {b}"):
        assert takes(format, text)
        parser = TOOLS[tool_format](MIXED)
        events = [*parser.push(text), *parser.finish()]
        assert not any(isinstance(one, CallBegin) for one in events)


def test_several_strict_calls_among_text() -> None:
    calls = [HERMES.replace("NAME", "free").replace("ARGUMENTS", "{}")] * 2
    text = "I look. " + "\n".join(calls) + " So."
    assert takes(strict_calls("hermes", MIXED), text)
    assert not takes(strict_calls("hermes", MIXED), "I look. <tool_call>\nhm")
    parser = TOOLS["hermes"](MIXED)
    events = [*parser.push(text), *parser.finish()]
    assert len([one for one in events if isinstance(one, CallBegin)]) == 2
    calls = [LLAMA.replace("NAME", "free").replace("ARGUMENTS", "{}")] * 2
    assert takes(strict_calls("llama_json", MIXED), "; ".join(calls))
