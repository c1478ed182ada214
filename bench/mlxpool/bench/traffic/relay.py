"""A relay with which the broker is compared: it forwards messages between two ROUTER sockets.

    python -m mlxpool.bench.traffic.relay FRONT BACK   # endpoints

The messages are not changed. All messages from BACK go to the first client of FRONT.
"""

from __future__ import annotations

import sys

import zmq

MAX_BURST = 256  # messages forwarded before the socket `front` is polled


def main() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    front.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue blocks instead of dropping messages
    front.bind(sys.argv[1])
    back.bind(sys.argv[2])
    client = front.recv_multipart()[0]
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if back in ready:
            for _ in range(MAX_BURST):
                try:
                    parts = back.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                front.send_multipart([client, *parts[1:]])
        if front in ready:
            front.recv_multipart()


if __name__ == "__main__":
    main()
