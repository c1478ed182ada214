"""Long work runs in SCHED_IDLE, and is given up if it gets no processor time."""

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
from mlxpool.worker.prompt.chat_template.templates import DEFAULT, ChatTemplates
from mlxpool.worker.prompt.tokenizer import LONG_TEXT, ChatTokenizer
from mlxpool.worker.system.idle_thread import become_idle_class, run_idle
from mlxpool.worker.weights.files import folder_files
from mlxpool.worker.weights.inspect import inspect
from support.pool import PATIENCE
from support.worker_checkpoints import write_checkpoint

# It takes 0.15 s of a core, three times NORMAL_PRIORITY_TIME; what a busy machine leaves is little.
LONG_CHAT = "{% for i in range(2999) %}{% for j in range(999) %}{% endfor %}{% endfor %}x"

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such class")


@linux
def test_the_thread_is_in_the_idle_class_and_the_caller_is_not() -> None:
    here = os.sched_getscheduler(0)
    assert run_idle(lambda: os.sched_getscheduler(0), PATIENCE) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == here != os.SCHED_IDLE


@linux
def test_work_is_given_up_after_the_timeout() -> None:
    go_on = threading.Event()
    assert run_idle(go_on.wait, 0.01) is None
    left = [thread for thread in threading.enumerate() if thread.name == "idle"]
    go_on.set()
    for thread in left:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@linux
def test_work_that_raises_gives_none() -> None:
    assert run_idle(lambda: 1 // 0, PATIENCE) is None


def test_without_the_idle_class_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    done: list[int] = []
    assert run_idle(lambda: done.append(1), PATIENCE) is None and done == []
    become_idle_class()


@pytest.mark.parametrize("left", [True, False])
def test_a_long_text_has_the_same_ids_with_and_without_the_idle_class(
    tmp_path: Path, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not left:
        monkeypatch.setattr(sys, "platform", "darwin")
    text = ChatTokenizer.from_folder(inspect(folder_files(write_checkpoint(tmp_path))))
    short = "né<|user|> x"
    ids = text.encode(short)
    prefix = len(text.prefix)
    assert text.encode(short * LONG_TEXT)[prefix:] == ids[prefix:] * LONG_TEXT


@linux
def test_a_long_chat_is_the_last_of_its_process() -> None:
    renderer = Renderer(ChatTemplates({DEFAULT: Template(LONG_CHAT)}, {}), timeout=PATIENCE)
    for _ in range(2):
        assert renderer.render([{"role": "user", "content": "x"}], [], 0.0).text == "x"
        assert psutil.Process().children() == []


@linux
def test_a_long_chat_moves_the_process_to_the_idle_class() -> None:
    """In a separate process, because a process cannot leave the class."""
    code = """
import os, socket
from mlxpool.worker.prompt.chat_template import renderer_process
from mlxpool.worker.prompt.chat_template.renderer_process import pack, receive
ours, theirs = socket.socketpair()
renderer_process.NORMAL_PRIORITY_TIME = 0.01
classes = []
render = renderer_process.render
def watched(*arguments):
    classes.append(os.sched_getscheduler(0))
    found = render(*arguments)
    classes.append(os.sched_getscheduler(0))
    return found
renderer_process.render = watched
first = {"sources": {"default": LONG_CHAT}, "tokens": {}, "timeout": 60.0, "max_chars": 100}
def chat(text):
    messages = [{"role": "user", "content": text}]
    return pack({"messages": messages, "tools": [], "now": 0.0, "think": None})
ours.sendall(pack(first) + chat("x"))
ours.shutdown(socket.SHUT_WR)
renderer_process.serve(theirs)
theirs.close()
assert classes == [os.SCHED_OTHER, os.SCHED_IDLE], classes
(found,) = receive(ours)
assert found["text"] == "x" and found["last"], found
"""
    subprocess.run([sys.executable, "-c", f"LONG_CHAT = {LONG_CHAT!r}{code}"], check=True)
