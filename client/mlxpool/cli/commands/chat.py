"""`mlxpool chat`: a conversation in the terminal. Ctrl-C ends an answer, Ctrl-D the chat."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from mlxpool.cli.formatting import error_text, json_text
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
from mlxpool.common.checks import did_you_mean, shown
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.escapes import escape_line
from mlxpool.common.options import CHECKS, FLAGS
from mlxpool.common.paths import expanded
from mlxpool.common.protocol.frames import MAX_BODY
from mlxpool.common.protocol.images import MAX_IMAGES

PROMPT, CONTINUED = ">>> ", "... "
FENCE = '"""'  # begins and ends a message of several lines
HINT = f"Send a message; /? lists commands, {FENCE} begins and ends several lines."
HELP = """\
/? or /help            show this help
/set OPTION VALUE      set an option of answers, such as /set temperature 0.2
/set system TEXT       set the system's message from now on; no TEXT: none
/set think, nothink    turn thinking on or off; /set think low: its effort
/set verbose, quiet    turn the figures after each answer on or off
/set                   show the options that are set
/unset OPTION          restore the default of an option
/image FILE            add an image to the next message; may be repeated
/clear                 forget the conversation, except the system's message
/bye or /quit          end the conversation, as Ctrl-D does
Ctrl-C ends the running answer.
Three quotation marks begin and end a message of several lines.
A line that begins with // is sent with one / less."""
ENDS = frozenset({"/bye", "/quit", "/exit"})
BOOLEANS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
LEVELS = ("low", "medium", "high")  # levels of thinking

Read = Callable[[str], str | None]  # a function: prompt -> a line of the input; None at its end


def read_message(read: Read) -> str | None:
    """Reads a message or command; None at the end. FENCE encloses a message of several lines."""
    line = read(PROMPT)
    if line is None or not line.lstrip().startswith(FENCE):
        return line
    lines = [line.lstrip().removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        line = read(CONTINUED)
        if line is None:
            break
        lines.append(line)
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    text = "\n".join(lines).strip("\n")
    return f"/{text}" if text.startswith("/") else text  # // begins a text, / a command


class Conversation(Struct, eq=False):
    """The messages so far, the system message, and the options of answers.

    `attached` are the images for the next message, as the contents of their files.
    """

    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # options for `generate`; None: not set
    verbose: bool = False  # True if a line of figures follows each answer
    turns: list[dict[str, Any]] = field(default_factory=list)
    attached: list[bytes] = field(default_factory=list)

    def messages(self, text: str) -> list[dict[str, Any]]:
        """Returns the messages of the next request, which ends with `text` of the user.

        Raises TooLarge if their texts are too long for a request.
        """
        first = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*first, *self.turns, self._user_message(text)]
        whole, own = sum(map(_text_bytes, messages)), _text_bytes(messages[-1])
        if whole > MAX_BODY:
            before, remedy = "", ""
            if whole > own:
                before = f", with the conversation {whole:,}"
                remedy = "; /clear forgets the conversation"
            raise TooLarge(
                f"the message has {own:,} bytes{before}; at most {MAX_BODY:,} are taken: send a"
                f" shorter text{remedy}"
            )
        return messages

    def keep(self, text: str, answer: str) -> None:
        """Adds the user's text and the answer. Of a cancelled answer, adds the shown part."""
        self.turns.append(self._user_message(text))
        self.turns.append({"role": "assistant", "content": answer})
        self.attached.clear()

    def attach(self, file: str) -> None:
        """Attaches an image to the next message. Raises BadRequest and TooLarge."""
        # Imported here, because the help of commands needs no client.
        from mlxpool.client.request import read_images

        parts = [part for turn in self.turns for part in turn["content"]]
        sent = sum(isinstance(part, dict) and part["type"] == "image" for part in parts)
        if sent + len(self.attached) >= MAX_IMAGES:
            raise BadRequest(
                f"the conversation has {MAX_IMAGES} images, at most {MAX_IMAGES} are taken;"
                " /clear forgets it"
            )
        self.attached.extend(read_images([expanded(file)]))

    def _user_message(self, text: str) -> dict[str, Any]:
        """Returns a message of the user, with the attached images before its text."""
        if not self.attached:
            return {"role": "user", "content": text}
        parts = [{"type": "image", "image": image} for image in self.attached]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    def command(self, line: str) -> str | None:
        """Runs a line that begins with /. Returns the reply to the user; None ends the chat."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in ENDS:
            return None
        try:
            if name in ("/?", "/help"):
                return HELP
            if name == "/clear":
                self.turns.clear()
                self.attached.clear()
                return "the conversation is forgotten"
            if name == "/system":
                return self._set_system(rest)
            if name == "/image":
                return self._attach(rest)
            if name == "/set":
                return self._set(rest)
            if name == "/unset":
                return self._unset(rest)
        except (BadRequest, TooLarge) as error:
            return escape_line(error.message)
        known = ["/?", "/help", "/set", "/unset", "/image", "/clear", *sorted(ENDS)]
        near = did_you_mean(name, known)
        return f"unknown command {escape_line(name)}{near} (/? lists them, //… sends a text with /)"

    def _attach(self, file: str) -> str:
        if not file:
            raise BadRequest("/image needs the name of a file")
        self.attach(file)
        count = len(self.attached)
        return f"the next message has {count} image{'s' * (count > 1)}"

    # ---- options -------------------------------------------------------------------------------

    def _set(self, words: str) -> str:
        name, _, value = words.removeprefix("parameter ").strip().partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if not name:
            return self._settings()
        if name == "system":
            return self._set_system(value)
        if name in ("verbose", "quiet"):
            self.verbose = name == "verbose"
            return "figures follow each answer" if self.verbose else "no figures follow answers"
        if name in ("think", "nothink"):
            return self._set_think(name, value)
        self.options[_option(name)] = read_option(name, value)
        return f"{name} is {escape_line(value)}"

    def _unset(self, name: str) -> str:
        key = "think" if name in ("think", "nothink") else _option(name.replace("-", "_"))
        self.options.pop(key, None)
        return f"{key} has its default"

    def _set_system(self, text: str) -> str:
        self.system = text
        return "the system's message is set" if text else "there is no system's message"

    def _set_think(self, name: str, value: str) -> str:
        if value and (name == "nothink" or value not in LEVELS):
            raise BadRequest(f"/set think takes nothing or {', '.join(LEVELS)}; got {shown(value)}")
        self.options["think"] = value or name == "think"
        return "the model thinks" if name == "think" else "the model does not think"

    def _settings(self) -> str:
        values = {name: value for name, value in self.options.items() if value is not None}
        lines = [f"{name} {escape_line(_typed(value))}" for name, value in values.items()]
        lines += [f"system {escape_line(self.system)}"] * bool(self.system)
        lines += ["verbose"] * self.verbose
        return "\n".join(lines) or "nothing is set: options have their defaults"


def _text_bytes(message: Mapping[str, Any]) -> int:
    """Returns the number of bytes in UTF-8 of a message's texts."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(len(part.encode("utf-8", "surrogatepass")) for part in parts)


