"""The least that any broker does: two ROUTERs, every message forwarded as it is.

python -m mlxpool.bench.relay FRONT BACK   # endpoints; the first to speak in front gets everything
"""

from __future__ import annotations

import sys

import zmq

AT_ONCE = 256  # messages taken before the front is looked at


def main() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    front.setsockopt(zmq.ROUTER_MANDATORY, 1)  # wait for a full peer instead of dropping
    front.bind(sys.argv[1])
    back.bind(sys.argv[2])
    client = front.recv_multipart()[0]
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if back in ready:
            for _ in range(AT_ONCE):
                try:
                    parts = back.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                front.send_multipart([client, *parts[1:]])
        if front in ready:
            front.recv_multipart()


if __name__ == "__main__":
    main()
