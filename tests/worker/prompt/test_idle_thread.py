"""Long work takes what the threads that decode leave, and is given up when that is nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from mlxpool.worker.prompt.chat_template.renderer import Renderer
from mlxpool.worker.prompt.chat_template.sandbox import Template
from mlxpool.worker.prompt.chat_template.templates import DEFAULT, Chat
from mlxpool.worker.prompt.idle_thread import of_what_is_left, take_what_is_left
from mlxpool.worker.prompt.tokenizer import LONG, Text
from mlxpool.worker.weights.files import folder_files
from mlxpool.worker.weights.inspect import inspect
from support.pool import PATIENCE
from support.worker_checkpoints import write_checkpoint

# It takes 0.15 s of a core, three times rendering.BRIEF; what a busy machine leaves is little.
LONG_CHAT = "{% for i in range(2999) %}{% for j in range(999) %}{% endfor %}{% endfor %}x"

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such class")


@linux
def test_the_thread_is_below_every_other_and_the_caller_is_not() -> None:
    here = os.sched_getscheduler(0)
    assert of_what_is_left(lambda: os.sched_getscheduler(0), PATIENCE) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == here != os.SCHED_IDLE


@linux
def test_what_is_not_done_in_time_is_given_up() -> None:
    go_on = threading.Event()
    assert of_what_is_left(go_on.wait, 0.01) is None
    left = [thread for thread in threading.enumerate() if thread.name == "gentle"]
    go_on.set()
    for thread in left:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@linux
def test_what_raises_gives_nothing() -> None:
    assert of_what_is_left(lambda: 1 // 0, PATIENCE) is None


def test_without_such_a_class_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    done: list[int] = []
    assert of_what_is_left(lambda: done.append(1), PATIENCE) is None and done == []
    take_what_is_left()


@pytest.mark.parametrize("left", [True, False])
def test_a_long_text_has_the_same_ids_either_way(
    tmp_path: Path, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not left:
        monkeypatch.setattr(sys, "platform", "darwin")
    text = Text.from_folder(inspect(folder_files(write_checkpoint(tmp_path))))
    short = "né<|user|> x"
    ids = text.encode(short)
    prefix = len(text.prefix)
    assert text.encode(short * LONG)[prefix:] == ids[prefix:] * LONG


@linux
def test_the_chat_after_a_long_one_has_another_process() -> None:
    renderer = Renderer(Chat({DEFAULT: Template(LONG_CHAT)}, {}), limit=PATIENCE)
    for _ in range(2):
        assert renderer.render([{"role": "user", "content": "x"}], [], 0.0).text == "x"
        assert psutil.Process().children() == []


@linux
def test_a_long_chat_takes_what_is_left_from_then_on() -> None:
    """In a process of its own, for there is no way back."""
    code = """
import os, socket
from mlxpool.worker.prompt.chat_template import render_loop as rendering
from mlxpool.worker.prompt.chat_template.pipe import packed, received
ours, theirs = socket.socketpair()
rendering.BRIEF = 0.01
classes = []
answer = rendering.answer
def watched(*arguments):
    classes.append(os.sched_getscheduler(0))
    found = answer(*arguments)
    classes.append(os.sched_getscheduler(0))
    return found
rendering.answer = watched
first = {"sources": {"default": LONG_CHAT}, "tokens": {}, "limit": 60.0, "most": 100}
def chat(text):
    messages = [{"role": "user", "content": text}]
    return packed({"messages": messages, "tools": [], "now": 0.0, "think": None})
ours.sendall(packed(first) + chat("x"))
ours.shutdown(socket.SHUT_WR)
rendering.serve(theirs)
theirs.close()
assert classes == [os.SCHED_OTHER, os.SCHED_IDLE], classes
(found,) = received(ours)
assert found["text"] == "x" and found["last"], found
"""
    subprocess.run([sys.executable, "-c", f"LONG_CHAT = {LONG_CHAT!r}{code}"], check=True)
