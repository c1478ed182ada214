"""All streams of a model or of the pool end at random moments, in small portions.

The harness refuses a second end of a stream, frames after an end, and work for a full worker.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import endings
from mlxpool.broker.core import events as ev
from support import kinds
from support.core_harness import FakeWorker, Story, model, wake_until_idle

SEEDS, STEPS = 150, 60
MODELS, LINKS = ("m", "other"), 3


class Pool:
    """A simulation of random events from a seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.story = Story(
            {name: model(sequences=4) for name in MODELS},
            restart_limit=self.dice.choice((1, 2, 5)),
            queue_limit=200,
        )
        self.sent: dict[bytes, tuple[int, dict[str, Any]]] = {}  # id -> attempt, request
        self.links = list(range(1, LINKS + 1))  # current links of clients
        self.calls: list[bytes] = []
        self.answered: list[bytes] = []

    def do(self, event: ev.Event) -> None:
        self.note(self.story.do(event))

    def note(self, actions: list[act.Action]) -> None:
        frames = [each for each in actions if isinstance(each, act.ToClient)]
        self.answered += [
            frame.header.id
            for frame in frames
            if frame.header.id in self.calls and frame.header.kind == kinds.ERROR
        ]

    def step(self) -> None:
        (happens,) = self.dice.choices(list(EVENTS), list(EVENTS.values()))
        happens(self)
        known = self.story.core.state.links
        for place, number in enumerate(self.links):
            if number in known and known[number].lost:  # its client now uses a new link
                self.links[place] = 1 + max(self.links)

    # ---- clients -------------------------------------------------------------------------------

    def send(self) -> None:
        for _ in range(self.dice.randint(1, 6)):
            sent: dict[str, Any] = {
                "name": self.dice.choice(MODELS),
                "durable": self.dice.random() < 0.7,
                "priority": self.dice.choice((0, 1, 2)),
            }
            id = self.story.generate(link=self.dice.choice(self.links), **sent)
            self.note(self.story.last)
            self.sent[id] = 1, sent

    def send_again(self) -> None:
        for id in self.dice.sample(list(self.sent), min(3, len(self.sent))):
            attempt, sent = self.sent[id]
            self.sent[id] = attempt + 1, sent
            link = self.dice.choice(self.links)
            self.story.generate(id, link=link, attempt=attempt + 1, **sent)
            self.note(self.story.last)

    def ask(self) -> None:
        for _ in range(self.dice.randint(1, 5)):
            name, link = self.dice.choice(MODELS), self.dice.choice(self.links)
            before = dict.fromkeys(self.story.core.state.calls)
            id = self.story.ask(kinds.TOKENIZE, link, model=name, text="a")
            if id in self.story.core.state.calls and id not in before:
                self.calls.append(id)

    def cancel(self) -> None:
        if live := list(self.story.core.state.requests):
            self.story.cancel(self.dice.choice(live), link=None)

    def lose_link(self) -> None:
        self.do(ev.LinkLost(self.dice.choice(self.links)))

    # ---- workers -------------------------------------------------------------------------------

    def worker(self) -> FakeWorker | None:
        slots = self.story.core.state.registry.slots
        filled = [
            worker for slot, worker in self.story.workers.items() if slots[slot].worker is not None
        ]
        return self.dice.choice(filled) if filled else None

    def greet(self) -> None:
        if (worker := self.worker()) is not None and not worker.epoch:
            worker.hello().credit(self.dice.randint(1, 8))

    def work(self) -> None:
        worker = self.worker()
        if worker is None or worker.epoch not in self.story.core.state.workers:
            return
        for id in list(worker.runs):
            if self.dice.random() < 0.5:
                worker.tokens(id)
            elif self.dice.random() < 0.5:
                worker.end(id, self.dice.choice(("stop", "cancelled")))
        worker.credit()

    def die(self) -> None:
        if (worker := self.worker()) is not None:
            self.note(worker.die(own=self.dice.random() < 0.5))

    # ---- operators -----------------------------------------------------------------------------

    def drain(self) -> None:
        self.do(ev.StartDrain(None, self.dice.choice(MODELS), self.dice.choice((0.0, 0.3))))

    def load(self) -> None:
        self.do(ev.LoadModel(self.dice.choice(MODELS)))

    def unload(self) -> None:
        self.do(ev.UnloadModel(self.dice.choice(MODELS)))

    def drain_pool(self) -> None:
        self.do(ev.StartDrain(None, None, self.dice.choice((0.0, 0.3))))

    def wake(self) -> None:
        self.do(ev.Wake())

    def wait(self) -> None:
        self.note(self.story.later(self.dice.choice((0.1, 1.0))))

    # ---- the end -------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends the broker while everything else continues; afterwards no request may be left."""
        self.do(ev.Shutdown())
        for _ in range(10):
            self.step()
        while self.story.core.next_wake() <= self.story.now:
            self.do(ev.Wake())
        assert not self.story.core.ends_more
        slots = self.story.core.state.registry.slots
        for slot, worker in list(self.story.workers.items()):
            if slots[slot].worker is not None:
                assert worker.stopped, "the broker would wait for it"
                self.note(worker.die())
        wake_until_idle(self.story)
        self.story.assert_idle()
        self.story.assert_conserved()
        assert len(set(self.answered)) == len(self.answered), "a call was answered twice"
        for (id, attempt), stream in self.story.heard.items():
            over = self.sent[id][0] > attempt or stream.link not in self.links
            assert over or stream.ended is not None, "a stream without an end"


EVENTS = {
    Pool.send: 6,
    Pool.send_again: 3,
    Pool.ask: 2,
    Pool.cancel: 1,
    Pool.lose_link: 0.5,
    Pool.greet: 5,
    Pool.work: 5,
    Pool.die: 2,
    Pool.drain: 1,
    Pool.load: 3,
    Pool.unload: 0.5,
    Pool.drain_pool: 0.1,
    Pool.wake: 6,
    Pool.wait: 1,
}


def test_every_stream_ends_once_whatever_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "MAX_ENDED", 2)
    failed = 0
    for seed in range(SEEDS):
        pool = Pool(seed)
        try:
            for _ in range(STEPS):
                pool.step()
            pool.end()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        failed += pool.story.core.state.counters.failed
    assert failed > 5 * SEEDS  # few failures would prove nothing
