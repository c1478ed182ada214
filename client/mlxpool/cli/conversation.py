"""A conversation of `mlxpool chat`: its messages, its options, and the commands that change them.

Pure but for `read_message`, which reads by a function that it is given, and `attach`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from mlxpool.cli.json_text import json_text
from mlxpool.common.checks import did_you_mean, shown
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.escapes import escape_line
from mlxpool.common.options import CHECKS, FLAGS
from mlxpool.common.paths import expanded
from mlxpool.common.protocol.bounds import MAX_BODY
from mlxpool.common.protocol.images import MAX_IMAGES

PROMPT, CONTINUED = ">>> ", "... "
FENCE = '"""'  # begins and ends a message of several lines
HINT = f"Send a message; /? lists commands, {FENCE} begins and ends several lines."
HELP = """\
/? or /help            this
/set OPTION VALUE      an option of the answers, such as /set temperature 0.2
/set system TEXT       the system's message from now on; without TEXT: none
/set think, nothink    whether the model thinks; /set think low: how much
/set verbose, quiet    whether figures follow each answer
/set                   what is set
/unset OPTION          the default again
/image FILE            an image for the next message; may be repeated
/clear                 forget the conversation, but for the system's message
/bye or /quit          the end, as Ctrl-D is
Ctrl-C ends the answer under way.
Three quotation marks begin and end a message of several lines.
A line that begins with // is sent with one / less."""
ENDS = frozenset({"/bye", "/quit", "/exit"})
BOOLEANS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
LEVELS = ("low", "medium", "high")  # of thinking

Read = Callable[[str], str | None]  # a line, for a prompt; None at the end of the input


def read_message(read: Read) -> str | None:
    """The next message or command; None at the end. FENCE begins and ends one of several lines."""
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
    return f"/{text}" if text.startswith("/") else text  # it is no command


class Conversation(Struct, eq=False):
    """The messages so far, the system message, and the options of answers.

    `attached`: images for the next message, the contents of their files.
    """

    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # of `generate`; None: not set
    verbose: bool = False  # whether figures follow each answer
    turns: list[dict[str, Any]] = field(default_factory=list)
    attached: list[bytes] = field(default_factory=list)

    def messages(self, text: str) -> list[dict[str, Any]]:
        """The messages to send for the next text of the user.

        Raises TooLarge if their texts are longer than the messages of a request can be.
        """
        first = [{"role": "system", "content": self.system}] if self.system else []
        every = [*first, *self.turns, self._asked(text)]
        whole, own = sum(map(_text_bytes, every)), _text_bytes(every[-1])
        if whole > MAX_BODY:
            before, remedy = "", ""
            if whole > own:
                before = f", with the conversation {whole:,}"
                remedy = "; /clear forgets what was said before"
            raise TooLarge(
                f"the message has {own:,} bytes{before}; at most {MAX_BODY:,} are taken: send a"
                f" shorter text{remedy}"
            )
        return every

    def keep(self, text: str, answer: str) -> None:
        """Add a text and its answer; of a cancelled answer the part that the user has read."""
        self.turns.append(self._asked(text))
        self.turns.append({"role": "assistant", "content": answer})
        self.attached.clear()

    def attach(self, file: str) -> None:
        """Read an image, which goes with the next message. Raises BadRequest and TooLarge."""
        # Here and not above: the help of commands needs no client.
        from mlxpool.client.images import read_images

        parts = [part for turn in self.turns for part in turn["content"]]
        sent = sum(isinstance(part, dict) and part["type"] == "image" for part in parts)
        if sent + len(self.attached) >= MAX_IMAGES:
            raise BadRequest(
                f"the conversation has {MAX_IMAGES} images, at most {MAX_IMAGES} are taken;"
                " /clear forgets it"
            )
        self.attached.extend(read_images([expanded(file)]))

    def _asked(self, text: str) -> dict[str, Any]:
        """A message of the user, with the attached images in front of its text."""
        if not self.attached:
            return {"role": "user", "content": text}
        parts = [{"type": "image", "image": image} for image in self.attached]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    def command(self, line: str) -> str | None:
        """Run a line that begins with /; returns what to tell the user, None to end."""
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

    # ---- what is set ---------------------------------------------------------------------------

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
        given = {name: value for name, value in self.options.items() if value is not None}
        lines = [f"{name} {escape_line(_typed(value))}" for name, value in given.items()]
        lines += [f"system {escape_line(self.system)}"] * bool(self.system)
        lines += ["verbose"] * self.verbose
        return "\n".join(lines) or "nothing is set: options have their defaults"


def _text_bytes(message: Mapping[str, Any]) -> int:
    """Bytes of UTF-8 of a message's texts."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(len(part.encode("utf-8", "surrogatepass")) for part in parts)


def _typed(value: Any) -> str:
    """A value of an option in the form in which a user types it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_typed, value))
    return json_text(value)


def _option(name: str) -> str:
    """The name of an option that can be set. Raises BadRequest."""
    if name not in FLAGS:
        known = [*FLAGS, "system", "think", "nothink", "verbose", "quiet"]
        hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
        raise BadRequest(f"there is no option {shown(name)}{hint}")
    return name


def read_option(name: str, text: str) -> Any:
    """The value of an option that a text gives. Raises BadRequest naming its bounds."""
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
        pass  # the check names the type
    return CHECKS[name](name, value)
