"""The progress block: one process writes it, another reads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mlxpool.common.progress import PHASES, Block, ProgressReading

REQUEST = bytes(range(16))


def test_a_reading_has_the_written_words() -> None:
    block = Block.private()
    for word, value in (("count", 7), ("tokens", 2048), ("fresh", 1), ("usual_step_ns", 5)):
        block.write(word, value)
    block.write("phase", PHASES.index("prefill"))
    block.write_request(REQUEST)
    look = block.read()
    assert look == ProgressReading(
        "prefill", count=7, tokens=2048, fresh=True, usual_step_ns=5, request=REQUEST
    )
    block.write_request(None)
    assert block.read().request is None
    block.close()


def test_an_unwritten_block_reads_as_defaults() -> None:
    block = Block.private()
    assert block.read() == ProgressReading()
    block.close()


def test_a_negative_value_and_a_wild_phase_do_no_harm() -> None:
    block = Block.private()
    block.write("since_ns", -5)
    block.write("phase", 2**40 + 3)
    assert block.read().since_ns == 0
    assert block.read().phase in PHASES
    block.close()


WRITER = """
import sys
from mlxpool.common.progress import Block
block = Block.open(int(sys.argv[1]))
block.write("count", 41)
block.write_request(bytes(range(16)))
"""


@pytest.mark.parametrize("linux", [True, False])
def test_another_process_writes_it(monkeypatch: pytest.MonkeyPatch, linux: bool) -> None:
    if not linux:
        monkeypatch.setattr("mlxpool.common.progress.sys.platform", "elsewhere")
    block, descriptor = Block.create()
    try:
        subprocess.run(
            [sys.executable, "-c", WRITER, str(descriptor)], pass_fds=[descriptor], check=True
        )
    finally:
        os.close(descriptor)
    assert block.read().count == 41
    assert block.read().request == REQUEST
    block.close()
