"""An asyncio service: the requests of many TCP connections over one connection to the pool.

    python examples/asyncio_service.py [RUN_DIR] [--listen 127.0.0.1:8765]

The protocol is JSON over TCP, one object per line. A connection may have many concurrent requests:

    {"id": "a", "model": "demo", "prompt": "def f(x):", "max_tokens": 20, "seconds": 30}
    {"cancel": "a"}

and gets these answers, interleaved:

    {"id": "a", "text": " return"}
    {"id": "a", "end": "length", "tokens": 20}        or stop, cancelled
    {"id": "a", "error": "deadline_exceeded", "message": "…"}

A disconnect cancels all requests of the connection. After SIGTERM or Ctrl-C new connections are
refused. Running requests get GRACE seconds, then they are cancelled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
from typing import Any

from mlxpool.client import AsyncClient, PoolError

GRACE = 10.0  # seconds
SECONDS = 60.0  # the default timeout of a request
MAX_REQUESTS = 64  # most requests in flight on one connection


class Connection:
    """A TCP connection.

    Each request is a task that writes whole lines, so answers may interleave.
    """

    def __init__(self, client: AsyncClient, writer: asyncio.StreamWriter) -> None:
        self.client = client
        self.writer = writer
        self.requests: dict[str, asyncio.Task[None]] = {}

    async def say(self, **line: Any) -> None:
        self.writer.write(json.dumps(line).encode() + b"\n")
        await self.writer.drain()  # a slow reader delays only its own requests

    async def hear(self, line: bytes) -> None:
        """Starts or cancels the request of a line."""
        try:
            request = json.loads(line)
            if "cancel" in request:
                if (task := self.requests.get(request["cancel"])) is not None:
                    task.cancel()
                return
            ident = str(request["id"])
        except (ValueError, KeyError, TypeError, AttributeError):
            await self.say(error="bad_request", message="a line must be an object with an id")
            return
        if ident in self.requests or len(self.requests) >= MAX_REQUESTS:
            await self.say(id=ident, error="bad_request", message="the id is in use, or too many")
            return
        task = self.requests[ident] = asyncio.create_task(self.answer(ident, request))
        task.add_done_callback(lambda _: self.requests.pop(ident))
        await asyncio.sleep(
            0
        )  # lets the task start before a cancel can reach it, so that the task reports its end

    async def answer(self, ident: str, request: dict[str, Any]) -> None:
        """Runs a request and writes its text and its end."""
        try:
            stream = self.client.stream(
                str(request.get("model", "demo")),
                str(request.get("prompt", "")),
                max_tokens=request.get("max_tokens", 64),
                deadline_ms=round(1000 * float(request.get("seconds", SECONDS))),
            )
            async with stream:  # an early exit, for any reason, cancels the stream at the pool
                async for delta in stream:
                    await self.say(id=ident, text=delta.text)
            result = stream.result
            await self.say(id=ident, end=result.reason, tokens=len(result.ids))
        except PoolError as error:
            await self.say(id=ident, error=error.code, message=error.message)
        except (ValueError, TypeError) as error:
            await self.say(id=ident, error="bad_request", message=str(error))
        except asyncio.CancelledError:
            with contextlib.suppress(ConnectionError):
                await self.say(id=ident, end="cancelled")
            raise
        except ConnectionError:
            pass  # the client has disconnected

    async def leave(self) -> None:
        """Cancels the remaining requests and waits for their ends."""
        tasks = list(self.requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.writer.close()


class Service:
    """The service, with all its connections."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.connections: set[Connection] = set()

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it ends."""
        connection = Connection(self.client, writer)
        self.connections.add(connection)
        try:
            while line := await reader.readline():
                await connection.hear(line)
        except (ConnectionError, ValueError):  # disconnected, or a line beyond the limit
            pass
        finally:
            await connection.leave()
            self.connections.discard(connection)

    async def finish(self) -> None:
        """Waits at most GRACE seconds for requests, then cancels them."""
        tasks = [task for connection in self.connections for task in connection.requests.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)
        for connection in list(self.connections):
            await connection.leave()


async def serve(run_dir: str | None, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    async with AsyncClient(run_dir) as client:
        service = Service(client)
        server = await asyncio.start_server(service.welcome, host, port)
        address, port = server.sockets[0].getsockname()[:2]
        print(f"listening on {address}:{port}", flush=True)
        await over.wait()
        server.close()
        await service.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description="A line service before an mlxpool broker.")
    parser.add_argument("run_dir", metavar="RUN_DIR", nargs="?")
    parser.add_argument("--listen", default="127.0.0.1:8765", metavar="HOST:PORT")
    options = parser.parse_args()
    host, _, port = options.listen.rpartition(":")
    asyncio.run(serve(options.run_dir, host, int(port)))


if __name__ == "__main__":
    main()
