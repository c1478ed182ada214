"""Stories in plain text: each line of `scripts/*.txt` is an event or an expected action.

    client 1: generate a max_tokens=3      a is the name of a stream; its client speaks on link 1
    client 2: again a have=2               the same request again, with 2 of its ids
    client 1: cancel a | ack a 3 | ping | falls silent | loses its link
    worker m/0: ready sequences=2 | tokens a 2 | ends a stop count=1 | confirms a | hands back
    worker m/0: stands still for 11 s | comes on a new connection
    worker m/0: dies by itself in prefill of a | dies killed by SIGKILL
    operator: drain m/0 grace=5 | drain m | drain the pool | restart m/0 | unload m
    time +3 s                              clients that are not silent send messages meanwhile
    broker: restarts                       another core, without any state
    expect client 1: accepted a            a new message; key=value of header or body
    expect client 1: nothing
    expect worker m/0: work a have=2 | cancel a | drain | stop | start | nothing
    expect a: ids 0..4 | queued | done     the present state of stream a
    expect idle                            no requests, links or runs are left

A worker's token at position i is i, its text <i>. Text after # is for the reader.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.common.progress import ProgressReading
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds
from support.core_harness import BOOT, FakeWorker, Story, body_of, model

SCRIPTS = sorted(Path(__file__).with_name("scripts").glob("*.txt"))


def values(words: list[str]) -> dict[str, Any]:
    """Returns key=value words; digits become int, true and false bool."""
    pairs = (word.split("=", 1) for word in words if "=" in word)
    known = {"true": True, "false": False}
    return {key: known.get(v, int(v) if v.lstrip("-").isdigit() else v) for key, v in pairs}


class Play:
    """Performs a script line by line."""

    def __init__(self) -> None:
        self.story = Story({"m": model(replicas=1), "two": model(replicas=2)}, poison_life=3600.0)
        self.ids: dict[str, bytes] = {}
        self.bodies: dict[str, dict[str, Any]] = {}
        self.attempts: dict[str, int] = {}
        self.silent: set[int] = set()

    def line(self, text: str) -> None:
        if text == "expect idle":
            self.story.assert_idle()
            self.story.assert_conserved()
        elif text.startswith("expect "):
            who, _, rest = text.removeprefix("expect ").partition(": ")
            self.expect(who, rest.split(" ")[0], shlex.split(rest))
        elif text.startswith("time +"):
            self.time(float(text.removeprefix("time +").removesuffix("s")))
        else:
            who, _, rest = text.partition(": ")
            kind, _, name = who.partition(" ")
            getattr(self, kind)(name, rest, shlex.split(rest))

    # ---- events ------------------------------------------------------------------------------

    def time(self, seconds: float) -> None:
        while seconds > 0:
            step = min(1.0, seconds)
            actions = self.story.later(step)
            for link in list(self.story.core.state.links):
                if link not in self.silent:
                    self.story.hear(link)
            self.story.last = actions or self.story.last
            seconds -= step

    def broker(self, name: str, rest: str, words: list[str]) -> None:
        assert rest == "restarts"
        story = self.story
        story.core = Core(story.core.state.config, BOOT)
        story.workers.clear()
        story.last = []

    def client(self, name: str, rest: str, words: list[str]) -> None:
        link, verb = int(name), words[0]
        if verb == "generate":
            self.generate(link, words[1], 1, 0, values(words))
        elif verb == "again":
            given = values(words)
            have = int(given.pop("have", 0))
            self.generate(link, words[1], self.attempts[words[1]] + 1, have, given)
        elif verb == "cancel":
            self.story.cancel(self.ids[words[1]], link)
        elif verb == "ack":
            self.story.ack(self.ids[words[1]], int(words[2]), link)
        elif verb == "ping":
            self.story.ask(kinds.PING, link)
        elif rest == "falls silent":
            self.silent.add(link)
        elif rest == "loses its link":
            self.story.do(ev.LinkLost(link))
        else:
            raise ValueError(f"a client cannot {rest!r}")

    def generate(self, link: int, name: str, attempt: int, have: int, more: dict[str, Any]) -> None:
        body = {**self.bodies.get(name, {"prompt": name}), **more}
        self.bodies[name], self.attempts[name] = body, attempt
        options = {key: body[key] for key in ("max_tokens", "seed") if key in body}
        rest = {key: value for key, value in body.items() if key not in options}
        if attempt > 1:
            rest["resume"] = {"count": have, "seed": 7}
        self.ids[name] = self.story.generate(
            self.ids.get(name),
            name=rest.pop("model", "m"),
            link=link,
            attempt=attempt,
            options=options,
            blobs=[pack_ids(range(have))] if attempt > 1 else (),
            **rest,
        )

    def worker(self, slot: str, rest: str, words: list[str]) -> None:
        if words[0] == "ready":
            name, replica = slot.split("/")
            sequences = values(words).get("sequences", 4)
            self.story.ready_worker(name, sequences, int(replica), digest="d")
            return
        says: dict[str, Callable[[FakeWorker, str, list[str]], object]] = {
            "tokens": self.tokens,
            "ends": self.ends,
            "confirms": self.confirms,
            "stands": self.stands_still,
            "dies": self.dies,
            "hands": lambda worker, *_: worker.give_back(),
            "comes": lambda worker, *_: worker.hello(digest="d"),
        }
        says[words[0]](self.story.workers[slot], rest, words)

    def tokens(self, worker: FakeWorker, rest: str, words: list[str]) -> None:
        facts = {"digest": "d", "prompt_tokens": 5} if values(words).get("facts") else None
        worker.tokens(self.ids[words[1]], int(words[2]), facts=facts)

    def ends(self, worker: FakeWorker, rest: str, words: list[str]) -> None:
        given = values(words)
        worker.end(self.ids[words[1]], words[2], given.get("count", 0), given.get("rest", ""))
        worker.credit()

    def confirms(self, worker: FakeWorker, rest: str, words: list[str]) -> None:
        """Confirms the end of a cancelled run, which may not be the newest of that name."""
        request, run = worker.cancelled.pop(0)
        assert request == self.ids[words[1]]
        if worker.runs.get(request) and worker.runs[request].attempt == run:
            del worker.runs[request]
        worker.say(Delta(request, run, 0, "", b"", end={"reason": "cancelled"}))
        worker.credit()

    def reads(self, words: list[str]) -> bytes | None:
        """Returns the stream whose prompt the worker was reading ("in prefill of a"), or None."""
        return self.ids[words[-1]] if "prefill" in words else None

    def stands_still(self, worker: FakeWorker, rest: str, words: list[str]) -> None:
        reads = self.reads(words)
        look = ProgressReading("prefill" if reads else "decode", count=9, request=reads)
        worker.watched(int(words[words.index("for") + 1]), look)

    def dies(self, worker: FakeWorker, rest: str, words: list[str]) -> None:
        own = rest.startswith("dies by itself")
        cause = "killed by SIGSEGV" if own else rest.removeprefix("dies ")
        worker.die(cause, own=own, prefill=self.reads(words))

    def operator(self, name: str, rest: str, words: list[str]) -> None:
        grace = float(values(words).get("grace", 30))
        target = words[1] if len(words) > 1 else ""
        events: dict[str, ev.Event] = {
            "restart": ev.RestartWorker(target),
            "unload": ev.UnloadModel(target),
            "load": ev.LoadModel(target),
        }
        if words[0] == "drain":
            slot = target if "/" in target else None
            whole = "the pool" in rest or slot is not None
            self.story.do(ev.StartDrain(slot, None if whole else target, grace))
        else:
            self.story.do(events[words[0]])

    # ---- expectations ------------------------------------------------------------------------

    def expect(self, who: str, verb: str, words: list[str]) -> None:
        kind, _, name = who.partition(" ")
        if kind == "client":
            self.expect_client(int(name), verb, words)
        elif kind == "worker":
            self.expect_worker(name, verb, words)
        else:
            self.expect_stream(who, verb, words)

    def expect_client(self, link: int, verb: str, words: list[str]) -> None:
        if verb == "nothing":
            assert not self.story.to_client(link=link), self.story.to_client(link=link)
            return
        fields = values(words)
        if len(words) > 1 and "=" not in words[1] and words[1] in self.ids:
            fields["id"] = self.ids[words[1]]
        says = str(fields.pop("says", ""))
        frame = self.story.assert_sent(link, verb, **fields)
        assert says in str(body_of(frame).get("message", "")), body_of(frame)

    def expect_worker(self, slot: str, verb: str, words: list[str]) -> None:
        worker = self.story.workers.get(slot)
        if verb == "start":
            assert slot in self.story.started(), self.story.last
            return
        assert worker is not None, f"{slot} was never started"
        checks: dict[str, Callable[[], bool]] = {
            "work": lambda: self.has_work(worker, words),
            "cancel": lambda: any(self.ids[words[1]] == r for r, _ in worker.cancelled),
            "drain": lambda: worker.draining,
            "dump": lambda: worker.dumps > 0,
            "stop": lambda: slot in self.story.stopped() or worker.stopped,
            "nothing": lambda: not worker.runs,
        }
        assert checks[verb](), f"{slot}: not {' '.join(words)}; it has {worker.runs}"

    def has_work(self, worker: FakeWorker, words: list[str]) -> bool:
        run = worker.runs.get(self.ids[words[1]])
        return run is not None and run.pos == values(words).get("have", run.pos)

    def expect_stream(self, name: str, verb: str, words: list[str]) -> None:
        stream = self.story.heard[self.ids[name], self.attempts[name]]
        if verb == "ids":
            first, last = map(int, words[1].split(".."))
            assert stream.ids == list(range(first, last + 1)), stream.ids
        elif verb in ("queued", "assigned", "streaming"):
            assert self.story.request(self.ids[name]).state.value == verb
        else:
            self.story.assert_ended(self.ids[name], verb, self.attempts[name])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_gives_the_recorded_actions(script: Path) -> None:
    play = Play()
    for number, raw in enumerate(script.read_text("utf-8").splitlines(), 1):
        text = raw.split("#")[0].strip()
        if not text:
            continue
        try:
            play.line(text)
        except (AssertionError, KeyError, ValueError) as error:
            raise AssertionError(f"{script.name}:{number}: {text}: {error!r}") from error


def test_scripts_are_found() -> None:
    assert len(SCRIPTS) >= 8
