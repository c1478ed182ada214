"""A service in asyncio: many people's requests over one connection to the pool.

    python examples/asyncio_service.py [RUN_DIR] [--listen 127.0.0.1:8765]

It speaks JSON, one object a line, over TCP. A person may have many requests at once:

    {"id": "a", "model": "demo", "prompt": "def f(x):", "max_tokens": 20, "seconds": 30}
    {"cancel": "a"}

and is answered, mixed as they come:

    {"id": "a", "text": " return"}
    {"id": "a", "end": "length", "tokens": 20}        or stop, cancelled
    {"id": "a", "error": "deadline_exceeded", "message": "…"}

Who hangs up has everything cancelled. At SIGTERM or Ctrl-C nobody is let in any more, requests get
GRACE seconds to end, the rest is cancelled.
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
SECONDS = 60.0  # a request's time, if it names none
AT_ONCE = 64  # requests of one person


class Person:
    """One connection. Its requests are tasks; each writes whole lines, so they may mix."""

    def __init__(self, client: AsyncClient, writer: asyncio.StreamWriter) -> None:
        self.client = client
        self.writer = writer
        self.requests: dict[str, asyncio.Task[None]] = {}

    async def say(self, **line: Any) -> None:
        self.writer.write(json.dumps(line).encode() + b"\n")
        await self.writer.drain()  # who does not read holds up nobody else

    async def hear(self, line: bytes) -> None:
        """Begin or cancel a request."""
        try:
            asked = json.loads(line)
            if "cancel" in asked:
                if (task := self.requests.get(asked["cancel"])) is not None:
                    task.cancel()
                return
            ident = str(asked["id"])
        except (ValueError, KeyError, TypeError, AttributeError):
            await self.say(error="bad_request", message="a line must be an object with an id")
            return
        if ident in self.requests or len(self.requests) >= AT_ONCE:
            await self.say(id=ident, error="bad_request", message="the id is in use, or too many")
            return
        task = self.requests[ident] = asyncio.create_task(self.answer(ident, asked))
        task.add_done_callback(lambda _: self.requests.pop(ident))
        await asyncio.sleep(0)  # it has begun before it can be cancelled, so it says its end

    async def answer(self, ident: str, asked: dict[str, Any]) -> None:
        """One request, from its first text to its end."""
        try:
            stream = self.client.stream(
                str(asked.get("model", "demo")),
                str(asked.get("prompt", "")),
                max_tokens=asked.get("max_tokens", 64),
                deadline_ms=round(1000 * float(asked.get("seconds", SECONDS))),
            )
            async with stream:  # left early, whatever the reason, the pool is told
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
            pass  # they hung up

    async def leave(self) -> None:
        """Cancel what is left, and wait until it is."""
        tasks = list(self.requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.writer.close()


class Service:
    """Everybody who is connected."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.people: set[Person] = set()

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        person = Person(self.client, writer)
        self.people.add(person)
        try:
            while line := await reader.readline():
                await person.hear(line)
        except (ConnectionError, ValueError):  # gone, or a line without an end
            pass
        finally:
            await person.leave()
            self.people.discard(person)

    async def finish(self) -> None:
        """Let requests end in GRACE seconds, then cancel them."""
        tasks = [task for person in self.people for task in person.requests.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)
        for person in list(self.people):
            await person.leave()


async def serve(run_dir: str | None, host: str, port: int) -> None:
    """Until SIGTERM or SIGINT."""
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
    given = parser.parse_args()
    host, _, port = given.listen.rpartition(":")
    asyncio.run(serve(given.run_dir, host, int(port)))


if __name__ == "__main__":
    main()
