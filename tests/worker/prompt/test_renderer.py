"""The renderer process: results, limits, and that a template harms that process only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mlxpool.common.errors import BadRequest, Internal
from mlxpool.worker.prompt.chat_template.renderer import RenderedChat, Renderer
from mlxpool.worker.prompt.chat_template.sandbox import MAX_RENDERER_MEMORY, Template
from mlxpool.worker.prompt.chat_template.templates import DEFAULT, ChatTemplates
from mlxpool.worker.system.idle_thread import LONG_WORK_NICENESS
from support.pool import PATIENCE, gone, until

Make = Callable[..., Renderer]
CHAT = [{"role": "user", "content": "hi \ud800 \U0001f600", "extra": [b"\0", 2**99]}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
BLOCKS = (
    "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% macro g(n) %}{% if n %}{% call f() %}{{ g(n - 1) }}{% endcall %}{% endif %}{% endmacro %}"
    "{{ g(30) }}"
)
RECURSIVE = (
    "{% for a in [1, 1] recursive %}{% if loop.depth < 30 %}{{ loop([1, 1]) }}{% endif %}"
    "{% endfor %}"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="a feature of Linux")


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Renderer] = []

    def one(source: str | None, **options: float) -> Renderer:
        templates = {} if source is None else {DEFAULT: Template(source)}
        made.append(Renderer(ChatTemplates(templates, {"bos_token": "<s>"}), **options))
        return made[-1]

    yield one
    for renderer in made:
        renderer.close()


def children() -> list[psutil.Process]:
    """The renderer processes of this process."""
    found = psutil.Process().children()
    return [
        p
        for p in found
        if "mlxpool.worker.prompt.chat_template.renderer_process" in " ".join(p.cmdline())
    ]


def test_the_process_renders_and_stays(make: Make) -> None:
    renderer = make("{{ bos_token }}{{ strftime_now('%Y') }}{{ messages[0].content }}")
    assert renderer.render(CHAT, [], 0.0) == RenderedChat("<s>1970hi \ud800 \U0001f600", 0)
    before = children()
    assert renderer.render(CHAT, [], 1e9).text.startswith("<s>2001")
    assert children() == before and len(before) == 1


def test_the_end_of_the_messages(make: Make) -> None:
    renderer = make("{{ tools | length }}é{% if add_generation_prompt %}>{% endif %}")
    assert renderer.render(CHAT, [{}], 0.0) == RenderedChat("1é>", 2)


def test_templates_by_name() -> None:
    renderer = Renderer(ChatTemplates({"default": Template("D"), "tool_use": Template("T")}))
    assert renderer.render(CHAT, [], 0.0).text == "D"
    assert renderer.render(CHAT, [{}], 0.0).text == "T"
    renderer.close()


def test_large_chats_are_rendered_whole(make: Make) -> None:
    text = "é" * 2**20
    large = [{"role": "user", "content": text}]
    assert make("{{ messages[0].content }}").render(large, [], 0.0).text == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no pets') }}", "refused the messages: no pets"),
        ("a\n{{ 1 / 0 }}", "failed at line 2: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed.*recursion"),
        pytest.param(
            "\n{{ 'x' * 2**31 }}",
            f"line 2: it takes more than {MAX_RENDERER_MEMORY} bytes",
            marks=linux,
        ),
        ("{{ 'x' * 5000000 }}", "5000000 characters, at most 4194304"),
    ],
)
def test_a_failed_chat_is_a_bad_request_and_the_process_stays(
    make: Make, source: str, words: str
) -> None:
    renderer = make(
        f"{{% if messages | length > 1 %}}{source}{{% else %}}ok{{% endif %}}", timeout=PATIENCE
    )
    renderer.start()
    before = children()
    with pytest.raises(BadRequest, match=words):
        renderer.render(CHAT * 2, [], 0.0)
    assert renderer.render(CHAT, [], 0.0).text == "ok"
    assert children() == before


@pytest.mark.parametrize(
    "source",
    [LOOP, TWICE, BLOCKS, RECURSIVE, "{{ (8 + messages | length) ** (10 ** 9) }}"],
    ids=["loops", "macros", "called blocks", "recursive loops", "one expression"],
)
def test_a_template_without_end_is_stopped(make: Make, source: str) -> None:
    renderer = make(f"{{% if messages | length > 1 %}}{source}{{% endif %}}ok", timeout=1.0)
    assert renderer.render(CHAT, [], 0.0).text == "ok"
    before = children()
    with pytest.raises(BadRequest, match=r"not done after 1 s: it was stopped"):
        renderer.render(CHAT * 2, [], 0.0)
    assert renderer.render(CHAT, [], 0.0).text == "ok"
    assert len(children()) == 1 and children() != before


def test_the_second_rendering_shares_the_time_limit(make: Make) -> None:
    renderer = make(f"{{% if not add_generation_prompt %}}{LOOP}{{% endif %}}ok", timeout=0.3)
    with pytest.raises(BadRequest, match="not done"):
        renderer.render(CHAT, [], 0.0)


def test_a_template_has_2_seconds(make: Make) -> None:
    with pytest.raises(BadRequest, match=r"not done after 2 s"):
        make(LOOP).render(CHAT, [], 0.0)


# ---- the process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_killed_from_outside_is_replaced(make: Make, number: int) -> None:
    renderer = make("ok")
    renderer.start()
    (child,) = children()
    child.send_signal(number)
    assert renderer.render(CHAT, [], 0.0).text == "ok"
    assert child not in children() and len(children()) == 1


def test_tries_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(BadRequest, match="ended its process 2 times, with code 1"):
        make("ok").render(CHAT, [], 0.0)
    assert children() == []


def test_a_process_that_cannot_be_started_is_an_internal_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(Internal, match=r"could be started: .*/nowhere"):
        make("ok").render(CHAT, [], 0.0)


def test_no_process_without_a_template(make: Make) -> None:
    renderer = make(None)
    renderer.start()
    with pytest.raises(BadRequest, match="no chat template"):
        renderer.render(CHAT, [], 0.0)
    assert children() == []


def test_closing_leaves_no_process_and_no_descriptor(make: Make) -> None:
    make("ok").render(CHAT, [], 0.0)  # what Python opens once is open now
    before = psutil.Process().num_fds()
    renderer = make("ok")
    renderer.render(CHAT, [], 0.0)
    assert psutil.Process().num_fds() == before + 1
    forgotten = children()
    renderer.close()
    assert len(forgotten) == 2 and len(children()) == 1
    assert psutil.Process().num_fds() == before


def test_the_process_inherits_no_descriptor_and_has_a_lower_priority(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    renderer = make("ok")
    renderer.render(CHAT, [], 0.0)
    (child,) = children()
    assert child.nice() == min(os.nice(0) + LONG_WORK_NICENESS, 19)
    assert "LD_PRELOAD" not in child.environ()
    assert child.num_fds() == 4  # the three of every process, and its socket once more


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in an endless template"])
@linux
def test_the_process_ends_with_its_worker(tmp_path: Path, busy: bool) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        f"""
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.prompt.chat_template.renderer import Renderer
from mlxpool.worker.prompt.chat_template.sandbox import Template
source = "{{% if messages | length > 1 %}}{LOOP}{{% endif %}}"
renderer = Renderer(ChatTemplates({{"default": Template(source)}}), timeout=1000)
renderer.render([{{}}], [], 0.0)
print("ready", flush=True)
renderer.render([{{}}] * {1 + busy}, [], 0.0)
input()
"""
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
            (child,) = psutil.Process(worker.pid).children()
            if busy:
                start = child.cpu_times().user
                until(lambda: child.cpu_times().user > start + 0.1, "it is at work")
        finally:
            worker.kill()
    until(lambda: gone(child), "it has ended")
