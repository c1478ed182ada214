"""Stream a completion with nothing but pyzmq and msgpack; docs/protocol.md in eighty lines.

    python examples/plain_client.py RUN_DIR MODEL PROMPT [--max-tokens N] [--seed S]

Prints the text as it comes. Exit code 0: the completion is whole; 1: it is not, with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import zmq

PING_EVERY = 1.0  # seconds; ten without one and the broker cancels our streams
SILENCE = 10.0  # seconds without any frame after which we give up


def send(socket: zmq.Socket[bytes], kind: str, ident: bytes | None, body: dict[str, Any]) -> None:
    """One message: the header [version, kind, id, epoch, attempt, pos], then the body."""
    header = [1, kind, ident, 0, 1 if kind == "generate" else 0, 0]
    socket.send_multipart([msgpack.packb(header), msgpack.packb(body)])


def frames(socket: zmq.Socket[bytes]) -> Iterator[tuple[list[Any], dict[str, Any], list[bytes]]]:
    """Header, body and blobs of what comes, with a ping a second; ends when nothing comes."""
    heard_at = ping_at = time.monotonic()
    while time.monotonic() - heard_at < SILENCE:
        if time.monotonic() - ping_at >= PING_EVERY:
            ping_at = time.monotonic()
            send(socket, "ping", None, {})
        if socket.poll(200):
            heard_at = time.monotonic()
            head, *rest = socket.recv_multipart()
            yield msgpack.unpackb(head), msgpack.unpackb(rest[0]) if rest else {}, rest[1:]


def stream(socket: zmq.Socket[bytes], body: dict[str, Any]) -> str:
    """Print the completion of one `generate`; returns why it failed, empty when it did not."""
    ident, have, link = os.urandom(16), 0, None
    send(socket, "generate", ident, body)
    for (_, kind, about, boot, attempt, pos, *_), answer, blobs in frames(socket):
        if kind == "pong" and link not in (None, (boot, answer["link"])):
            return "the broker, or our connection to it, is another one now"
        if kind == "error" and ident in (about, answer.get("about")):
            return f"{answer['code']}: {answer['message']}"
        if about != ident or attempt != 1:
            continue  # nothing of this stream, or of another sending of it
        if kind == "accepted":
            link = (boot, answer["link"])
        elif pos != have:
            return f"a frame begins at token {pos}, {have} were received"
        else:
            print(answer["text"], end="\n" if kind == "done" else "", flush=True)
            if kind == "done":
                return "cancelled" if answer["reason"] == "cancelled" else ""
            have += len(blobs[0]) // 4
            send(socket, "ack", None, {"have": [[ident, have]]})
    return f"no broker was heard for {SILENCE:g} s"


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream a completion from an mlxpool broker.")
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=-1, help="below 0: the broker draws one")
    given = parser.parse_args()
    options = {"max_tokens": given.max_tokens, "seed": given.seed}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{os.path.abspath(given.run_dir)}/front.ipc")
    try:
        why = stream(socket, {"model": given.model, "prompt": given.prompt, "options": options})
    finally:
        socket.close(linger=0)
        context.term()
    if why:
        print(f"\n{why}", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
