"""A conversation of `mlxpool chat`: its messages, its commands and its options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.cli.commands.chat import CONTINUED, HINT, PROMPT, Conversation, read_message
from mlxpool.common.errors import TooLarge
from mlxpool.common.options import FLAGS
from mlxpool.common.protocol.frames import MAX_BODY


def messages(*lines: str) -> tuple[list[str], list[str]]:
    """Returns the messages in these lines, and the shown prompts."""
    left = iter(lines)
    prompts: list[str] = []

    def read(prompt: str) -> str | None:
        prompts.append(prompt)
        return next(left, None)

    def found() -> Iterator[str]:
        while (message := read_message(read)) is not None:
            yield message

    return list(found()), prompts


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["one", "two"], ["one", "two"]),
        (['"""one', 'two"""', "three"], ["one\ntwo", "three"]),
        (['"""', "one", "", "two", '"""', "x"], ["one\n\ntwo", "x"]),
        (['"""one"""'], ["one"]),
        (['  """  one', '  two"""  '], ["  one\n  two"]),
        (['"""one', "no end"], ["one\nno end"]),
        (['"""', "/clear", '"""'], ["//clear"]),  # is sent as /clear
        (['a """ b'], ['a """ b']),
    ],
)
def test_messages_of_several_lines(lines: list[str], told: list[str]) -> None:
    assert messages(*lines)[0] == told


def test_the_prompt_tells_that_a_message_goes_on() -> None:
    assert messages('"""a', 'b"""', "c")[1] == [PROMPT, CONTINUED, PROMPT, PROMPT]


def test_messages_to_send() -> None:
    talk = Conversation("be brief")
    talk.keep("one", "1")
    assert [message["content"] for message in talk.messages("two")] == [
        "be brief",
        "one",
        "1",
        "two",
    ]
    assert talk.command("/clear") == "the conversation is forgotten"
    assert [message["role"] for message in talk.messages("two")] == ["system", "user"]
    talk.command("/system")
    assert [message["role"] for message in talk.messages("two")] == ["user"]
    talk.command("/set system speak up")
    assert talk.messages("x")[0] == {"role": "system", "content": "speak up"}


def test_images_go_with_the_next_message(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    talk = Conversation()
    assert talk.command(f"/image {tmp_path / 'a'}") == "the next message has 1 image"
    assert talk.command(f"/image {tmp_path / 'b'}") == "the next message has 2 images"
    asked = {
        "role": "user",
        "content": [
            {"type": "image", "image": b"a"},
            {"type": "image", "image": b"b"},
            {"type": "text", "text": "what?"},
        ],
    }
    assert talk.messages("what?") == [asked]
    talk.keep("what?", "letters")
    answered = [asked, {"role": "assistant", "content": "letters"}]
    assert talk.messages("and?") == [*answered, {"role": "user", "content": "and?"}]


def test_images_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"a")
    talk = Conversation()
    assert talk.command("/image") == "/image needs the name of a file"
    assert "cannot be read" in str(talk.command(f"/image {tmp_path / 'none'}"))
    for _ in range(10):
        talk.attach(str(file))
    talk.keep("x", "y")
    for _ in range(6):
        talk.attach(str(file))
    said = "the conversation has 16 images, at most 16 are taken; /clear forgets it"
    assert talk.command(f"/image {file}") == said
    talk.command("/clear")
    assert talk.attached == [] and talk.command(f"/image {file}") == "the next message has 1 image"


@pytest.mark.parametrize("line", ["/bye", "/quit", "/exit", "/bye "])
def test_commands_that_end_it(line: str) -> None:
    assert Conversation().command(line) is None


@pytest.mark.parametrize("line", ["/?", "/help"])
def test_help(line: str) -> None:
    text = str(Conversation().command(line))
    for word in ("/set OPTION VALUE", "/clear", "/bye", "Ctrl-C", "Three quotation marks"):
        assert word in text
    assert max(map(len, [HINT, *text.splitlines()])) < 80


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("temperature 0.2", "temperature", 0.2),
        ("parameter temperature 0.2", "temperature", 0.2),
        ("max-tokens 5", "max_tokens", 5),
        ("seed 7", "seed", 7),
        ("ignore_eos true", "ignore_eos", True),
        ("shift off", "shift", False),
        ("stop two words", "stop", ("two words",)),
        ("think", "think", True),
        ("think high", "think", "high"),
        ("nothink", "think", False),
    ],
)
def test_set(words: str, name: str, value: Any) -> None:
    talk = Conversation()
    talk.command(f"/set {words}")
    assert talk.options == {name: value} and type(talk.options[name]) is type(value)
    assert name in str(talk.command("/set"))
    talk.command(f"/unset {name}")
    assert talk.options == {}
    assert talk.command("/set") == "nothing is set: options have their defaults"


def test_what_is_set_is_shown_as_it_is_typed() -> None:
    given = {"stop": ("a", "b c"), "temperature": 0.2, "shift": False, "format": {"type": "json"}}
    talk = Conversation(options={**given, "think": "low", "seed": None})
    shown = str(talk.command("/set")).split("\n")
    assert shown[:3] == ["stop a, b c", "temperature 0.2", "shift false"]
    assert shown[3:] == ['format {"type": "json"}', "think low"]


@pytest.mark.parametrize("name", FLAGS)
def test_every_option_with_a_flag_can_be_set(name: str) -> None:
    texts = {int: "1", float: "1", bool: "on"}
    talk = Conversation()
    talk.command(f"/set {name} {texts.get(FLAGS[name][0], 'x')}")
    assert list(talk.options) == [name]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("temperature -3", "option 'temperature' is -3.0, must be from 0 to 100"),
        ("temperature hot", "option 'temperature' must be a number"),
        ("temperature", "/set temperature needs a value"),
        ("max_tokens 1.5", "must be an integer"),
        ("ignore_eos perhaps", "must be true or false"),
        ("temprature 1", "there is no option 'temprature'; did you mean 'temperature'?"),
        ("logit_bias 1", "there is no option 'logit_bias'"),
        ("think hard", "/set think takes nothing or low, medium, high"),
    ],
)
def test_what_cannot_be_set(words: str, told: str) -> None:
    talk = Conversation()
    assert told in str(talk.command(f"/set {words}"))
    assert talk.options == {}


def test_figures_after_answers() -> None:
    talk = Conversation()
    talk.command("/set verbose")
    assert talk.verbose and "verbose" in str(talk.command("/set"))
    talk.command("/set quiet")
    assert not talk.verbose


def test_an_unknown_command() -> None:
    assert "unknown command /celar; did you mean '/clear'?" in str(Conversation().command("/celar"))
    assert "/? lists them" in str(Conversation().command("/nonsense"))


def test_a_text_that_is_too_long_to_send_is_refused_in_words_of_the_conversation() -> None:
    talk = Conversation()
    assert talk.messages("x" * MAX_BODY)
    with pytest.raises(TooLarge, match=r"the message has 300,000 bytes; .*send a shorter text$"):
        talk.messages("é" * 150_000)
    talk.keep("x" * 200_000, "answer")
    pattern = (
        "the message has 100,000 bytes, with the conversation 300,006; at most 262,144 .*/clear"
    )
    with pytest.raises(TooLarge, match=pattern):
        talk.messages("x" * 100_000)
    talk.command("/clear")
    assert talk.messages("x" * 100_000)
