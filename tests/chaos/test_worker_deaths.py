"""Workers that die in every phase: their streams are resumed and stay correct."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.checker import read
from chaos.harness import Chaos, model
from mlxpool.common.errors import ModelLoadFailed, ModelUnavailable, Poisoned, WorkerLost
from support.pool import until

Patch = pytest.MonkeyPatch

PHASES = ("load", "accept", "prefill", "decode", "end", "after_end")
CAUSES = {
    "kill": "killed by SIGKILL",
    "exit": "exit code 0",
    "exit3": "exit code 3",
    "segfault": "killed by SIGSEGV",
    "abort": "killed by SIGABRT",
    "device": "the device is lost: DeviceGone: the fault `device` is set for this counting model",
}


# The faults of models, by their names.
DEATHS: dict[str, dict[str, Any]] = {
    **{f"kill-{phase}": {"fault": "kill", "fault_in": phase, "fault_at": 3} for phase in PHASES},
    **{name: {"fault": name, "fault_in": "decode", "fault_at": 10} for name in CAUSES},
    **{f"lost-{phase}": {"fault": "device", "fault_in": phase, "fault_at": 3} for phase in PHASES},
}


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    """A pool with a model for each fault of DEATHS, which ends the model's first worker."""
    config = "".join(model(name, **fault, fault_times=1) for name, fault in DEATHS.items())
    with Patch.context() as patch, Chaos(tmp_path_factory.mktemp("dying"), patch, config) as chaos:
        yield chaos


@pytest.mark.parametrize("phase", PHASES)
def test_sigkill_everywhere(dying: Chaos, phase: str) -> None:
    name = f"kill-{phase}"
    dying.assert_all_done(dying.start(30, 4, model=name))
    assert "killed by SIGKILL" in dying.causes(name)[0]


@pytest.mark.parametrize("name", [n for n in CAUSES if n != "kill"])
def test_other_causes_of_death(dying: Chaos, name: str) -> None:
    dying.assert_all_done(dying.start(30, 3, model=name))
    assert dying.causes(name)[0] == CAUSES[name]


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "load"])
def test_a_lost_device_everywhere(dying: Chaos, phase: str) -> None:
    """A worker that loses its device at the third token is replaced, and all streams complete."""
    name = f"lost-{phase}"
    dying.assert_all_done(dying.start(30, 4, model=name))
    if phase not in ("end", "after_end"):  # perhaps no request is left to compute
        assert dying.causes(name) == [CAUSES["device"]]


def test_a_kill_with_text_held_back(tmp_path: Path, monkeypatch: Patch) -> None:
    """Text that is held back because it may begin a stop string is recovered from the ids."""
    config = model(fault="kill", fault_in="decode", fault_at=12, fault_times=1)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        (probe,) = chaos.start(8)
        chaos.finish([probe])
        text = "".join(f"{token} " for token in probe.wanted)
        stop = text[-6:] + "never"
        chaos.start(40, 3, stop=[stop])
        chaos.assert_all_done()


def test_a_kill_while_the_window_is_full(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=1000)) as chaos:
        streams = chaos.start(300, 2, window=1)
        chaos.reach(streams, 2)
        chaos.signal_worker("m/0", signal.SIGKILL)
        chaos.assert_all_done()


def test_two_kills_of_one_stream(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=20_000)) as chaos:
        streams = chaos.start(220, 3)  # too many ids for a stream to end before the second kill
        for had in (20, 70):
            chaos.reach(streams, had)
            chaos.signal_worker("m/0", signal.SIGKILL)
        chaos.assert_all_done()
        attempts = [stream.result.attempts for stream in streams if stream.result is not None]
        assert min(attempts) >= 2 and max(attempts) >= 3  # a queued stream was not hit


def test_a_warm_replica_resumes_the_streams(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(replicas=2, step_us=5000)) as chaos:
        chaos.pool.ask("load", model="m")
        for slot in ("m/0", "m/1"):
            chaos.pool.in_state(slot, state="ready")
        streams = chaos.start(100, 4)
        chaos.reach(streams, 10)
        chaos.signal_worker("m/0", signal.SIGKILL)
        chaos.assert_all_done()
        dispatched = [
            line["slot"] for line in read(chaos.folder) if line["what"] == "work" and "slot" in line
        ]
        assert sorted(dispatched[:4]) == ["m/0", "m/0", "m/1", "m/1"]
        assert chaos.causes() == ["killed by SIGKILL"]


