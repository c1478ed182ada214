"""A gateway with a scripted broker, which sends text as a trained model would write it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds
from support.fake_broker import FACTS, PATIENCE, USAGE, FakeBroker
from support.gateway_thread import GatewayThread


class Model:
    """A broker with the model `m`, which answers one request with these pieces of text."""

    def __init__(
        self,
        run_dir: Path,
        chat: dict[str, str],
        pieces: Sequence[str],
        *,
        thinks: bool,
        reason: str | None,
        calls: int,
    ) -> None:
        self._broker = FakeBroker(run_dir).open()
        self._chat, self._pieces, self._thinks = chat, pieces, thinks
        self._reason, self._calls = reason, calls
        self.asked: Message | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        broker = self._broker
        models = broker.receive(kinds.MODELS).header.id
        row = {"name": "m", "state": "ready", "context": 64, "type": "x", "chat": self._chat}
        broker.say(kinds.MODELS, models, {"models": [row]}, attempt=0)
        request = broker.accept()
        self.asked = next(message for message in broker.seen if message.kind == kinds.GENERATE)
        facts = {**FACTS, "thinks": True} if self._thinks else FACTS
        for pos, text in enumerate(self._pieces):
            body = {"text": text, "n": 1, "facts": facts}
            broker.say(kinds.DELTA, request, body, pack_ids([pos]), pos=pos)
        if self._reason is None:
            fault = {"code": "worker_lost", "message": "the worker ended", "retryable": True}
            broker.say(kinds.ERROR, request, fault, pos=len(self._pieces))
        else:
            usage = {**USAGE, "prompt_tokens": 3, "completion_tokens": len(self._pieces)}
            body = {"text": "", "reason": self._reason, "usage": usage, "timings_ms": {}}
            broker.say(kinds.DONE, request, {**body, "attempts": 1}, pos=len(self._pieces))
        for _ in range(self._calls):
            call = broker.receive(kinds.DETOKENIZE).header.id
            texts = {"text": "".join(self._pieces), "each": list(self._pieces)}
            broker.say(kinds.TOKENS, call, texts, attempt=0)

    def close(self) -> None:
        self._thread.join(PATIENCE)
        self._broker.close()


class Served:
    """Starts scripted brokers, each with a gateway."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="mlxpool-")
        self._model: Model | None = None
        self._gateway: GatewayThread | None = None

    def start(
        self,
        chat: dict[str, str],
        *pieces: str,
        thinks: bool = False,
        reason: str | None = "stop",
        calls: int = 0,
    ) -> str:
        """Starts a broker and its gateway; returns the gateway's URL.

        `reason` is the reason of the answer's end; with None the worker is lost. `calls` is the
        number of times that the gateway detokenises the answer's ids.
        """
        run_dir = Path(self._folder.name)
        self._model = Model(run_dir, chat, pieces, thinks=thinks, reason=reason, calls=calls)
        self._gateway = GatewayThread(run_dir)
        return self._gateway.url

    @property
    def asked(self) -> dict[str, Any]:
        """The body of the request to the pool."""
        assert self._model is not None and self._model.asked is not None
        return dict(self._model.asked.body)

    def close(self) -> None:
        for part in (self._model, self._gateway):
            if part is not None:
                part.close()
        self._folder.cleanup()