def _typed(value: Any) -> str:
    """Returns the value of an option in the form in which users type it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_typed, value))
    return json_text(value)


def _option(name: str) -> str:
    """Returns the name of an option. Raises BadRequest if users cannot set it."""
    if name not in FLAGS:
        known = [*FLAGS, "system", "think", "nothink", "verbose", "quiet"]
        hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
        raise BadRequest(f"there is no option {shown(name)}{hint}")
    return name


def read_option(name: str, text: str) -> Any:
    """Returns the value of an option from its text. Raises BadRequest naming its bounds."""
    kind = FLAGS[_option(name)][0]
    if not text:
        raise BadRequest(f"/set {name} needs a value")
    value: Any = text
    try:
        if kind in (int, float):
            value = kind(text)
        elif kind is bool:
            value = BOOLEANS.get(text.lower(), text)
    except ValueError:
        pass  # `value` is still text, so the check raises an error that names the type
    return CHECKS[name](name, value)


if TYPE_CHECKING:
    from mlxpool.client import Client


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `chat`."""
    parser = commands.add_parser(
        "chat",
        parents=[common],
        help="talk with a model in the terminal",
        description="Holds a conversation: the model sees the earlier messages. Without a terminal"
        " each line of standard input is a message. /? lists the commands that can be typed.",
    )
    parser.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="an image file to put before the first message; may be repeated",
    )
    add_options(parser)
    add_connect_timeout(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answers messages until the input ends. Exit code 1 if the last answer failed."""
    conversation = Conversation(options.system or "", options_of(options))
    for file in options.image:
        conversation.attach(file)
    read = typed_line if sys.stdin.isatty() else read_line
    code = 0
    with client_of(options) as client:
        if read is typed_line:
            edit_lines()
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
    """Returns a line that the user types; None at Ctrl-D. Raises KeyboardInterrupt."""
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def read_line(prompt: str) -> str | None:
    """Returns a line of standard input without its line end; None at the end.

    Raises ValueError if the line is not UTF-8.
    """
    line = sys.stdin.buffer.readline()
    return decode_utf8(line).rstrip("\r\n") if line else None


def edit_lines() -> None:
    """Gives `input` arrow keys and a history, if the terminal and this Python have them.

    A pasted text of several lines is then one message.
    """
    if not takes_controls(sys.stdout):  # readline would write control sequences
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
    """Prints one answer as it arrives. Returns 1 if it failed; then the chat continues.

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
        conversation.attached.clear()  # the images may be the cause of the error
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
    """Ends the line of text before something else is printed."""
    if parts and not options.json:
        print(flush=True)


def _print_json(options: argparse.Namespace, line: dict[str, Any]) -> None:
    if options.json:
        print(json_text(line), flush=True)
