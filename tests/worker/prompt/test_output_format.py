"""The formats of tool calls and thinking in chat templates, and the option `think`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.worker.prompt.chat_template.output_format import chat_format, opens_thinking
from mlxpool.worker.prompt.chat_template.sandbox import Template
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from support.prompts import chat_ids
from support.worker_checkpoints import write_checkpoint

USER = [{"role": "user", "content": "hi"}]
SWITCH = "{% if enable_thinking is false %}<think>\n\n</think>{% else %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("source", "tools", "thinking"),
    [
        ("{{ messages }}", None, None),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony", "harmony"),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key></tool_call></think>", "glm", "tags"),
        ("<tool_call>\n<function={{ name }}>\n</function>", "function_xml", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
        ("[THINK][TOOL_CALLS]", "mistral", "brackets"),
        ('<tool_call>\n{"name": </tool_call><think>', "hermes", "tags"),
        ("Environment: ipython\n", "llama_json", None),
        ("<start_of_turn>model\n", None, None),
    ],
)
def test_formats(source: str, tools: str | None, thinking: str | None) -> None:
    assert chat_format([source]) == {"tools": tools, "thinking": thinking}


def test_formats_are_found_in_any_template() -> None:
    assert chat_format(["plain", "<tool_call>"]) == {"tools": "hermes", "thinking": None}
    assert chat_format([]) is None


def test_a_prompt_that_opens_thinking() -> None:
    assert opens_thinking("<|assistant|>\n<think>\n")
    assert not opens_thinking("<think>\n\n</think>\n\n")


def render(source: str, think: Any) -> str:
    return ChatTemplates({"default": Template(source)}).render(USER, now=0, think=think)


def test_think_reaches_the_template() -> None:
    assert render(SWITCH, None) == render(SWITCH, True) == "<think>\n"
    assert render(SWITCH, False) == "<think>\n\n</think>"
    assert render("{{ reasoning_effort }}", "low") == "low"
    assert render("fixed", True) == "fixed"


def test_thoughts_that_cannot_be_left_out_are_no_answer_without() -> None:
    with pytest.raises(BadRequest, match="no enable_thinking"):
        render("fixed", False)


def test_a_level_means_true_to_a_template_without_levels() -> None:
    assert render("fixed", "low") == "fixed"
    assert render(SWITCH, "low") == render(SWITCH, True)


def test_the_prompt_reports_that_it_ends_in_thinking(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tokenizer_config={"chat_template": SWITCH})
    text = ChatTokenizer.from_folder(inspect(tmp_path))
    assert chat_ids(text, USER).thinks
    assert not chat_ids(text, USER, think=False).thinks
    with pytest.raises(BadRequest, match="think must be true, false or one of low, medium, high"):
        chat_ids(text, USER, think="very")
