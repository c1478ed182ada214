"""The chat templates of a folder: their files, the choice by name, their variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker.prompt.chat_template.sandbox import Template
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.weights.chat_template_files import DEFAULT, TOOL_USE
from support.worker_checkpoints import write_json

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "clock"}}]
NOW = 1_700_000_000.0


def chat(source: str, **tokens: str) -> ChatTemplates:
    return ChatTemplates({DEFAULT: Template(source)}, tokens)


def sources(path: Path) -> dict[str, str]:
    return {
        name: template.source
        for name, template in ChatTemplates.from_folder(path).templates.items()
    }


def test_variables_of_a_template() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ m.name }}{% endfor %}"
        "{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}"
    )
    messages = [{"role": "tool", "content": "a", "name": "clock"}]
    assert chat(source, bos_token="<s>").render(messages, now=NOW) == "<s>aclockTrueTrueTrue"
    bare = chat("{{ add_generation_prompt }}{{ tools | length }}")
    assert bare.render(USER, TOOLS, now=NOW, add_generation_prompt=False) == "False1"


def test_the_error_without_a_template_names_prompt() -> None:
    with pytest.raises(BadRequest, match=r"no chat template.*`prompt`"):
        ChatTemplates({}).render(USER, now=NOW)


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        ("{{ messages[0].content }}", PARTS, "ab"),
        ("{{ messages[0].content }}", "ab", "ab"),
        ("{% for p in messages[0].content %}({{ p.text }}){% endfor %}", PARTS, "(a)(b)"),
        ("{% for p in messages[0].content %}({{ p.text }}){% endfor %}", "ab", "(ab)"),
        ("{{ messages[0].content is none }}", None, "True"),
    ],
)
def test_content_has_the_form_that_the_template_expects(
    source: str, content: Any, text: str
) -> None:
    messages = [{"role": "assistant", "content": content}]
    assert chat(source).render(messages, now=NOW) == text


def test_a_template_cannot_change_the_request() -> None:
    messages = [{"role": "user", "content": list(PARTS)}]
    chat("{{ messages[0].content }}").render(messages, now=NOW)
    assert messages == [{"role": "user", "content": PARTS}]


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "tools", "taken"),
    [
        ((DEFAULT, TOOL_USE, "rag"), False, DEFAULT),
        ((DEFAULT, TOOL_USE, "rag"), True, TOOL_USE),
        ((DEFAULT, "rag"), True, DEFAULT),
        (("rag", "other"), True, "rag"),
        ((TOOL_USE,), False, TOOL_USE),
    ],
)
def test_choice_of_the_template(names: tuple[str, ...], tools: bool, taken: str) -> None:
    read = "{% if tools %}{% endif %}"
    named = ChatTemplates({name: Template(name + read) for name in names})
    assert named.template_for(tools).source == taken + read
    assert named.render(USER, TOOLS if tools else (), now=NOW) == taken


@pytest.mark.parametrize("source", ["x", "{# tools #}tools", "{{ messages[0].tools }}"])
def test_tools_are_refused_where_the_template_does_not_read_them(source: str) -> None:
    templates = ChatTemplates({DEFAULT: Template(source)})
    with pytest.raises(BadRequest, match="no place for tools: leave `tools` out"):
        templates.render(USER, TOOLS, now=NOW)
    templates.render(USER, now=NOW)


def test_a_list_of_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for templates, expected in ((named, {"tool_use": "T", "default": "D"}), ([], {})):
        write_json(tmp_path / "tokenizer_config.json", {"chat_template": templates})
        assert sources(tmp_path) == expected
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": {"default": "D"}})
    assert sources(tmp_path) == {"default": "D"}


# ---- files ---------------------------------------------------------------------------------------


def test_the_four_files_in_order(tmp_path: Path) -> None:
    assert sources(tmp_path) == {}
    write_json(tmp_path / "chat_template.json", {"chat_template": "fourth"})
    assert sources(tmp_path) == {DEFAULT: "fourth"}
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "third", "eos_token": "E"})
    assert sources(tmp_path) == {DEFAULT: "third"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("second")
    assert sources(tmp_path) == {TOOL_USE: "second", DEFAULT: "third"}
    (tmp_path / "chat_template.jinja").write_text("first", encoding="utf-8")
    assert sources(tmp_path) == {TOOL_USE: "second", DEFAULT: "first"}
    templates = ChatTemplates.from_folder(tmp_path)
    assert templates.tokens == {"eos_token": "E"}
    (note,) = templates.notes
    assert note.startswith("chat_template.jinja and chat_template of tokenizer_config.json differ")


def test_what_is_no_template_is_named_and_what_macos_leaves_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "._tool_use.jinja").write_bytes(b"\0\5\26\7")
    assert sources(tmp_path) == {}
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(b"\xef\xbb\xbf{{ 1 }}")
    assert sources(tmp_path) == {DEFAULT: "{{ 1 }}"}
    for content, words in (("", "is empty"), ("<!DOCTYPE html><p>Log in", "is a web page")):
        file.write_text(content)
        with pytest.raises(ModelLoadFailed, match=words):
            ChatTemplates.from_folder(tmp_path)


def test_no_template_is_the_default(tmp_path: Path) -> None:
    named = [{"name": "a", "template": "A"}, {"name": "tool_use", "template": "T"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    (note,) = ChatTemplates.from_folder(tmp_path).notes
    assert note.startswith("no chat template is named 'default': 'a' is taken")


def test_token_names_may_be_maps_and_in_the_older_file(tmp_path: Path) -> None:
    settings = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "chat_template": "{{ bos_token }}{{ unk_token }}",
    }
    write_json(tmp_path / "tokenizer_config.json", settings)
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": "old", "unk_token": "<unk>"})
    assert ChatTemplates.from_folder(tmp_path).render(USER, now=NOW) == "<s><unk>"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ModelLoadFailed, match=r"chat_template\.json is not JSON"):
        ChatTemplates.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadFailed, match=r"chat_template\.jinja is not UTF-8"):
        ChatTemplates.from_folder(tmp_path)


@pytest.mark.parametrize("wrong", [5, [5], ["x"], [{"name": "a"}], {"a": 1}, [{"template": "x"}]])
def test_a_malformed_chat_template_setting_is_named(tmp_path: Path, wrong: Any) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": wrong})
    with pytest.raises(ModelLoadFailed, match=r"tokenizer_config\.json: chat_template must be"):
        ChatTemplates.from_folder(tmp_path)


def test_a_template_that_does_not_compile_names_file_name_and_line(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "fine"}, {"name": "rag", "template": "a\n{% if %}"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    with pytest.raises(ModelLoadFailed, match=r"config\.json: chat template 'rag'.* at line 2"):
        ChatTemplates.from_folder(tmp_path)


def test_a_developer_is_the_system_to_a_template_that_knows_none() -> None:
    lines = "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "developer", "content": "d"},
    ]
    templates = ChatTemplates({"default": Template(lines)})
    assert templates.render(messages, now=0) == "system: a\n\nb;user: c;system: d;"
    knows = ChatTemplates({"default": Template(lines + "{# developer #}")})
    assert knows.render(messages[::3], now=0) == "system: a;developer: d;"
    others = [messages[0], messages[0], messages[2]]
    assert templates.render(others, now=0) == "system: a;system: a;user: c;"
