"""Pools under faults: streams of the counting model in threads, and the traces of all processes."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chaos.checker import Findings, check, read
from mlxpool.client import Client, Result
from mlxpool.common.closing import Closing
from mlxpool.common.errors import PoolError
from mlxpool.common.trace import VARIABLE, History
from support.counting_checker import expected_ids, text_of
from support.pool import PATIENCE, Pool, until

# Short limits, so that a hang is detected soon. Healthy workers stay far below these limits,
# because time without a processor does not count. The limit of a load is longer, because a load
# may wait for the disk.
LIMITS = """\
[pool]
beat_limit = 2.5
load_limit = 10
prefill_limit = 1.5
step_limit = 1.5
fresh_limit = 1.5
stop_grace = 1.0
restart_delay = 0.05
restart_delay_max = 1.0
"""
# For faults that leave a load hanging or stopped.
SHORT_LOADS = LIMITS.replace("load_limit = 10", "load_limit = 2")
# A model with weights may compile kernels during its load and in the first step of each kind.
WEIGHTS_LIMITS = re.sub("(load|fresh)_limit = .*", r"\1_limit = 60", LIMITS)


def model(name: str = "m", *, replicas: int = 1, extra: str = "", **counting: Any) -> str:
    """Returns the config section (TOML) of a counting model, whose token ids are predictable."""
    settings = {"step_us": 2000, **counting}
    lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
    head = [f"[models.{name}]", 'path = "builtin:counting"', f"replicas = {replicas}", extra]
    return "\n".join([*head, f"[models.{name}.counting]", *lines, ""])


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@dataclass(eq=False)
class ChaosStream:
    """The request of a stream, and its outcome after its end."""

    prompt: str
    seed: int
    count: int
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "m"
    ident: bytes = b""
    result: Result | None = None
    error: PoolError | None = None
    had: int = 0  # ids read so far

    @property
    def wanted(self) -> list[int]:
        """The token ids that this request must get, if it is not cut short."""
        return expected_ids(self.prompt, self.seed, self.count)


def _has_ended(stream: ChaosStream) -> bool:
    return stream.result is not None or stream.error is not None


def _had(stream: ChaosStream, count: int) -> bool:
    return stream.had >= count or _has_ended(stream)


class Chaos(Closing):
    """A pool whose processes write their traces into one folder."""

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        config: str,
        limits: str = LIMITS,
        **options: Any,
    ) -> None:
        self.folder = tmp_path / "history"
        self.folder.mkdir()
        monkeypatch.setenv(VARIABLE, str(self.folder))
        self.pool = Pool(tmp_path, limits + config, **options)
        self.history = History("chaos")
        self.streams: list[ChaosStream] = []
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Chaos:
        self.pool.start()
        self.client = self.new_client()
        return self

    def close(self) -> None:
        """Ends the streams' threads, the client and the pool."""
        self.client.close()
        for thread in self.threads:
            thread.join(timeout=PATIENCE)
        self.history.close()
        self.pool.close()

    def new_client(self, **options: Any) -> Client:
        """Returns another connection, with a timeout longer than any fault."""
        return self.pool.client(**options)

    # ---- streams -------------------------------------------------------------------------------

    def start(
        self, count: int = 100, number: int = 1, *, client: Client | None = None, **options: Any
    ) -> list[ChaosStream]:
        """Starts `number` streams of `count` tokens, each read by its own thread.

        Their seeds differ; their prompts end in one digit, so that all have the same length.
        """
        prompt, name = options.pop("prompt", "hello"), options.pop("model", "m")
        first = len(self.streams)
        streams = [
            ChaosStream(f"{prompt} {n % 10}", 1000 + n, count, dict(options), name)
            for n in range(first, first + number)
        ]
        self.streams += streams
        for stream in streams:
            self._thread(self._read, stream, client or self.client)
        return streams

    def _thread(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _read(self, stream: ChaosStream, client: Client) -> None:
        options = {"max_tokens": stream.count, "seed": stream.seed, **stream.options}
        try:
            with client.stream(stream.model, stream.prompt, **options) as deltas:
                stream.ident = deltas.id
                for delta in deltas:
                    stream.had += len(delta.ids)
                stream.result = deltas.result
        except PoolError as error:
            stream.error = error

    def reach(self, streams: Sequence[ChaosStream], count: int) -> None:
        """Waits until each of these streams has `count` ids or has ended."""
        for stream in streams:
            until(
                partial(_had, stream, count),
                f"a stream has {count} ids; it has {stream.had};\n{self.pool.log()[-3000:]}",
            )

    def finish(self, streams: Sequence[ChaosStream] | None = None) -> None:
        """Waits for the end of these streams, or of all."""
        for stream in self.streams if streams is None else streams:
            until(
                partial(_has_ended, stream),
                f"a stream ends; it has {stream.had} of {stream.count};\n{self.pool.log()[-3000:]}",
            )

    def wait(self, seconds: float) -> None:
        """Sleeps for a number of seconds, for example while a fault lasts."""
        time.sleep(seconds)

    # ---- faults --------------------------------------------------------------------------------

    def signal_worker(self, slot: str, number: int) -> int:
        """Sends a signal to the worker of a slot, and traces it; returns its pid."""
        pid = int(self.pool.worker(slot)["pid"])
        self.history.write("killed", slot=slot, signal=number)
        os.kill(pid, number)
        return pid

    def restart_broker(self) -> None:
        """Kills the broker and starts a new one, as an init system does."""
        self.history.write("broker killed")
        self.pool.kill()
        self.pool.start()

    # ---- checks --------------------------------------------------------------------------------

    def check(self) -> Findings:
        """Returns the findings of the traces of all streams."""
        expected = {stream.ident.hex(): stream.wanted for stream in self.streams if stream.ident}
        return check(read(self.folder), expected)

    def assert_all_done(self, streams: Sequence[ChaosStream] | None = None) -> Findings:
        """Asserts that each stream ended with `done` and the expected ids; see `assert_sound`."""
        self.finish(streams)
        for stream in self.streams if streams is None else streams:
            assert stream.result is not None, f"{stream.error!r}\n{self.pool.log()[-4000:]}"
            assert list(stream.result.ids) == stream.wanted
            assert stream.result.text == text_of(stream.wanted)
        return self.assert_sound()

    def assert_sound(self) -> Findings:
        """Asserts that no id is lost, doubled or wrong, and that each stream has some end."""
        findings = self.check()
        assert findings.sound, findings.summary()
        self.assert_idle()
        return findings

    def assert_idle(self) -> None:
        """Asserts that the broker has no state of ended requests, and that its counters agree."""

        def idle() -> bool:
            stats = self.pool.ask("stats")
            assert stats["conserved"] and not stats["internal_errors"], stats
            return not stats["requests"]["live"] and not stats["queued"]

        until(idle, "the broker is idle")

    def causes(self, name: str = "m") -> list[str]:
        """Returns the causes of the ends of a model's workers, in order, from the broker's log."""
        return [
            str(line["cause"]) for line in read(self.folder)
            if line["who"] == "broker" and line["what"] == "note"
            and line["event"] == "worker ended" and line["worker"].startswith(f"{name}/")
        ]  # fmt: skip
