"""A worker that only talks: rows as fast as the broker takes them, or at a fixed pace.

Started in the place of a worker (bench/broker.py); FIREHOSE holds {streams, rows, tokens, rate}:
it waits for so many requests, then sends `rows` rows a frame, one token each, `tokens` in all for
each stream, at `rate` frames a second (0: no limit). The text of a row is the time it was sent.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from itertools import cycle, islice

import msgpack
import zmq

from mlxpool.common import sockets, wire
from mlxpool.common.config import WORKER_VARIABLE, WorkerConfig
from mlxpool.common.wire import Header

VARIABLE = "FIREHOSE"
FACTS = {"digest": "firehose", "context": 1 << 30, "max_tokens": 1 << 30, "prompt_tokens": 1}


def main() -> None:
    """Serve one round, then stay until somebody ends it."""
    config = WorkerConfig.from_environment(os.environ[WORKER_VARIABLE])
    plan = json.loads(os.environ[VARIABLE])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = sockets.dealer(context, config.endpoint)
    hello = {"slot": config.slot, "token": config.token, "digest": "firehose", "context": 1 << 30}
    socket.send_multipart(wire.encode(Header(wire.HELLO), hello))
    runs: list[tuple[bytes, int]] = []
    epoch = 0
    while True:
        message = wire.decode(socket.recv_multipart(), max_body=wire.MAX_BACK_BODY)
        if message.kind == wire.WELCOME:
            epoch = message.header.epoch
            credit = {"sequences": plan["streams"], "works": 0}
            socket.send_multipart(wire.encode(Header(wire.CREDIT, None, epoch), credit))
        elif message.kind == wire.WORK:
            runs.append((message.header.id or b"", message.header.attempt))
            if len(runs) == plan["streams"]:
                talk(socket, epoch, runs, plan)
                runs = []


def talk(
    socket: zmq.Socket[bytes], epoch: int, runs: list[tuple[bytes, int]], plan: dict[str, float]
) -> None:
    """All frames of one round."""
    header = wire.encode(Header(wire.DELTAS, None, epoch))[0]
    blob = bytes(4 * int(plan["rows"]))
    pause = 1 / plan["rate"] if plan["rate"] else 0.0
    due = time.monotonic()
    for rows in frames(runs, int(plan["rows"]), int(plan["tokens"])):
        if pause:
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))
        now = f"{time.monotonic_ns()} "
        for row in rows:
            row[3] = now
        body = msgpack.packb({"rows": rows})
        socket.send_multipart([header, body, blob[: 4 * len(rows)]])


def frames(runs: list[tuple[bytes, int]], rows: int, tokens: int) -> Iterator[list[list[object]]]:
    """Rows of one token, the streams in turn; facts with the first, the end with the last."""
    places = {run: 0 for run in runs}
    turn = cycle(runs)
    for _ in range(len(runs) * tokens // rows):
        frame = []
        for run in islice(turn, rows):
            pos = places[run]
            places[run] += 1
            row: list[object] = [*run, pos, "", 1]
            if pos == 0:
                row += [None, FACTS]
            elif pos == tokens - 1:
                row += [None, None, {"reason": "length", "text": "", "usage": {}}]
            frame.append(row)
        yield frame


if __name__ == "__main__":
    main()
