"""Tests one chat template: its features and errors. For its bounds see test_lane_service.py."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker.prompt.chat_template.sandbox import MAX_MEMORY, ContentForm, Template
from support.template_features import FEATURES, USER

NOW = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    given = {"messages": messages, "add_generation_prompt": True, "tools": None, **variables}
    return Template(source).render(given, NOW)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_templates(feature: str) -> None:
    source, variables, expected = FEATURES[feature]
    assert render(source, **variables) == expected


def test_features_match_transformers() -> None:
    """Runs only if transformers is installed.

    transformers uses local time, so `now` is not compared.
    """
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for feature, (source, variables, expected) in FEATURES.items():
        if not feature.startswith("now"):
            given = {"messages": USER, "add_generation_prompt": True, "tools": None, **variables}
            template = utils._compile_jinja_template(source)
            assert template.render(**given) == expected, feature


def test_raise_exception_is_quoted() -> None:
    source = FEATURES["roles in turn, or an exception"][0]
    with pytest.raises(BadRequest, match=r"refused the messages: roles must alternate"):
        render(source, [*USER, *USER])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1 / 0 }}", "failed at line 1: division by zero"),
        ("a\n\n{{ 'a' + 1 }}", "failed at line 3"),
        ("{% macro f() %}\n{{ nothing.at.all }}{% endmacro %}\n{{ f() }}", "line 2: 'nothing' is"),
        ("{{ ''.__class__.__mro__ }}", "failed.*unsafe"),
        ("{{ messages.append(1) }}", "failed.*unsafe|failed.*not safely callable"),
        ("{{ range(10**7)|length }}", "failed.*[Rr]ange too big"),
        ("{% include 'other' %}", "failed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed.*recursion"),
        ("{{ messages[0].content.nope() }}", "failed"),
        ("{{ messages | tojson(indent='x' * 2, nope=1) }}", "failed"),
    ],
)
def test_a_failing_template_is_a_bad_request(source: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        render(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "the chat template fails to compile at line 1: Expected an expression"),
        ("{% for x in messages %}\n{{ x ", "compile at line 2"),
        ("a\n\n{{ x | no_such_filter }}", "compile at line 3: No filter named 'no_such_filter'"),
        ("{% unknown %}", "at line 1: Encountered unknown tag 'unknown'"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "fails to compile: RecursionError"),
    ],
)
def test_a_template_that_does_not_compile_fails_the_load(source: str, words: str) -> None:
    with pytest.raises(ModelLoadFailed, match=words):
        Template(source)


@pytest.mark.parametrize(
    "source",
    ["{{ 9 ** 9 ** 9 }}", "{{ 'x' * 2**50 }}", "{{ 'x' | center(2**50) }}", "{% if 9**9**9 %}"],
)
def test_compiling_evaluates_nothing(source: str) -> None:
    """Compiling a template evaluates nothing of it.

    It happens in the worker, without bounds on time and memory.
    """
    end = "{% endif %}" if source.startswith("{%") else ""
    assert Template(source + end).content_form is ContentForm.TEXT


def test_running_out_of_memory_names_the_line_and_the_bound() -> None:
    def greedy() -> None:
        raise MemoryError

    with pytest.raises(
        BadRequest, match=rf"line 2: it takes more than {MAX_MEMORY} bytes of memory"
    ):
        render("\n{{ greedy() }}", greedy=greedy)


@pytest.mark.parametrize(
    ("source", "contents"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ContentForm.TEXT),
        ("{% for part in m.content %}{{ part.text }}{% endfor %}", ContentForm.PARTS),
        ("{% for part in m['content'] %}{{ part.text }}{% endfor %}", ContentForm.PARTS),
        (
            "{% set content = m.content %}{% for c in content %}{{ c.text }}{% endfor %}",
            ContentForm.PARTS,
        ),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}",
            ContentForm.EITHER,
        ),
    ],
)
def test_content_form_of_a_template(source: str, contents: ContentForm) -> None:
    assert Template(source).content_form is contents
