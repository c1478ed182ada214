"""Faults in streams with context shifts: the ids are those of an undisturbed run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import Chaos, model

Patch = pytest.MonkeyPatch

SHIFT: dict[str, Any] = {"shift": True, "num_ctx": 32, "num_keep": 3}  # a cut every 14 tokens


# A prompt of 7 tokens fills the context with 25 ids.
DEATHS: dict[str, dict[str, Any]] = {
    f"{fault}-{at}": {"fault": fault, "fault_in": "decode", "fault_at": at, "fault_times": 1}
    for at in (24, 25, 26, 39, 100)
    for fault in ("kill", "device")
}
# The token at index 10 is read as part of a prefill chunk only after a cut.
READING: dict[str, Any] = {"fault": "kill", "fault_in": "prefill", "fault_at": 10, "fault_times": 1}


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    """A pool with a model for each fault of DEATHS, and a model whose worker dies in a prefill."""
    models = [model(name, **fault) for name, fault in DEATHS.items()]
    config = "".join([*models, model("reading", **READING)])
    with Patch.context() as patch, Chaos(tmp_path_factory.mktemp("dying"), patch, config) as chaos:
        yield chaos


@pytest.mark.parametrize("name", DEATHS)
def test_a_worker_dies_at_before_and_after_a_cut(dying: Chaos, name: str) -> None:
    streams = dying.start(200, 4, model=name, **SHIFT)
    dying.assert_all_done(streams)
    assert len(dying.causes(name)) == 1


def test_a_worker_dies_while_it_reads_the_tokens_behind_a_cut(dying: Chaos) -> None:
    streams = dying.start(200, 4, model="reading", **SHIFT)
    dying.assert_all_done(streams)
    assert dying.causes("reading") == ["killed by SIGKILL"]


def test_workers_and_the_broker_die_again_and_again(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        shifted = chaos.start(300, 2, **SHIFT)
        shifted += chaos.start(300, 1, **SHIFT, window=16)
        plain = chaos.start(300, 1)
        for had in (20, 70, 120):
            chaos.reach([*shifted, *plain], had)
            chaos.signal_worker("m/0", signal.SIGKILL)
        chaos.reach(shifted, 170)
        chaos.restart_broker()
        chaos.reach(shifted, 220)
        chaos.pool.ask("restart", slot="m/0")
        chaos.assert_all_done()


def test_two_replicas_cut_a_stream_alike(tmp_path: Path, monkeypatch: Patch) -> None:
    config = model(replicas=2, step_us=20_000)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.pool.ask("load", model="m")
        for slot in ("m/0", "m/1"):
            chaos.pool.in_state(slot, state="ready")
        streams = chaos.start(150, 4, **SHIFT)
        chaos.reach(streams, 40)
        chaos.signal_worker("m/0", signal.SIGKILL)
        chaos.assert_all_done()
        assert any(stream.result and stream.result.attempts == 2 for stream in streams)
