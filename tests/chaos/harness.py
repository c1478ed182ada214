"""Real pools under faults: streams of the counting model in threads, everybody's history."""

from __future__ import annotations

import os
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

# Short limits, so that a hang is found soon; nothing healthy comes near them, for waiting for a
# processor does not count.
LIMITS = """\
[pool]
beat_limit = 2.5
load_limit = 1.5
prefill_limit = 1.5
step_limit = 1.5
fresh_limit = 1.5
stop_grace = 1.0
restart_delay = 0.05
restart_delay_max = 1.0
"""


def model(name: str = "m", *, replicas: int = 1, extra: str = "", **counting: Any) -> str:
    """A counting model as TOML."""
    settings = {"step_us": 2000, **counting}
    lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
    head = [f"[models.{name}]", 'path = "builtin:counting"', f"replicas = {replicas}", extra]
    return "\n".join([*head, f"[models.{name}.counting]", *lines, ""])


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@dataclass(eq=False)
class Ask:
    """One stream: what is asked, and what came of it."""

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
        return expected_ids(self.prompt, self.seed, self.count)


def _over(ask: Ask) -> bool:
    return ask.result is not None or ask.error is not None


def _had(ask: Ask, count: int) -> bool:
    return ask.had >= count or _over(ask)


class Chaos(Closing):
    """A pool whose processes all write their history into one folder."""

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
        self.asks: list[Ask] = []
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Chaos:
        self.pool.start()
        self.client = self.new_client()
        return self

    def close(self) -> None:
        """End the streams' threads, the client and the pool."""
        self.client.close()
        for thread in self.threads:
            thread.join(timeout=PATIENCE)
        self.history.close()
        self.pool.close()

    def new_client(self, **options: Any) -> Client:
        """One more connection; the broker is looked for longer than any fault lasts."""
        return self.pool.client(**{"connect_timeout": PATIENCE, **options})

    # ---- streams -------------------------------------------------------------------------------

    def start(
        self, count: int = 100, number: int = 1, *, client: Client | None = None, **options: Any
    ) -> list[Ask]:
        """So many streams, each read by a thread of its own."""
        prompt, name = options.pop("prompt", "hello"), options.pop("model", "m")
        first = len(self.asks)
        asks = [
            Ask(f"{prompt} {first + n}", 1000 + first + n, count, dict(options), name)
            for n in range(number)
        ]
        self.asks += asks
        for ask in asks:
            self._thread(self._read, ask, client or self.client)
        return asks

    def _thread(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _read(self, ask: Ask, client: Client) -> None:
        options = {"max_tokens": ask.count, "seed": ask.seed, **ask.options}
        try:
            with client.stream(ask.model, ask.prompt, **options) as stream:
                ask.ident = stream.id
                for delta in stream:
                    ask.had += len(delta.ids)
                ask.result = stream.result
        except PoolError as error:
            ask.error = error

    def reach(self, asks: Sequence[Ask], count: int) -> None:
        """Wait until each of these streams has so many ids, or is over."""
        for ask in asks:
            until(
                partial(_had, ask, count),
                f"a stream has {count} ids; it has {ask.had};\n{self.pool.log()[-3000:]}",
            )

    def finish(self, asks: Sequence[Ask] | None = None) -> None:
        """Wait for the end of these streams, or of all."""
        for ask in self.asks if asks is None else asks:
            until(
                partial(_over, ask),
                f"a stream ends; it has {ask.had} of {ask.count};\n{self.pool.log()[-3000:]}",
            )

    def wait(self, seconds: float) -> None:
        """Let time pass: for faults whose length is what is tested."""
        time.sleep(seconds)

    # ---- faults --------------------------------------------------------------------------------

    def strike(self, slot: str, number: int) -> int:
        """A signal to the worker of a slot, noted in the history; returns its pid."""
        pid = int(self.pool.worker(slot)["pid"])
        self.history.write("killed", slot=slot, signal=number)
        os.kill(pid, number)
        return pid

    def restart_broker(self) -> None:
        """SIGKILL, then what an init system does."""
        self.history.write("broker killed")
        self.pool.kill()
        self.pool.start()

    # ---- the verdict ---------------------------------------------------------------------------

    def check(self) -> Findings:
        """What the histories say of all streams."""
        expected = {ask.ident.hex(): ask.wanted for ask in self.asks if ask.ident}
        return check(read(self.folder), expected)

    def assert_all_done(self, asks: Sequence[Ask] | None = None) -> Findings:
        """Every stream ended `done` with the value it must have, and nothing is left behind."""
        self.finish(asks)
        for ask in self.asks if asks is None else asks:
            assert ask.result is not None, f"{ask.error!r}\n{self.pool.log()[-4000:]}"
            assert list(ask.result.ids) == ask.wanted
            assert ask.result.text == text_of(ask.wanted)
        return self.assert_sound()

    def assert_sound(self) -> Findings:
        """Whatever the ends are, nothing is lost, doubled, wrong or stuck, and the books agree."""
        findings = self.check()
        assert findings.sound, findings.summary()
        self.assert_idle()
        return findings

    def assert_idle(self) -> None:
        """The broker holds nothing of requests that have ended."""

        def idle() -> bool:
            stats = self.pool.ask("stats")
            assert stats["conserved"] and not stats["internal_errors"], stats
            return not stats["requests"]["live"] and not stats["queued"]

        until(idle, "the broker is idle")

    def causes(self) -> list[str]:
        """Why workers ended, in order, as the broker put it."""
        return [
            str(line["cause"]) for line in read(self.folder)
            if line["who"] == "broker" and line["what"] == "note"
            and line["event"] == "worker ended"
        ]  # fmt: skip
