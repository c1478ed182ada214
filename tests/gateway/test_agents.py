"""Requests of agent programs and their libraries are accepted; unknown options are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mlxpool.common.protocol.chat import INVALID_JSON
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.formats import ChatFormats
from mlxpool.gateway.generation.chat_request import check_formats
from mlxpool.gateway.openai.responses_api.items import divided, joined
from support.gateway_parsers import (
    CHAT,
    COUNT,
    HI,
    MESSAGES,
    OLLAMA,
    PARSERS,
    RESPONSES,
    TEXT,
    Parser,
)

NAMED: Any = {"name": "f"}
FUNCTION: Any = {"type": "function", "function": NAMED}
BASES: Mapping[str, Parser] = {
    "chat": PARSERS[CHAT], "text": PARSERS[TEXT], "responses": PARSERS[RESPONSES],
    "messages": PARSERS[MESSAGES], "count": PARSERS[COUNT], "ollama": PARSERS[OLLAMA],
}  # fmt: skip
ABOUT: Any = {"metadata": {"a": "b"}, "session_id": "s", "x-trace": 1, "client_metadata": {"a": 1}}
UNSET: Any = {"tools": [], "stop": [], "tool_choice": None, "user": "", "metadata": {}}
TAKEN: list[tuple[str, Any]] = [
    *[(name, ABOUT) for name in BASES],
    ("chat", UNSET | {"response_format": None, "logit_bias": {}, "stream_options": None}),
    ("chat", {"tools": None, "tool_choice": "", "functions": [], "function_call": "", "stop": ""}),
    ("chat", {"max_tokens": None, "max_completion_tokens": None, "n": None, "audio": None}),
    ("chat", {"parallel_tool_calls": None, "response_format": {}, "reasoning_effort": ""}),
    ("chat", {"tool_choice": "auto"}),
    ("chat", {"tool_choice": "none", "tools": []}),
    ("chat", {"verbosity": "low", "prompt_cache_retention": "24h", "web_search_options": {}}),
    ("chat", {"reasoning": {"effort": "xhigh"}, "provider": {}, "transforms": []}),
    ("chat", {"reasoning_effort": "minimal", "service_tier": "auto", "store": False}),
    ("chat", {"thinking": {"type": "disabled"}, "guardrails": [], "enable_thinking": None}),
    ("chat", {"tools": [{"type": "web_search"}, {"type": "custom", "custom": {"name": "p"}}]}),
    ("chat", {"cache_prompt": True, "id_slot": -1, "timings_per_token": True}),
    ("chat", {"chat_template_kwargs": {"thinking": True, "preserve_thinking": True}}),
    ("text", {"suffix": "", "stop": "", "logit_bias": {}, "user": ""}),
    ("responses", {"instructions": "", "tools": [], "include": [], "user": ""}),
    ("responses", {"tool_choice": "", "text": {}, "reasoning": {}, "metadata": {}}),
    ("responses", {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}),
    ("responses", {"reasoning": {"effort": "minimal", "summary": "none"}, "store": False}),
    ("responses", {"text": {"verbosity": "low"}, "truncation": None, "prompt_cache_key": "k"}),
    ("responses", {"context_management": [{"type": "compaction"}], "service_tier": "priority"}),
    *[
        (
            "responses",
            {"input": [{"type": kind, "role": "user", "content": [{"type": "text", "text": "x"}]}]},
        )
        for kind in (None, "")
    ],
    ("messages", {"messages": [*HI, {"role": "assistant", "content": None}, *HI]}),
    (
        "messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        {"type": "text", "text": "x"},
                    ],
                }
            ]
        },
    ),
    ("messages", {"system": [], "stop_sequences": [], "tools": [], "metadata": {"user_id": "u"}}),
    ("messages", {"thinking": {"type": "adaptive", "display": "summarized"}, "speed": "fast"}),
    ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    ("messages", {"output_config": {"effort": "max", "task_budget": {"type": "tokens"}}}),
    ("messages", {"mcp_servers": [{"type": "url"}], "container": "c", "betas": ["b"]}),
    ("messages", {"output_format": {"type": "json_schema", "schema": {"type": "object"}}}),
    ("messages", {"tools": [{"name": "f", "defer_loading": True, "input_examples": [{}]}]}),
    ("count", {"max_tokens": 5, "stream": True, "temperature": 1}),
    ("ollama", {"tools": [], "format": "", "options": {}, "keep_alive": None, "think": None}),
    ("ollama", {"tools": [{"type": "web_search"}, FUNCTION]}),
]
REFUSED: list[tuple[str, Any, str]] = [
    *[(name, {"typical_p": 0.5}, "typical_p") for name in BASES if name != "ollama"],
    *[(name, {"temprature": 0.5}, "temperature") for name in BASES if name != "ollama"],
    *[(name, {"temperature": ""}, "temperature") for name in ("chat", "responses", "messages")],
    *[(name, {"temperature": []}, "temperature") for name in ("chat", "responses", "messages")],
    ("chat", {"eos_token_id": 5}, "eos_token_id"),
    ("chat", {"lora_id": "a"}, "lora_id"),
    ("chat", {"stop_token_ids": [5]}, "stop"),
    ("chat", {"max_tokens": ""}, "max_tokens"),
    ("chat", {"tools": {}}, "tools"),
    ("chat", {"tools": [{}]}, "tools"),
    ("chat", {"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ("chat", {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"model": ""}, "model"),
    ("responses", {"include": [5]}, "include"),
    ("responses", {"reasoning": {"effort": "most"}}, "effort"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}],
                  "tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice"),
    ("messages", {"max_tokens": None}, "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more"), TAKEN)
def test_what_programs_send_is_taken(name: str, more: Any) -> None:
    assert BASES[name](**more)


@pytest.mark.parametrize(("name", "more", "words"), REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(name: str, more: Any, words: str) -> None:
    with pytest.raises(HttpError, match=words):
        BASES[name](**more)


@pytest.mark.parametrize("given", [{}, {"parameters": None}, {"parameters": {}}, {"strict": None}])
def test_tools_that_run_elsewhere_are_left_out(given: Any) -> None:
    parse = BASES["responses"]
    own: Any = {"type": "function", "name": "f", **given}
    kinds = ("custom", "web_search", "local_shell", "image_generation", "tool_search", "mcp")
    tools: Any = [own, *[{"type": kind, "name": "x"} for kind in kinds]]
    request = parse(tools=tools, tool_choice="required")
    assert [tool["function"]["name"] for tool in request.chat.tools] == ["f"]
    assert request.chat.forced == request.chat.tools and request.echoed["tools"] == tools
    parse = BASES["messages"]
    others = ("web_search_20250305", "bash_20250124", "memory_20250818", "mcp_toolset")
    tools = [{"name": "f"}, *[{"type": kind, "name": "x"} for kind in others]]
    assert [tool["function"]["name"] for tool in parse(tools=tools).chat.tools] == ["f"]


def test_functions_of_a_namespace_are_offered_and_their_calls_name_it() -> None:
    parse = BASES["responses"]
    group: Any = {"type": "namespace", "name": "mcp__git", "tools": [{"type": "function", **NAMED}]}
    (tool,) = parse(tools=[group, {**group, "name": "n", "tools": []}]).chat.tools
    assert tool["function"]["name"] == "mcp__git__f" == joined("mcp__git__", "f")
    assert divided("mcp__git__f", [group]) == {"namespace": "mcp__git", "name": "f"}
    assert divided("f", [group]) == {"name": "f"} == divided("f", None)


def test_messages_of_other_clients_have_the_one_form() -> None:
    custom: Any = {"id": "c", "type": "custom", "custom": {"name": "p", "input": "x"}}
    thought: Any = {"type": "thinking", "thinking": "Hm."}
    given: Any = [
        *HI,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{"}},
        {"role": "function", "name": "f", "content": None},
        {"role": "assistant", "content": [], "tool_calls": [custom], "audio": None},
        {"role": "tool", "tool_call_id": "c", "content": []},
        {"role": "assistant", "content": None, "refusal": "No.", "tool_calls": []},
        {"role": "assistant", "content": [thought, {"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "reasoning_details": [{}]},
    ]
    parse = BASES["chat"]
    (prompt,) = parse(messages=given).prompts
    _, old, result, new, answer, refused, parts, thinks = prompt["messages"]
    assert old["tool_calls"][0]["function"] == {"name": "f", "arguments": {INVALID_JSON: "{"}}
    assert (result["role"], result["content"], answer["content"]) == ("tool", "", "")
    assert new["tool_calls"][0]["function"] == {"name": "p", "arguments": {"input": "x"}}
    assert refused["content"] == "No." and parts["content"] == [{"type": "text", "text": "No."}]
    assert thinks["reasoning_content"] == "Hm." and "reasoning" not in thinks


@pytest.mark.parametrize("name", ["chat", "responses"])
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "required"}, "any", {"type": "any"}, {"type": "tool", "name": "f"},
        {"type": "function", "name": "f"}, {"type": "function", "function": NAMED},
        {"function": NAMED},
    ],
)  # fmt: skip
def test_a_choice_of_tools_has_any_form_of_the_interfaces(name: str, choice: Any) -> None:
    parse = BASES[name]
    tool = FUNCTION if name == "chat" else {"type": "function", **NAMED}
    request = parse(tools=[tool], tool_choice=choice)
    request = request if name == "chat" else request.chat
    assert [tool["function"]["name"] for tool in request.forced] == ["f"]
    for kind, offered in (("auto", 1), ("none", 0)):
        request = parse(tools=[tool], tool_choice={"type": kind})
        request = request if name == "chat" else request.chat
        assert (len(request.tools), len(request.forced)) == (offered, 0)


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}]])
def test_an_answer_that_never_began_is_not_gone_on(content: Any) -> None:
    parse = BASES["messages"]
    chat = parse(messages=[*HI, {"role": "assistant", "content": content}]).chat
    assert list(chat.messages) == HI and "continue_message" not in chat.options


def test_a_part_of_a_result_that_no_model_reads_is_a_note() -> None:
    file: Any = {"type": "input_file", "filename": "a.pdf"}
    note = "[an attachment of the type input_file, which this model cannot read]"
    parse = BASES["chat"]
    (prompt,) = parse(messages=[*HI, {"role": "tool", "content": [file]}]).prompts
    assert prompt["messages"][1]["content"] == [{"type": "text", "text": note}]
    parse = BASES["responses"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}
    for output, text in (([file], note), ({"content": "x"}, '{"content": "x"}'), (None, "")):
        item = {"type": "function_call_output", "call_id": "c", "output": output}
        chat = parse(input=[call, item]).chat
        assert chat.messages[1]["content"] == text


def test_allowed_tools_are_offered_alone() -> None:
    parse = BASES["chat"]
    tools: Any = [FUNCTION, {"type": "function", "function": {"name": "g"}}]
    for mode in ("auto", "required"):
        choice: Any = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": [FUNCTION]},
        }
        request = parse(tools=tools, tool_choice=choice)
        assert [tool["function"]["name"] for tool in request.tools] == ["f"]
        assert bool(request.forced) is (mode == "required")
    with pytest.raises(HttpError, match="needs a mode"):
        parse(tools=tools, tool_choice={"type": "allowed_tools"})


@pytest.mark.parametrize(
    ("given", "think"),
    [
        ({"reasoning_effort": "xhigh"}, "high"), ({"reasoning": {"effort": "minimal"}}, "low"),
        ({"reasoning": {"enabled": False}}, False), ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "adaptive"}}, None), ({"enable_thinking": False}, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, False), ({}, None),
    ],
)  # fmt: skip
def test_every_way_to_ask_for_thoughts(given: Any, think: Any) -> None:
    parse = BASES["chat"]
    assert parse(**given).options.get("think") == think


def test_how_much_is_thought_has_no_meaning_for_a_template_without_thoughts() -> None:
    plain = ChatFormats("hermes", None)
    for field in ("reasoning_effort", "reasoning.effort", "thinking"):
        assert check_formats("m", plain, (), {"think": "low", "seed": 1}, field) == {"seed": 1}
    with pytest.raises(HttpError, match="knows no thinking"):
        check_formats("m", plain, (), {"think": True}, "chat_template_kwargs.enable_thinking")
