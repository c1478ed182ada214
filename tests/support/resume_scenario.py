"""A scenario of losses that a client of docs/protocol.md must survive, played by a fake broker."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds
from support.fake_broker import FACTS, PATIENCE, FakeBroker, fake_broker


def output_over_every_loss(command: Sequence[str]) -> str:
    """Runs a client against the losses of `play_every_loss`; returns the client's output.

    A run directory, a model and a prompt are appended to `command`. If no token is lost, the output
    is six `x`. Fails unless the client ends with exit code 0.
    """
    with fake_broker() as broker:
        program = subprocess.Popen(
            [*command, str(broker.run_dir), "m", "hello"], stdout=subprocess.PIPE, text=True
        )
        try:
            play_every_loss(broker.open())
            printed, _ = program.communicate(timeout=PATIENCE)
        finally:
            program.kill()
            program.communicate()
    assert program.returncode == 0
    return printed


def play_every_loss(broker: FakeBroker) -> None:
    """Loses in turn: the broker, the connection, a frame, the admission to the queue, all pongs.

    On a slow machine the client may lose more, and resume with fewer ids: such resumes are skipped.
    """
    request = broker.accept()
    broker.tokens(request, 0, 2, facts=FACTS)
    broker.boot += 1
    expect_resume(broker, request, 2)
    broker.number += 1
    expect_resume(broker, request, 3)
    broker.tokens(request, 9)
    expect_resume(broker, request, 4)
    broker.error(request, "draining", retry_after_ms=10)
    expect_resume(broker, request, 5)
    before = broker.peer
    while broker.peer == before:
        broker.receive(kinds.GENERATE, pongs=False)
    broker.accepted(request)
    broker.done(request, 6)


def expect_resume(broker: FakeBroker, request: bytes, have: int) -> None:
    """Waits for the resume with `have` ids, accepts it, and sends one more token id."""
    while (again := broker.receive(kinds.GENERATE)).body["resume"]["count"] != have:
        pass
    assert again.header.id == request and again.body["prompt"] == "hello"
    assert again.body["resume"]["facts"] == FACTS and again.body["resume"]["seed"] == 1
    assert again.blobs == (pack_ids(range(have)),)
    broker.accepted(request)
    broker.tokens(request, have)
