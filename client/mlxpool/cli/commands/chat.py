"""`mlxpool chat`: a conversation in the terminal. Ctrl-C ends an answer, Ctrl-D the whole."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from mlxpool.cli.conversation import HINT, Conversation, read_message
from mlxpool.cli.formatting import error_text
from mlxpool.cli.json_text import json_text
from mlxpool.cli.printed_stream import figures
from mlxpool.cli.request_flags import (
    add_connect_timeout,
    add_options,
    admin_target_of,
    client_of,
    decode_utf8,
    options_of,
    shown_form,
)
from mlxpool.cli.style import ERROR, NOTE, paint_of, takes_controls
from mlxpool.common.escapes import escape_line

if TYPE_CHECKING:
    from mlxpool.client import Client


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `chat`."""
    parser = commands.add_parser(
        "chat",
        parents=[common],
        help="talk with a model in the terminal",
        description="A conversation: the model sees what was said before. Without a terminal each"
        " line of standard input is a message. /? lists what else can be typed.",
    )
    parser.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="an image in front of the first message; may be repeated",
    )
    add_options(parser)
    add_connect_timeout(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answer messages until the input ends. Exit code 1 if the last answer failed."""
    conversation = Conversation(options.system or "", options_of(options))
    for file in options.image:
        conversation.attach(file)
    read = typed_line if sys.stdin.isatty() else read_line
    code = 0
    with client_of(options) as client:
        if read is typed_line:
            _edit_lines()
            _tell(HINT)
        while True:
            try:
                text = read_message(read)
            except KeyboardInterrupt:
                if read is not typed_line:
                    raise
                print(file=sys.stderr)
                _tell("(Ctrl-D or /bye ends the conversation)")
                continue
            if text is None:
                break
            if text.startswith("/") and not text.startswith("//"):
                reply = conversation.command(text)
                if reply is None:
                    break
                print(reply, file=sys.stderr)
            elif text.strip():
                text = text.removeprefix("/") if text.startswith("//") else text
                code = answer(client, options, conversation, text)
    return code


def typed_line(prompt: str) -> str | None:
    """A line that the user types; None at Ctrl-D. Raises KeyboardInterrupt."""
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def read_line(prompt: str) -> str | None:
    """A line of standard input without its end; None after the last. Raises ValueError."""
    line = sys.stdin.buffer.readline()
    return decode_utf8(line).rstrip("\r\n") if line else None


def _edit_lines() -> None:
    """Give `input` arrow keys and a history, if the terminal and this Python can.

    A text of several lines that is pasted is then one message.
    """
    if not takes_controls(sys.stdout):  # readline writes control sequences
        return
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("set enable-bracketed-paste on")


def _tell(note: str) -> None:
    print(paint_of(sys.stderr)(note, NOTE), file=sys.stderr)


def answer(
    client: Client, options: argparse.Namespace, conversation: Conversation, text: str
) -> int:
    """Print one answer as it arrives; returns 1 if it failed, which does not end the conversation.

    Raises BrokerLost, and KeyboardInterrupt without a terminal.
    """
    from mlxpool.cli.load_progress import LoadProgress
    from mlxpool.common.errors import BrokerLost, PoolError

    parts: list[str] = []
    form = shown_form(options)
    started, first = time.monotonic(), 0.0
    try:
        stream = client.stream(
            options.model, messages=conversation.messages(text), **conversation.options
        )
        with stream, LoadProgress(admin_target_of(options), options.model) as progress:
            for delta in stream:
                first = first or time.monotonic()
                progress.close()
                parts.append(delta.text)
                if not options.json:
                    print(form(delta.text), end="", flush=True)
            result = stream.result
    except KeyboardInterrupt:
        _end_line(options, parts)
        if not sys.stdin.isatty():
            raise
        _tell("(cancelled)")
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
        painted = paint_of(sys.stderr)("mlxpool:", ERROR)
        print(f"{painted} {error_text(error)}", file=sys.stderr)
        conversation.attached.clear()  # they may be what was wrong
        _print_json(options, {"error": error.body()})
        return 1
    now = time.monotonic()
    _end_line(options, ["text"])
    conversation.keep(text, result.text)
    if conversation.verbose:
        _tell(escape_line(figures(result, now - started, now - first)))
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
        print(json_text(line), flush=True)
