"""A worker without a model: sends tokens as fast as the broker takes them, or at a fixed rate.

It runs in place of the broker's workers (see `environment`), or by itself for the bare relay:

    python -m mlxpool.bench.traffic.firehose ENDPOINT   # FIREHOSE holds the Flood

The worker waits for a request for each stream of the flood, then sends. The text of a token is its
send time, in ns of the monotonic clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import msgpack
import zmq
from msgspec import Struct

from mlxpool.common.config.schema import WORKER_VARIABLE, WorkerConfig
from mlxpool.common.protocol import deltas, from_worker, to_worker
from mlxpool.common.protocol import frames as wire
from mlxpool.common.protocol.frames import Header
from mlxpool.common.records import as_map
from mlxpool.common.transport import sockets

VARIABLE = "FIREHOSE"
FACTS = {"digest": "firehose", "context": 1 << 30, "max_tokens": 1 << 30, "prompt_tokens": 1}
SITECUSTOMIZE = f"""\
import os

if "{WORKER_VARIABLE}" in os.environ:
    from mlxpool.bench.traffic import firehose

    firehose.serve()
"""


class Flood(Struct, frozen=True):
    """The traffic of a round: `streams` streams, each of `tokens` tokens.

    `rows`: number of tokens in a frame. `rate`: frames/s; 0 means no limit.
    """

    streams: int
    rows: int
    tokens: int
    rate: float = 0.0


def environment(folder: Path, flood: Flood) -> dict[str, str]:
    """Returns the environment of a broker whose workers are firehoses."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, VARIABLE: json.dumps(as_map(flood))}


def serve() -> None:
    """Serves one round after the other until the process is ended."""
    config = WorkerConfig.from_environment(os.environ[WORKER_VARIABLE])
    flood = Flood(**json.loads(os.environ[VARIABLE]))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = sockets.dealer(context, config.endpoint)
    hello = {"slot": config.slot, "token": config.token, "digest": "firehose", "context": 1 << 30}
    socket.send_multipart(wire.encode(Header(from_worker.Hello.kind), hello))
    requests: list[tuple[bytes, int]] = []
    epoch = 0
    while True:
        message = wire.decode(socket.recv_multipart(), max_body=wire.MAX_BACK_BODY)
        if message.kind == to_worker.Welcome.kind:
            epoch = message.header.epoch
            credit = {"sequences": flood.streams, "works": 0}
            socket.send_multipart(wire.encode(Header(from_worker.Credit.kind, None, epoch), credit))
        elif message.kind == to_worker.Work.kind:
            requests.append((message.header.id or b"", message.header.attempt))
            if len(requests) == flood.streams:
                send_round(socket, epoch, requests, flood)
                requests = []


def send_round(
    socket: zmq.Socket[bytes], epoch: int, requests: list[tuple[bytes, int]], flood: Flood
) -> None:
    """Sends all frames of one round."""
    header = wire.encode(Header(deltas.Deltas.kind, None, epoch))[0]
    blob = bytes(4 * flood.rows)
    pause = 1 / flood.rate if flood.rate else 0.0
    due = time.monotonic()
    for rows in frames(requests, flood):
        if pause:
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))
        now = f"{time.monotonic_ns()} "
        for row in rows:
            row[3] = now
        body = msgpack.packb({"rows": rows})
        socket.send_multipart([header, body, blob[: 4 * len(rows)]])


def frames(requests: list[tuple[bytes, int]], flood: Flood) -> Iterator[list[list[object]]]:
    """Yields frames of rows; each row has one token of a stream, and the streams take turns.

    The first row of a stream also carries the data about its model (FACTS), the last row the end of
    the stream.
    """
    positions = {request: 0 for request in requests}
    turn = cycle(requests)
    for _ in range(len(requests) * flood.tokens // flood.rows):
        frame = []
        for request in islice(turn, flood.rows):
            pos = positions[request]
            positions[request] += 1
            row: list[object] = [*request, pos, "", 1]
            if pos == 0:
                row += [None, FACTS]
            elif pos == flood.tokens - 1:
                row += [None, None, {"reason": "length", "text": "", "usage": {}}]
            frame.append(row)
        yield frame


def main() -> None:
    """Sends one round to the bare relay, then waits for the end of the process."""
    flood = Flood(**json.loads(os.environ[VARIABLE]))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = sockets.dealer(context, sys.argv[1])
    send_round(socket, 1, [(os.urandom(16), number) for number in range(flood.streams)], flood)
    time.sleep(600)


if __name__ == "__main__":
    main()
