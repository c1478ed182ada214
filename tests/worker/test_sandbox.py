"""One template: what templates use, by feature; what fails; and the bounds of time and size."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker import sandbox
from mlxpool.worker.sandbox import Contents, Template
from template_features import FEATURES, USER

NOW = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


class Clock:
    """Time that passes only when it is looked at or slept through."""

    def __init__(self, step: float) -> None:
        self.now, self.step, self.slept = 0.0, step, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    given = {"messages": messages, "add_generation_prompt": True, "tools": None, **variables}
    return Template(source).render(given, NOW)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_templates(feature: str) -> None:
    source, variables, expected = FEATURES[feature]
    assert render(source, **variables) == expected


def test_the_features_give_what_transformers_gives() -> None:
    """Where that library is installed; it shows local time, so `now` is left out."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for feature, (source, variables, expected) in FEATURES.items():
        if not feature.startswith("now"):
            given = {"messages": USER, "add_generation_prompt": True, "tools": None, **variables}
            template = utils._compile_jinja_template(source)
            assert template.render(**given) == expected, feature


def test_a_template_refuses_with_its_own_words() -> None:
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
        ("{{ 'a' * 2**25 }}", "makes 33554432 items, at most 16777216"),
        ("{{ ([1] * 2**12) * 2**13 }}", "makes 33554432 items"),
        ("{{ 9 ** 9999 }}", "a number of .* bits, at most 4096"),
        ("{{ (2 ** 2000) * (2 ** 2200) }}", "a number of .* bits"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str, words: str) -> None:
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
def test_a_template_that_does_not_compile_is_told_at_once(source: str, words: str) -> None:
    with pytest.raises(ModelLoadFailed, match=words):
        Template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(99) }}",
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro g(n) %}{% if n %}{% call f() %}{{ g(n - 1) }}{% endcall %}{% endif %}"
        "{% endmacro %}"
        "{{ g(99) }}",
        "{% for a in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    ],
    ids=["loops", "macros", "called blocks", "recursive loops"],
)
def test_a_template_without_end_is_stopped(source: str) -> None:
    clock = Clock(step=0.05)
    with pytest.raises(BadRequest, match=r"not done after 2 s: it was stopped"):
        Template(source, clock=clock, sleep=clock.sleep).render({}, NOW)
    assert clock.now < sandbox.LIMIT + 1


def test_its_time_begins_anew_with_each_rendering() -> None:
    clock = Clock(step=0.1)
    template = Template("{% for a in range(9) %}x{% endfor %}", clock=clock, sleep=clock.sleep)
    assert [template.render({}, NOW) for _ in range(9)] == ["x" * 9] * 9


def test_one_that_takes_long_rests_most_of_the_time() -> None:
    clock = Clock(step=0.0001)
    source = "{% for a in range(2000) %}{% endfor %}"
    Template(source, clock=clock, sleep=clock.sleep).render({}, NOW)
    assert clock.slept > 0.7 * (clock.now - sandbox.FREE)
    quick = Clock(step=0.0001)
    Template("{% for a in range(50) %}{% endfor %}", clock=quick, sleep=quick.sleep).render({}, NOW)
    assert quick.slept == 0


@pytest.mark.parametrize(
    ("source", "contents"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", Contents.TEXT),
        ("{% for part in m.content %}{{ part.text }}{% endfor %}", Contents.PARTS),
        ("{% for part in m['content'] %}{{ part.text }}{% endfor %}", Contents.PARTS),
        (
            "{% set content = m.content %}{% for c in content %}{{ c.text }}{% endfor %}",
            Contents.PARTS,
        ),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}",
            Contents.EITHER,
        ),
    ],
)
def test_what_a_template_takes_as_content(source: str, contents: Contents) -> None:
    assert Template(source).contents is contents
