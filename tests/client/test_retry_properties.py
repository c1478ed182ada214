"""After any losses each id reaches the reader once and in order, and the stream ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.client.request import resumed
from mlxpool.client.retry import Action, Pace, SilenceTimer, StreamRetry
from mlxpool.client.stream import Delta, StreamState, parse_frame
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.from_client import GenerateDraft
from mlxpool.common.protocol.prompts import TextPrompt
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids
from support import kinds

ID = bytes(16)
COUNT = 12
TICK = 0.25
FACTS = {"digest": "d", "prompt_tokens": 3}
FAULTS = ("none", "lose a frame", "relink", "restart", "half-open", "thaw", "drain", "freeze")


def token(seed: int, position: int) -> int:
    return seed * 1000 + position


def text(seed: int, count: int) -> str:
    """Returns the text that is sent with `count` ids; the text of the last id is held back."""
    return "".join(f"{token(seed, i)} " for i in range(count - 1))


@dataclass
class ModelBroker:
    """A broker that follows docs/protocol.md and makes a token at each call of `work`."""

    boot: int = 1
    link: int = 1
    open: bool = True  # False: half-open, frames are lost without an error
    attempt: int = 0
    pos: int = 0
    seed: int = 0
    live: bool = False
    out: deque[Message] = field(default_factory=deque)

    def hear(self, message: Message) -> None:
        if message.kind == kinds.PING:
            self._say(kinds.PONG, {"boot": self.boot, "link": self.link}, 0)
        elif message.header.attempt > self.attempt:
            self._generate(message)

    def _generate(self, message: Message) -> None:
        resume = message.body.get("resume", {"count": 0, "seed": self.boot * 7})
        ids = unpack_ids(message.blobs[0]) if message.blobs else []
        self.attempt, self.pos, self.live = message.header.attempt, resume["count"], True
        self.seed = resume["seed"]
        assert ids == [token(self.seed, i) for i in range(self.pos)]
        assert not ids or resume["facts"] == FACTS
        self._say(kinds.ACCEPTED, {"boot": self.boot, "link": self.link, "seed": self.seed}, 0)

    def work(self) -> None:
        if not self.live:
            return
        if self.pos == COUNT:
            rest = text(self.seed, COUNT + 1)[len(text(self.seed, COUNT)) :]
            self._say(kinds.DONE, {"text": rest, "reason": "length"}, self.pos)
            self.live = False
            return
        more = text(self.seed, self.pos + 1)[len(text(self.seed, self.pos)) :]
        ids = pack_ids([token(self.seed, self.pos)])
        self._say(kinds.DELTA, {"text": more, "n": 1, "facts": FACTS}, self.pos, ids)
        self.pos += 1

    def _say(self, kind: str, body: dict[str, object], pos: int, *blobs: bytes) -> None:
        ident = None if kind == kinds.PONG else ID
        self.out.append(Message(Header(kind, ident, self.boot, self.attempt, pos), body, blobs))

    def relink(self) -> None:
        """Begins a new link; frames in flight are lost."""
        self.link += 1
        self.open = True
        self.out.clear()

    def restart(self) -> None:
        self.relink()
        self.boot, self.link, self.attempt, self.live = self.boot + 1, 1, 0, False

    def drain(self) -> None:
        if self.live:
            self._say(kinds.ERROR, {"code": "draining", "retry_after_ms": 300}, self.pos)
            self.live = False


class Reader:
    """Simulates the client: a stream, its retries, its timer, and deltas that the reader got."""

    def __init__(self, broker: ModelBroker) -> None:
        self.broker = broker
        self.state = StreamState(ID)
        self.retry = StreamRetry(self.state, Pace())
        self.timer = SilenceTimer(Pace(), 0.0)
        self.wall = 0.0
        self.ping_at = 1.0
        self.taken: list[Delta] = []
        self._generate()
        self.retry.sent(0.0)

    def _send(self, kind: str, body: dict[str, object], *blobs: bytes) -> None:
        if self.broker.open:
            self.broker.hear(Message(Header(kind, ID, 0, self.state.attempt), body, blobs))

    def _generate(self) -> None:
        draft = resumed(GenerateDraft("m", TextPrompt("a"), {}), self.state, None)
        self._send(kinds.GENERATE, draft.body(), *draft.blobs())

    def turn(self, seconds: float = TICK) -> None:
        """Runs one turn of the connection: reads everything, then does the due work."""
        self.wall += seconds
        self.timer.advance(self.wall)
        while self.broker.open and self.broker.out:
            self._read(self.broker.out.popleft())
        if self.timer.reconnect_due:
            self.timer.reconnected()
            self.broker.relink()
            self.retry.reconnected(self.timer.now)
        self._step()
        if self.wall >= self.ping_at:
            self.ping_at = self.wall + 1.0
            self._send(kinds.PING, {})

    def _read(self, message: Message) -> None:
        self.timer.heard()
        if message.kind == kinds.PONG:
            self.retry.identified((message.body["boot"], message.body["link"]), self.timer.now)
            return
        frame = parse_frame(message)
        assert frame is not None
        delta = self.retry.receive(frame, self.timer.now)
        if delta is not None:
            self.taken.append(delta)

    def _step(self) -> None:
        if self.retry.tick(self.timer.now, self.timer.heard_at) is Action.SEND:
            self.retry.sent_again(self.timer.now)
            self._generate()


def strike(broker: ModelBroker, reader: Reader, fault: str) -> None:
    if fault == "lose a frame":
        # A terminal is lost only together with its connection: no later frame would show the gap.
        if broker.out and broker.out[0].kind not in (kinds.DONE, kinds.ERROR):
            broker.out.popleft()
    elif fault == "half-open":
        broker.open = False
    elif fault == "thaw":
        broker.open = True
    elif fault == "freeze":
        reader.turn(3600.0)
    elif fault == "drain":
        if (
            reader.state.boot or reader.state.attempt > 1
        ):  # otherwise the drain's error would refuse the request and end it
            broker.drain()
    elif fault in ("relink", "restart"):
        getattr(broker, fault)()


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 6)), max_size=40))
def test_each_id_once_and_in_order(story: list[tuple[str, int]]) -> None:
    broker = ModelBroker()
    reader = Reader(broker)
    for fault, turns in story:
        broker.work()
        strike(broker, reader, fault)
        for _ in range(turns):
            reader.turn()
    for _ in range(400):  # 100 s without a fault, which is longer than any retry interval
        broker.work()
        reader.turn()
    state = reader.state
    assert state.error is None and state.result is not None, (reader.retry, broker)
    ids = [token(state.seed, i) for i in range(COUNT)]
    assert [i for delta in reader.taken for i in delta.ids] == ids == list(state.result.ids)
    assert [delta.pos for delta in reader.taken if delta.ids] == list(range(COUNT))
    assert "".join(delta.text for delta in reader.taken) == state.result.text
    assert state.result.text == text(state.seed, COUNT + 1)
