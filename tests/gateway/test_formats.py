"""The events that each format's parser makes of a text, for every division of the text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.gateway import formats
from mlxpool.gateway.formats.events import (
    UNNAMED,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Parser,
    Reasoning,
    merged,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]


def parser(tools: str | None, thinking: str | None = None, *, thinks: bool = False) -> Parser:
    return formats.make_parser(formats.ChatFormats(tools, thinking), TOOLS, thinks=thinks)


def parse(made: Parser, *pieces: str) -> list[Event]:
    events = [event for piece in pieces for event in made.push(piece)]
    return merged([*events, *made.finish()])


def call(name: str, arguments: str) -> list[Event]:
    return [CallBegin(name), CallArguments(arguments), CallEnd()]


PARIS = '{"city": "Paris", "days": 3}'
HARMONY_CALL = (
    "<|channel|>analysis<|message|>They ask for Paris.<|end|><|start|>assistant<|channel|>"
    "commentary to=functions.weather <|constrain|>json<|message|>" + PARIS
)

# format of tools, format of thinking, text, expected events
SAMPLES: list[tuple[str | None, str | None, str, list[Event]]] = [
    (None, None, "a <tool_call> b", [Content("a <tool_call> b")]),
    # hermes
    (
        "hermes",
        None,
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": ' + PARIS + "}\n</tool_call>",
        [Content("Let me look."), *call("weather", PARIS)],
    ),
    (
        "hermes",
        None,
        '<tool_call>\n{"arguments": {}, "name": "clock"}\n</tool_call>\n'
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> \\" }"}}'
        "</tool_call> so",
        [
            *call("clock", "{}"),
            *call("weather", '{"city": "</tool_call> \\" }"}'),
            Content("so"),
        ],
    ),
    ("hermes", None, '<tool_call>{"name": "clock"}</tool_call>', call("clock", "{}")),
    (
        "hermes",
        None,
        '<tool_call>{"name": "clock", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call("clock", '{"a": 1}'),
    ),
    (
        "hermes",
        None,
        "<tool_call>no JSON</tool_call> and on",
        [Content("<tool_call>no JSON</tool_call> and on")],
    ),
    (
        "hermes",
        None,
        '<tool_call>{"x": 1}</tool_call>',
        [Content('<tool_call>{"x": 1}</tool_call>')],
    ),
    (
        "hermes",
        None,
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        [CallBegin("weather"), CallArguments('{"city": "Par'), CallEnd()],
    ),
    ("hermes", None, '<tool_call>{"name": "wea', [Content('<tool_call>{"name": "wea')]),
    ("hermes", None, "a < b <tool", [Content("a < b <tool")]),
    (
        "hermes",
        "tags",
        "<think>\nA place.\n</think>\n\nWell.\n\n"
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        [Reasoning("A place."), Content("Well."), *call("clock", "{}")],
    ),
    # llama_json
    (
        "llama_json",
        None,
        '{"name": "weather", "parameters": ' + PARIS + "}",
        call("weather", PARIS),
    ),
    (
        "llama_json",
        None,
        '<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}; '
        '{"name": "weather", "parameters": {"city": "Oslo"}}\n',
        [*call("clock", "{}"), *call("weather", '{"city": "Oslo"}')],
    ),
    ("llama_json", None, '\n{"answer": 42}', [Content('\n{"answer": 42}')]),
    ("llama_json", None, '{"name": "Paris"}', [Content('{"name": "Paris"}')]),
    (
        "llama_json",
        None,
        '{"name": "unknown", "parameters": {}}',
        [Content('{"name": "unknown", "parameters": {}}')],
    ),
    ("llama_json", None, "It is {late}.", [Content("It is {late}.")]),
    (
        "llama_json",
        None,
        "<|python_tag|>search.call(query=1)",
        [Content("<|python_tag|>search.call(query=1)")],
    ),
    # function_xml
    (
        "function_xml",
        "tags",
        "Hm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [Reasoning("Hm."), *call("weather", PARIS)],
    ),
    (
        "function_xml",
        None,
        "I look.\n\n<function=clock>\n</function>\n</tool_call>",
        [Content("I look."), *call("clock", "{}"), Content("</tool_call>")],
    ),
    (
        "function_xml",
        None,
        "<tool_call><function=weather><parameter=city>\n12\n\n</parameter></function></tool_call>"
        "<tool_call><function=clock></function></tool_call>",
        [*call("weather", '{"city": "12\\n"}'), *call("clock", "{}")],
    ),
    (
        "function_xml",
        None,
        "<function=clock><parameter=a>True</parameter><parameter=b>\n[1]\n</parameter></function>",
        call("clock", '{"a": true, "b": [1]}'),
    ),
    (
        "function_xml",
        None,
        "<tool_call><function=weather><parameter=city>\nPar",
        [CallBegin("weather"), CallEnd()],
    ),
    # glm
    (
        "glm",
        "tags",
        "Hm.</think><tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key><arg_value>3</arg_value>\n</tool_call>",
        [Reasoning("Hm."), *call("weather", PARIS)],
    ),
    (
        "glm",
        None,
        "First.\n<tool_call>clock\n</tool_call><tool_call></tool_call>",
        [Content("First."), *call("clock", "{}"), Content("<tool_call></tool_call>")],
    ),
    # mistral
    (
        "mistral",
        None,
        '[TOOL_CALLS] [{"name": "weather", "arguments": ' + PARIS + '}, {"name": "clock", '
        '"arguments": {"x": "[TOOL_CALLS]]"}, "id": "abc"}]',
        [*call("weather", PARIS), *call("clock", '{"x": "[TOOL_CALLS]]"}')],
    ),
    (
        "mistral",
        "brackets",
        "[THINK]Paris.[/THINK]Yes.[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]"
        + PARIS
        + "[TOOL_CALLS]clock{}",
        [Reasoning("Paris."), Content("Yes."), *call("weather", PARIS), *call("clock", "{}")],
    ),
    ("mistral", None, "[TOOL_CALLS][5]", [Content("[TOOL_CALLS][5]")]),
    ("mistral", None, "[TOOL_CALLS]weather", [Content("[TOOL_CALLS]weather")]),
    # harmony
    (
        "harmony",
        "harmony",
        HARMONY_CALL,
        [Reasoning("They ask for Paris."), *call("weather", PARIS)],
    ),
    (
        "harmony",
        "harmony",
        HARMONY_CALL + "<|call|>",
        [Reasoning("They ask for Paris."), *call("weather", PARIS)],
    ),
    (
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look. <|end|><|start|>assistant to=functions.clock<|channel|>commentary<|message|>{}"
        "<|call|>",
        [Reasoning("Hm."), Content("I look. "), *call("clock", "{}")],
    ),
    (
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "1 < 2<|return|>",
        [Reasoning("Hm."), Content("1 < 2")],
    ),
    ("harmony", "harmony", "no header at all", [Content("no header at all")]),
    # thinking alone
    (None, "tags", "<think>a <b </think >\n</think>c", [Reasoning("a <b </think >"), Content("c")]),
    (None, "tags", "no <think>x</think>", [Content("no <think>x</think>")]),
    (None, "tags", "<think>\n\n</think>\n\nc </think>", [Content("c </think>")]),
    (None, "tags", "<think>cut o</thi", [Reasoning("cut o</thi")]),
    (None, "tags", " \n", [Content(" \n")]),
]


def thinks(text: str) -> bool:
    """Returns whether a sample of a model's output begins inside thoughts."""
    return text.startswith("Hm.")


