"""Chats are rendered beside the worker, and a template can harm nothing but its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.worker.chat import Template
from mlxpool.worker.renderer import MEMORY, Renderer

Make = Callable[..., Renderer]
CHAT = [{"role": "user", "content": "hi \ud800 \U0001f600"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Renderer] = []

    def one(source: str | None, **options: float) -> Renderer:
        made.append(Renderer(Template(source, {"bos_token": "<s>"}), **options))
        return made[-1]

    yield one
    for renderer in made:
        renderer.close()


def test_gives_what_the_template_gives(make: Make) -> None:
    source = "{{ bos_token }}{{ strftime_now('%Y') }}{{ messages[0].content }}"
    renderer = make(source)
    expected = Template(source, {"bos_token": "<s>"}).render(CHAT, now=0.0)
    assert renderer.render(CHAT, 0.0) == expected == "<s>1970hi \ud800 \U0001f600"
    process = renderer._socket
    assert renderer.render(CHAT, 1e9).startswith("<s>2001") and renderer._socket is process


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no pets') }}", "refused the messages: no pets"),
        ("{% if %}", "broken at line 1"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'x' * 2000000000 }}", f"more than {MEMORY} bytes"),
        ("{{ 'x' * 5000000 }}", "5000000 characters, a prompt holds 4194304"),
    ],
)
def test_what_fails_is_a_bad_request(make: Make, source: str | None, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        make(source).render(CHAT, 0.0)


@pytest.mark.parametrize(
    "source", [LOOP, "{{ (8 + messages | length) ** (10 ** 9) }}"], ids=["loop", "one call"]
)
def test_a_template_that_never_ends_is_ended(make: Make, source: str) -> None:
    renderer = make(f"{{% if messages | length > 1 %}}{source}{{% endif %}}ok", limit=0.3)
    assert renderer.render(CHAT, 0.0) == "ok"
    with pytest.raises(BadRequest, match=r"not done after 0\.3 s"):
        renderer.render(CHAT * 2, 0.0)
    assert renderer.render(CHAT, 0.0) == "ok"


def test_bad_messages_are_named(make: Make) -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\].role is 'owner'"):
        make("x").render([{"role": "owner", "content": "x"}], 0.0)
