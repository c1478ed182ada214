"""What the memory guard counts as explained, and whose connections it spares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlxpool.broker.transport.memory_guard import _bytes_held, busy_descriptors
from support import kinds
from support.core_harness import Story


def test_a_connection_with_a_stream_or_an_open_call_is_busy(story: Story) -> None:
    story.generate(link=1)
    story.ask(kinds.TOKENIZE, 2, model="m", text="a")
    story.hear(3)
    peers = {n: SimpleNamespace(descriptor=10 + n) for n in (1, 2, 3)}
    front: Any = SimpleNamespace(by_number=peers)
    assert busy_descriptors(front, story.core.state) == {11, 12}
    assert busy_descriptors(front, story.core.state, story.now) == set()


def test_blobs_of_open_calls_are_explained_memory(story: Story) -> None:
    worker = story.ready_worker()
    story.ask(kinds.TOKENIZE, 1, bytes(500), model="m", text=True)
    story.ask(kinds.TOKENIZE, 1, bytes(70), model="other", text=True)
    assert worker.asked
    assert _bytes_held(story.core.state) == 570