@pytest.mark.parametrize(("tools", "thinking", "text", "expected"), SAMPLES)
def test_a_sample(
    tools: str | None, thinking: str | None, text: str, expected: list[Event]
) -> None:
    assert parse(parser(tools, thinking, thinks=thinks(text)), text) == expected


@pytest.mark.parametrize(("tools", "thinking", "text", "expected"), SAMPLES)
def test_a_sample_character_by_character(
    tools: str | None, thinking: str | None, text: str, expected: list[Event]
) -> None:
    assert parse(parser(tools, thinking, thinks=thinks(text)), *text) == expected


MARKS = [
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "[THINK]"),
    *("[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|start|>", "<|end|>"),
    *("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "analysis", "final", "to=a "),
    *('{"name": "clock", ', '"arguments": ', '"parameters": ', "{}", "{", "}", "[", "]", '"', "\\"),
    *(" ", "\n", "clock", ">", "<", ",", ";", ":", "x", "null", "7", '"name"', '"weather"'),
    *(sample[2] for sample in SAMPLES),
]


@pytest.mark.parametrize("tools", [None, *formats.TOOLS])
@pytest.mark.parametrize("thinking", [None, "tags"])
@settings(max_examples=max(40, settings().max_examples // 3))
@given(
    parts=st.lists(st.sampled_from(MARKS), max_size=9),
    cuts=st.lists(st.integers(0, 400), max_size=9),
    inside=st.booleans(),
)
def test_the_split_of_a_text_changes_no_event(
    tools: str | None, thinking: str | None, parts: list[str], cuts: list[int], inside: bool
) -> None:
    text = "".join(parts)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    expected = parse(parser(tools, thinking, thinks=inside), text)
    assert parse(parser(tools, thinking, thinks=inside), *pieces) == expected
    assert parse(parser(tools, thinking, thinks=inside), *text) == expected
    assert_sound(expected)


def assert_sound(events: list[Event]) -> None:
    """Asserts that calls do not overlap, arguments are within calls, and no piece is empty."""
    within = False
    for event in events:
        if isinstance(event, CallBegin | CallEnd):
            assert within == isinstance(event, CallEnd)
            within = not within
        else:
            assert event.text and within == isinstance(event, CallArguments)
    assert not within


@given(st.text(max_size=80))
def test_text_without_marks_is_the_answer(text: str) -> None:
    for tools in [name for name in formats.TOOLS if name != formats.HARMONY]:
        if not any(char in text for char in "<[{"):
            answer = [Content(text)] if text else []
            assert parse(parser(tools), text) == answer


@given(
    st.dictionaries(
        st.text(max_size=8), st.none() | st.text(max_size=8) | st.integers() | st.lists(st.text())
    )
)
def test_any_arguments_are_reproduced(arguments: dict[str, Any]) -> None:
    written = json.dumps({"name": "clock", "arguments": arguments})
    for tools, text in [
        ("hermes", f"<tool_call>{written}</tool_call>"),
        ("llama_json", written),
        ("mistral", f"[TOOL_CALLS][{written}]"),
        ("mistral", f"[TOOL_CALLS]clock[ARGS]{json.dumps(arguments)}"),
        ("harmony", f" to=functions.clock<|message|>{json.dumps(arguments)}"),
    ]:
        if tools == "harmony" and "<|" in written:
            # Harmony's marks are special tokens, which end a message even within a string.
            continue
        begin, middle, end = parse(parser(tools), *text)
        assert (begin, end) == (CallBegin("clock"), CallEnd())
        assert isinstance(middle, CallArguments) and json.loads(middle.text) == arguments


def test_arguments_are_emitted_before_the_call_ends() -> None:
    answer_parser = parser("hermes")
    answer_parser.push('<tool_call>{"name": "weather", "arguments": {"city"')
    assert answer_parser.push(': "Pa') == [CallArguments(': "Pa')]


def test_without_tools_only_harmony_is_parsed() -> None:
    text = '<tool_call>{"name": "clock"}</tool_call>'
    plain = formats.make_parser(formats.ChatFormats("hermes"), (), thinks=False)
    assert parse(plain, text) == [Content(text)]
    channels = formats.make_parser(formats.ChatFormats("harmony", "harmony"), (), thinks=False)
    assert parse(channels, "<|channel|>final<|message|>hi") == [Content("hi")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call><arg_key>a</arg_key><arg_value>b</arg_value></tool_call>"),
        ("function_xml", "<tool_call><function=><parameter=a>b</parameter></function>"),
        ("harmony", "<|channel|>commentary to=functions. <|message|>{}<|call|>"),
        ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ],
)
def test_no_call_has_a_name_that_a_message_does_not_take(name: str, text: str) -> None:
    parser = formats.TOOLS[name](())
    calls = [
        event.name for event in (*parser.push(text), *parser.finish()) if hasattr(event, "name")
    ]
    assert calls in ([], [UNNAMED])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": "b'),
        ("llama_json", '{"name": "clock", "parameters": {"a": "b'),
        ("mistral", '[TOOL_CALLS][{"name": "clock", "arguments": {"a": "b'),
        ("glm", "<tool_call>clock<arg_key>a</arg_key><arg_value>b</arg_value><arg_key>c"),
        ("function_xml", "<tool_call><function=clock><parameter=a>b</parameter><parameter=c>"),
        ("harmony", '<|channel|>commentary to=functions.clock<|message|>{"a": "b'),
    ],
)
def test_a_call_that_a_text_of_stop_cuts_is_left_out(name: str, text: str) -> None:
    chat = formats.ChatFormats(name)
    for pieces in ([text], [*text]):
        assert any(isinstance(event, CallBegin) for event in parse(parser(name), *pieces))
        answer_parser = formats.make_parser(chat, TOOLS, thinks=False, stops=True)
        assert not any(
            isinstance(event, CallBegin | CallEnd) for event in parse(answer_parser, *pieces)
        )


def test_a_call_that_is_whole_is_given_in_front_of_a_text_of_stop() -> None:
    written = '<tool_call>{"name": "weather", "arguments": ' + PARIS
    answer_parser = formats.make_parser(
        formats.ChatFormats("hermes"), TOOLS, thinks=False, stops=True
    )
    assert parse(answer_parser, "So. ", *written, "}") == [Content("So."), *call("weather", PARIS)]
    answer_parser = formats.make_parser(
        formats.ChatFormats("hermes"), TOOLS, thinks=False, stops=True
    )
    assert parse(answer_parser, *written) == call("weather", PARIS), "only its end is missing"
    broken = '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>'
    answer_parser = formats.make_parser(
        formats.ChatFormats("hermes"), TOOLS, thinks=False, stops=True
    )
    assert parse(answer_parser, broken) == call("weather", '{"city": Paris}'), "it was not cut"
