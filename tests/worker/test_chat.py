"""Messages to prompt text: which template is taken, what it sees, and how it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker.chat import Template
from worker_checkpoints import write_json

USER = [{"role": "user", "content": "hi"}]
NOW = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


def render(source: str | None, messages: Any = USER, **tokens: str) -> str:
    return Template(source, tokens).render(messages, now=NOW)


def test_messages_tokens_and_generation_prompt() -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
    source += "{% if add_generation_prompt %}[assistant]{% endif %}"
    assert render(source, bos_token="<s>") == "<s>[user]hi[assistant]"
    bare = Template(source).render(USER, now=NOW, add_generation_prompt=False)
    assert bare == "[user]hi"


def test_blocks_leave_no_white_space() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loop_controls_and_generation_marks() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("{% generation %}x{{ messages|length }}{% endgeneration %}") == "x1"


def test_json_is_not_escaped_for_html() -> None:
    source = "{{ messages[0].content|tojson }}"
    assert render(source, [{"role": "user", "content": '<é & "q">'}]) == '"<é & \\"q\\">"'
    assert render("{{ {'a': 1}|tojson(indent=1) }}") == '{\n "a": 1\n}'


def test_now_is_the_requests_own_in_utc() -> None:
    assert render("{{ strftime_now('%Y-%m-%d %H:%M') }}") == "2023-11-14 22:13"


def test_no_template_says_how_to_go_on() -> None:
    with pytest.raises(BadRequest, match=r"no chat template.*`prompt`"):
        render(None)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused.*roles must alternate"),
        ("{% if %}", "broken at line 1"),
        ("{% for x in messages %}\n{{ x ", "broken at line 2"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ 'a' + 1 }}", "failed"),
        ("{{ nothing.at.all }}", "failed: 'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "failed.*unsafe"),
        ("{{ messages.append(1) }}", "failed.*unsafe|failed.*not safely callable"),
        ("{{ range(10**7)|length }}", "failed.*[Rr]ange too big"),
        ("{% include 'other' %}", "failed"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        render(source)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ("hi", "must be a list"),
        (None, "must be a list"),
        (["hi"], r"messages\[0\] must be a map"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role is 'robot'"),
        ([*USER, {"role": "user"}], r"messages\[1\].content must be text.*NoneType"),
        ([{"role": ["user"], "content": "x"}], "role is"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\] must be"),
    ],
)
def test_malformed_messages_are_named(messages: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        render("x", messages)


def test_text_parts_are_joined_and_other_keys_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "tool", "content": parts, "name": "clock"}
    assert render("{{ messages[0].content }}{{ messages[0].name }}", [message]) == "abclock"


def test_sources_in_order(tmp_path: Path) -> None:
    assert Template.from_folder(tmp_path).source is None
    write_json(tmp_path / "chat_template.json", {"chat_template": "third"})
    assert Template.from_folder(tmp_path).source == "third"
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "second", "eos_token": "E"})
    assert Template.from_folder(tmp_path).source == "second"
    (tmp_path / "chat_template.jinja").write_text("first", encoding="utf-8")
    template = Template.from_folder(tmp_path)
    assert (template.source, template.tokens) == ("first", {"eos_token": "E"})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ModelLoadFailed, match=r"chat_template\.json is not JSON"):
        Template.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadFailed, match=r"chat_template\.jinja is not UTF-8"):
        Template.from_folder(tmp_path)


def test_a_list_of_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for templates, source in ((named, "D"), (named[:1], "T"), ([], None)):
        write_json(tmp_path / "tokenizer_config.json", {"chat_template": templates})
        assert Template.from_folder(tmp_path).source == source


def test_token_names_may_be_maps(tmp_path: Path) -> None:
    settings = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "chat_template": "{{ bos_token }}",
    }
    write_json(tmp_path / "tokenizer_config.json", settings)
    assert Template.from_folder(tmp_path).render(USER, now=NOW) == "<s>"
