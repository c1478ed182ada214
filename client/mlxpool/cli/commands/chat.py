"""`mlxpool chat`: a conversation in the terminal. Ctrl-C ends an answer, Ctrl-D the whole."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxpool.cli.request_flags import (
    add_connect_timeout,
    add_options,
    admin_target_of,
    client_of,
    decode_utf8,
    options_of,
    shown_form,
)
from mlxpool.common.escapes import escape_line

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
    """Add `chat`."""
    parser = commands.add_parser(
        "chat",
        parents=[common],
        help="talk with a model in the terminal",
        description="A conversation: the model sees what was said before. Without a terminal each"
        " line of standard input is a message. /help lists what else can be typed.",
    )
    parser.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    add_options(parser)
    add_connect_timeout(parser)
    parser.set_defaults(run=run)


@dataclass(eq=False, slots=True)
class Conversation:
    """The messages so far, and the system message."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self, text: str) -> list[dict[str, str]]:
        """The messages to send for the next text of the user."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns, {"role": "user", "content": text}]

    def keep(self, text: str, answer: str) -> None:
        """Add a text and its answer; of a cancelled answer the part that the user has read."""
        self.turns.append({"role": "user", "content": text})
        self.turns.append({"role": "assistant", "content": answer})

    def command(self, line: str) -> str | None:
        """Run a line that begins with /; returns what to tell the user, None to end."""
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return None
        if name == "/help":
            return HELP
        if name == "/clear":
            self.turns.clear()
            return "the conversation is forgotten"
        if name == "/system":
            self.system = rest.strip()
            return "the system's message is set" if self.system else "there is no system's message"
        unknown = f"unknown command {escape_line(name)}"
        return f"{unknown}; /help lists them, //… sends a text that begins with /"


def run(options: argparse.Namespace) -> int:
    """Answer lines until the input ends. Exit code 1 if the last answer failed."""
    given = options_of(options)
    conversation = Conversation(options.system or "")
    code = 0
    with client_of(options) as client:
        for line in lines():
            if line.startswith("/") and not line.startswith("//"):
                reply = conversation.command(line)
                if reply is None:
                    break
                print(reply, file=sys.stderr)
            elif line.strip():
                text = line.removeprefix("/") if line.startswith("//") else line
                code = answer(client, options, conversation, text, given)
    return code


def lines() -> Iterator[str]:
    """The lines that the user types, or those of standard input without a terminal."""
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            yield decode_utf8(line).rstrip("\r\n")
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
    """Give `input` arrow keys and a history, if this Python has readline."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass


def answer(
    client: Client,
    options: argparse.Namespace,
    conversation: Conversation,
    text: str,
    given: dict[str, Any],
) -> int:
    """Print one answer as it arrives; returns 1 if it failed, which does not end the conversation.

    Raises BrokerLost, and KeyboardInterrupt without a terminal.
    """
    from mlxpool.cli.load_progress import LoadProgress
    from mlxpool.common.errors import BrokerLost, PoolError

    parts: list[str] = []
    form = shown_form(options)
    stream = client.stream(options.model, messages=conversation.messages(text), **given)
    try:
        with stream, LoadProgress(admin_target_of(options), options.model) as progress:
            for delta in stream:
                progress.close()
                parts.append(delta.text)
                if not options.json:
                    print(form(delta.text), end="", flush=True)
            result = stream.result
    except KeyboardInterrupt:
        _end_line(options, parts)
        if not sys.stdin.isatty():
            raise
        print("(cancelled)", file=sys.stderr)
        conversation.keep(text, "".join(parts))
        _print_json(
            options, {"role": "assistant", "content": "".join(parts), "reason": "cancelled"}
        )
        return 0
    except BrokerLost:
        _end_line(options, parts)
        raise
    except PoolError as error:
        _end_line(options, parts)
        print(f"mlxpool: {escape_line(f'{error.code}: {error.message}')}", file=sys.stderr)
        _print_json(options, {"error": error.body()})
        return 1
    _end_line(options, ["text"])
    conversation.keep(text, result.text)
    _print_json(
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


def _end_line(options: argparse.Namespace, parts: list[str]) -> None:
    """End the line of text before something else is printed."""
    if parts and not options.json:
        print(flush=True)


def _print_json(options: argparse.Namespace, line: dict[str, Any]) -> None:
    if options.json:
        print(json.dumps(line), flush=True)