def test_a_stream_that_is_not_durable_gets_the_error(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        (not_durable,) = chaos.start(5000, durable=False)
        (durable,) = chaos.start(60)
        chaos.reach([not_durable, durable], 10)
        chaos.signal_worker("m/0", signal.SIGKILL)
        chaos.finish()
        assert isinstance(not_durable.error, WorkerLost) and not_durable.error.retryable
        assert durable.result is not None
        chaos.assert_sound()


@pytest.mark.parametrize("name", ["segfault", "device"])
def test_a_poisonous_request_does_not_fail_others(
    tmp_path: Path, monkeypatch: Patch, name: str
) -> None:
    config = model(fault=name, fault_in="decode", fault_at=5, fault_prompt="poison")
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        innocent = chaos.start(120, 4)
        chaos.reach(innocent, 5)
        (bad,) = chaos.start(50, prompt="poison")
        chaos.finish()
        assert isinstance(bad.error, Poisoned)
        assert all(stream.result is not None for stream in innocent)
        chaos.assert_sound()
        again = chaos.client
        with pytest.raises(Poisoned):
            again.generate("m", bad.prompt, max_tokens=50, seed=bad.seed)


@pytest.mark.parametrize("name", ["abort", "device"])
def test_poison_in_prefill_is_blamed_alone(tmp_path: Path, monkeypatch: Patch, name: str) -> None:
    config = model(fault=name, fault_in="prefill", fault_at=0, fault_prompt="poison")
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        innocent = chaos.start(150, 4)
        chaos.reach(innocent, 5)
        (bad,) = chaos.start(50, prompt="poison")
        chaos.finish()
        assert isinstance(bad.error, Poisoned)
        assert all(stream.result and stream.result.attempts <= 3 for stream in innocent)
        assert len(chaos.causes()) == 2
        chaos.assert_sound()


@pytest.mark.parametrize(("name", "poisons"), [("abort", 1), ("abort", 2), ("device", 2)])
def test_poison_among_prompts_of_one_pass(
    tmp_path: Path, monkeypatch: Patch, name: str, poisons: int
) -> None:
    several = {"joint": 32, "prefill_us": 500}
    fault = {"fault": name, "fault_in": "prefill", "fault_prompt": "poison"}
    config = model(extra="sequences = 32", **several, **fault)  # type: ignore[arg-type]
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        innocent = chaos.start(
            30, prompt="x" * 400
        )  # requests that arrive during its prefill share one pass
        bad = [stream for n in range(poisons) for stream in chaos.start(30, prompt=f"poison {n}")]
        innocent += chaos.start(30, 20)
        chaos.finish()
        assert all(isinstance(stream.error, Poisoned) for stream in bad)
        assert all(stream.result for stream in innocent)
        chaos.assert_sound()


def test_a_load_that_crashes_a_few_times(tmp_path: Path, monkeypatch: Patch) -> None:
    config = model(fault="abort", fault_in="load", fault_at=4, fault_times=3)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(10, 3)
        chaos.assert_all_done()
        assert chaos.causes()[:3] == ["killed by SIGABRT"] * 3


def test_a_load_that_always_crashes_opens_the_breaker(tmp_path: Path, monkeypatch: Patch) -> None:
    config = model(fault="exit3", fault_in="load") + model("well")
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        (well,) = chaos.start(100, model="well")
        (stream,) = chaos.start(10)
        chaos.finish()
        assert isinstance(stream.error, ModelUnavailable)
        assert "5 times in a row (last: exit code 3)" in stream.error.message
        assert stream.error.retry_after_ms is not None
        with pytest.raises(ModelUnavailable):
            chaos.client.generate("m", "again", max_tokens=1)
        assert well.result is not None
        chaos.assert_sound()


def test_a_failed_load_is_reported(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(fault="raise", fault_in="load")) as chaos:
        (stream,) = chaos.start(10)
        chaos.finish()
        assert isinstance(stream.error, ModelLoadFailed)
        chaos.assert_sound()


def test_a_leak_ends_at_the_memory_limit(tmp_path: Path, monkeypatch: Patch) -> None:
    config = model(
        extra='memory_limit = "300MB"', fault="leak", fault_in="decode", fault_at=5, fault_times=1
    )
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(40, 2)
        chaos.assert_all_done()
        assert "out of memory" in chaos.causes()[0]


def test_streams_of_drained_workers_are_resumed(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(replicas=2, step_us=5000)) as chaos:
        streams = chaos.start(200, 4)
        chaos.reach(streams, 10)
        chaos.pool.ask("drain", slot="m/0", timeout_ms=0)
        chaos.reach(streams, 60)
        chaos.pool.ask("restart", slot="m/1")
        chaos.assert_all_done()
        assert set(chaos.causes()) == {"drained"}


def test_a_drained_pool_ends_when_its_streams_have(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        streams = chaos.start(100, 3)
        chaos.reach(streams, 5)
        chaos.pool.ask("drain")
        chaos.finish()
        assert all(stream.result is not None for stream in streams)
        process = chaos.pool.process
        assert process is not None
        until(lambda: process.poll() is not None, "the broker has ended")
        assert chaos.check().sound
