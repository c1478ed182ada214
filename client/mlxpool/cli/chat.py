"""`mlxpool chat`: talk in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxpool.cli import run as runs

if TYPE_CHECKING:
    from mlxpool.client import Client

PROMPT = ">>> "
HELP = """\
/help      this
/clear     forget the conversation, but for the system's message
/system T  the system's message from now on; without T: none
/quit      the end, as Ctrl-D is
Ctrl-C ends the answer under way. A line that begins with // is sent with one / less."""


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """`chat`."""
    parser = commands.add_parser(
        "chat",
        parents=[common],
        help="talk with a model; each line is a message",
        description="A conversation: the model sees what was said before. Without a terminal each"
        " line of standard input is a message. /help lists what else can be typed.",
    )
    parser.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    runs.add_options(parser)
    parser.set_defaults(run=run)


@dataclass(eq=False, slots=True)
class Conversation:
    """What was said so far."""

    system: str = ""
    said: list[dict[str, str]] = field(default_factory=list)

    def messages(self, text: str) -> list[dict[str, str]]:
        """What the model gets to see when the user says this."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.said, {"role": "user", "content": text}]

    def keep(self, text: str, answer: str) -> None:
        """An answer that was cut short is kept as far as it came: the user has read it."""
        self.said.append({"role": "user", "content": text})
        self.said.append({"role": "assistant", "content": answer})

    def command(self, line: str) -> str | None:
        """Obey a line that begins with /; what to tell the user, or None for the end."""
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return None
        if name == "/help":
            return HELP
        if name == "/clear":
            self.said.clear()
            return "the conversation is forgotten"
        if name == "/system":
            self.system = rest.strip()
            return "the system's message is set" if self.system else "there is no system's message"
        return f"unknown command {name}; /help lists them, //… sends a text that begins with /"


def run(options: argparse.Namespace) -> int:
    """Until the end of the input. Exit code 1 when the last answer failed, without a terminal."""
    from mlxpool.client import Client

    asked = runs.asked_of(options)
    conversation = Conversation(options.system or "")
    code = 0
    with runs.client_of(options, Client) as client:
        for line in lines():
            if line.startswith("/") and not line.startswith("//"):
                said = conversation.command(line)
                if said is None:
                    break
                print(said, file=sys.stderr)
            elif line.strip():
                text = line.removeprefix("/") if line.startswith("//") else line
                code = answer(client, options, conversation, text, asked)
    return code


def lines() -> Iterator[str]:
    """What the user types, with a history of it; or the lines of standard input."""
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            yield runs.as_utf8(line).rstrip("\r\n")
        return
    _edit_lines()
    while True:
        try:
            yield input(PROMPT)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends the conversation)", file=sys.stderr)
        except EOFError:
            print()
            return


def _edit_lines() -> None:
    """Arrow keys and a history for `input`; a Python without readline does without."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass


def answer(
    client: Client,
    options: argparse.Namespace,
    conversation: Conversation,
    text: str,
    asked: dict[str, Any],
) -> int:
    """Show one answer as it comes. An error is told and costs the answer, not the conversation."""
    from mlxpool.cli.load_progress import Waiting
    from mlxpool.common.errors import BrokerLost, PoolError

    parts: list[str] = []
    stream = client.stream(options.model, messages=conversation.messages(text), **asked)
    try:
        with stream, Waiting(runs.admin_of(options), options.model) as waiting:
            for delta in stream:
                waiting.close()
                parts.append(delta.text)
                if not options.json:
                    print(delta.text, end="", flush=True)
            result = stream.result
    except KeyboardInterrupt:
        _end_of_line(options, parts)
        if not sys.stdin.isatty():
            raise  # nobody is there to go on
        print("(cancelled)", file=sys.stderr)
        conversation.keep(text, "".join(parts))
        _say(options, {"role": "assistant", "content": "".join(parts), "reason": "cancelled"})
        return 0
    except BrokerLost:
        _end_of_line(options, parts)
        raise
    except PoolError as error:
        _end_of_line(options, parts)
        print(f"mlxpool: {error.code}: {error.message}", file=sys.stderr)
        _say(options, {"error": error.body()})
        return 1
    _end_of_line(options, ["text"])
    conversation.keep(text, result.text)
    _say(
        options,
        {
            "role": "assistant",
            "content": result.text,
            "reason": result.reason,
            "usage": result.usage,
            "seed": result.seed,
        },
    )
    return 0


def _end_of_line(options: argparse.Namespace, parts: list[str]) -> None:
    """What follows must not stick to the text."""
    if parts and not options.json:
        print(flush=True)


def _say(options: argparse.Namespace, line: dict[str, Any]) -> None:
    if options.json:
        print(json.dumps(line), flush=True)
