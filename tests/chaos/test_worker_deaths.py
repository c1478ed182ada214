"""Workers that die, everywhere they can: nobody but the clock notices."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from chaos.checker import read
from chaos.harness import Chaos, model
from mlxpool.common.errors import ModelLoadFailed, ModelUnavailable, Poisoned, WorkerLost
from support.pool import until

Patch = pytest.MonkeyPatch

PLACES = ("load", "accept", "prefill", "decode", "end", "after_end")
WORDS = {
    "kill": "killed by SIGKILL",
    "exit": "exit code 0",
    "exit3": "exit code 3",
    "segfault": "killed by SIGSEGV",
    "abort": "killed by SIGABRT",
    "device": "the device is lost: DeviceGone: the fault `device` is set for this counting model",
}


@pytest.mark.parametrize("place", PLACES)
def test_sigkill_everywhere(tmp_path: Path, monkeypatch: Patch, place: str) -> None:
    config = model(fault="kill", fault_in=place, fault_at=3, fault_times=1)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(30, 4)
        chaos.assert_all_done()
        assert "killed by SIGKILL" in chaos.causes()[0]


@pytest.mark.parametrize("name", [n for n in WORDS if n != "kill"])
def test_other_ends(tmp_path: Path, monkeypatch: Patch, name: str) -> None:
    config = model(fault=name, fault_in="decode", fault_at=10, fault_times=1)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(30, 3)
        chaos.assert_all_done()
        assert chaos.causes()[0] == WORDS[name]


@pytest.mark.parametrize("place", [place for place in PLACES if place != "load"])
def test_a_lost_device_everywhere(tmp_path: Path, monkeypatch: Patch, place: str) -> None:
    """At the third token a worker has proven nothing yet: its model is tried again all the same."""
    config = model(fault="device", fault_in=place, fault_at=3, fault_times=1)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(30, 4)
        chaos.assert_all_done()
        if place not in ("end", "after_end"):  # there may be nothing left to compute
            assert chaos.causes() == [WORDS["device"]]


def test_a_kill_with_text_held_back(tmp_path: Path, monkeypatch: Patch) -> None:
    """The text of half a stop string is with nobody but the ids; a resume brings it back."""
    config = model(fault="kill", fault_in="decode", fault_at=12, fault_times=1)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        (probe,) = chaos.start(8)
        chaos.finish([probe])
        text = "".join(f"{token} " for token in probe.wanted)
        stop = text[-6:] + "never"
        chaos.start(40, 3, stop=[stop])
        chaos.assert_all_done()


def test_a_kill_behind_a_shut_window(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=1000)) as chaos:
        asks = chaos.start(300, 2, window=1)
        chaos.reach(asks, 2)
        chaos.strike("m/0", signal.SIGKILL)
        chaos.assert_all_done()


def test_two_kills_of_one_stream(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        asks = chaos.start(150, 3)
        for had in (20, 70):
            chaos.reach(asks, had)
            chaos.strike("m/0", signal.SIGKILL)
        chaos.assert_all_done()
        attempts = [ask.result.attempts for ask in asks if ask.result is not None]
        assert min(attempts) >= 2 and max(attempts) >= 3  # who was in the queue was not hit


def test_a_warm_replica_goes_on(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(replicas=2, step_us=5000)) as chaos:
        chaos.pool.ask("load", model="m")
        for slot in ("m/0", "m/1"):
            chaos.pool.in_state(slot, state="ready")
        asks = chaos.start(100, 4)
        chaos.reach(asks, 10)
        chaos.strike("m/0", signal.SIGKILL)
        chaos.assert_all_done()
        given = [
            line["slot"] for line in read(chaos.folder) if line["what"] == "work" and "slot" in line
        ]
        assert sorted(given[:4]) == ["m/0", "m/0", "m/1", "m/1"]
        assert chaos.causes() == ["killed by SIGKILL"]


def test_who_does_not_want_a_resume_gets_the_error(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        (frail,) = chaos.start(200, durable=False)
        (durable,) = chaos.start(60)
        chaos.reach([frail, durable], 10)
        chaos.strike("m/0", signal.SIGKILL)
        chaos.finish()
        assert isinstance(frail.error, WorkerLost) and frail.error.retryable
        assert durable.result is not None
        chaos.assert_sound()


@pytest.mark.parametrize("name", ["segfault", "device"])
def test_a_poisonous_request_takes_nobody_with_it(
    tmp_path: Path, monkeypatch: Patch, name: str
) -> None:
    config = model(fault=name, fault_in="decode", fault_at=5, fault_prompt="poison")
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        innocent = chaos.start(120, 4)
        chaos.reach(innocent, 5)
        (bad,) = chaos.start(50, prompt="poison")
        chaos.finish()
        assert isinstance(bad.error, Poisoned)
        assert all(ask.result is not None for ask in innocent)
        chaos.assert_sound()
        again = chaos.client
        with pytest.raises(Poisoned):
            again.generate("m", bad.prompt, max_tokens=50, seed=bad.seed)


@pytest.mark.parametrize("name", ["abort", "device"])
def test_poison_in_prefill_is_charged_alone(tmp_path: Path, monkeypatch: Patch, name: str) -> None:
    config = model(fault=name, fault_in="prefill", fault_at=0, fault_prompt="poison")
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        innocent = chaos.start(150, 4)
        chaos.reach(innocent, 5)
        (bad,) = chaos.start(50, prompt="poison")
        chaos.finish()
        assert isinstance(bad.error, Poisoned)
        assert all(ask.result and ask.result.attempts <= 3 for ask in innocent)
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
        innocent = chaos.start(30, prompt="x" * 400)  # what comes while it is read is read together
        bad = [ask for n in range(poisons) for ask in chaos.start(30, prompt=f"poison {n}")]
        innocent += chaos.start(30, 20)
        chaos.finish()
        assert all(isinstance(ask.error, Poisoned) for ask in bad)
        assert all(ask.result for ask in innocent)
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
        (ask,) = chaos.start(10)
        chaos.finish()
        assert isinstance(ask.error, ModelUnavailable)
        assert "5 times in a row (last: exit code 3)" in ask.error.message
        assert ask.error.retry_after_ms is not None
        with pytest.raises(ModelUnavailable):
            chaos.client.generate("m", "again", max_tokens=1)
        assert well.result is not None
        chaos.assert_sound()


def test_a_load_that_fails_says_why(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(fault="raise", fault_in="load")) as chaos:
        (ask,) = chaos.start(10)
        chaos.finish()
        assert isinstance(ask.error, ModelLoadFailed)
        chaos.assert_sound()


def test_a_leak_ends_at_the_memory_limit(tmp_path: Path, monkeypatch: Patch) -> None:
    config = model(
        extra='memory_limit = "300MB"', fault="leak", fault_in="decode", fault_at=5, fault_times=1
    )
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(40, 2)
        chaos.assert_all_done()
        assert "out of memory" in chaos.causes()[0]


def test_drained_workers_hand_their_streams_on(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(replicas=2, step_us=5000)) as chaos:
        asks = chaos.start(200, 4)
        chaos.reach(asks, 10)
        chaos.pool.ask("drain", slot="m/0", timeout_ms=0)
        chaos.reach(asks, 60)
        chaos.pool.ask("restart", slot="m/1")
        chaos.assert_all_done()
        assert set(chaos.causes()) == {"drained"}


def test_a_drained_pool_ends_when_its_streams_have(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        asks = chaos.start(100, 3)
        chaos.reach(asks, 5)
        chaos.pool.ask("drain")
        chaos.finish()
        assert all(ask.result is not None for ask in asks)
        process = chaos.pool.process
        assert process is not None
        until(lambda: process.poll() is not None, "the broker has ended")
        assert chaos.check().sound
