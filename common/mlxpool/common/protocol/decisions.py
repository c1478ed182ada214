"""The call `decide`: questions about one text, each with fixed possible answers.

Its answer is a `decisions`. The broker forwards the body; a worker checks it. The text is in the
body, or in one blob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import did_you_mean, integer, is_integer, is_number, shown
from mlxpool.common.errors import BadRequest

DECIDE = "decide"
DECISIONS = "decisions"  # the kind of the answer to `decide`
MAX_QUESTIONS = 64  # the most questions of one call; a client splits a longer list into calls
MAX_CHOICES = 26  # the most choices of a question, one for each letter
MAX_SCALE = 1000  # the greatest number of a scale
MAX_SCALE_VALUES = 101
MAX_QUESTION_CHARS = 4096
MAX_CHOICE_CHARS = 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 100.0
MAX_FIRST = 1 << 53
YES_NO = ("yes", "no")
_OF_BROKER = frozenset({"owner", "alone"})  # keys that the broker adds
KEYS = frozenset({"model", "prompt", "questions", "temperature", "first"}) | _OF_BROKER
QUESTION_KEYS = frozenset({"question", "choices", "scale"})


class Question(Struct, frozen=True):
    """A question about the text. Its labels, the possible answers, are in `choices` or in `scale`.

    `choices` are labels as texts. `scale` has the least and the greatest integer of a scale. If
    both are absent, the labels are yes and no. If `text` is empty, the prompt contains the
    question.
    """

    text: str = ""
    choices: tuple[str, ...] = ()
    scale: tuple[int, int] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, which are the possible answers."""
        if self.scale is not None:
            low, high = self.scale
            return tuple(map(str, range(low, high + 1)))
        return self.choices or YES_NO

    @property
    def size(self) -> int:
        """Characters of the question and its choices."""
        return len(self.text) + sum(map(len, self.choices))

    def body(self) -> dict[str, Any]:
        """Returns the map of the question in `questions`, which `parse` reads."""
        body: dict[str, Any] = {"question": self.text} if self.text else {}
        if self.choices:
            body["choices"] = list(self.choices)
        if self.scale is not None:
            body["scale"] = list(self.scale)
        return body

    @classmethod
    def parse(cls, name: str, raw: object) -> Question:
        """Checks a question. Raises BadRequest; errors call the question `name`."""
        if not isinstance(raw, Mapping):
            raise BadRequest(f"{name} must be a map, got {shown(raw)}")
        _check_keys(name, raw, QUESTION_KEYS)
        if raw.get("choices") is not None and raw.get("scale") is not None:
            raise BadRequest(f"{name} takes one of choices and scale, got both")
        text = raw.get("question")
        if text is not None and (not isinstance(text, str) or len(text) > MAX_QUESTION_CHARS):
            got = f"{len(text)}" if isinstance(text, str) else shown(text)
            raise BadRequest(
                f"{name}.question must be a text of at most {MAX_QUESTION_CHARS} characters,"
                f" got {got}"
            )
        choices, scale = raw.get("choices"), raw.get("scale")
        return cls(
            (text or "").strip(),
            () if choices is None else _choices(f"{name}.choices", choices),
            None if scale is None else _scale(f"{name}.scale", scale),
        )


class DecideCall(Struct, frozen=True):
    """A worker's view of the call `decide`: questions about one text.

    `temperature` divides the log-probabilities of the labels. `first` is the number that errors
    give to the first question; it is above 0 if the client has split a request into several calls.
    `alone` is True if the call may have crashed a worker; the worker then reads its questions one
    by one.
    """

    prompt: str
    questions: tuple[Question, ...]
    temperature: float = 1.0
    first: int = 0
    alone: bool = False
    owner: str = ""

    @property
    def size(self) -> int:
        """Characters of the prompt and all questions."""
        return len(self.prompt) + sum(question.size for question in self.questions)

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: Sequence[bytes]) -> DecideCall:
        """Checks a call. Raises BadRequest naming the key, its value and its bound."""
        _check_keys(DECIDE, body, KEYS)
        owner, first = body.get("owner"), integer(body, "first", 0, MAX_FIRST) or 0
        return cls(
            _prompt(body.get("prompt"), blobs),
            _questions(body.get("questions"), first),
            _temperature(body.get("temperature")),
            first,
            body.get("alone") is True,
            owner if isinstance(owner, str) else "",
        )


def _check_keys(name: str, body: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises BadRequest if a key is unknown; a key whose value is nil counts as absent."""
    unknown = next((key for key in body if key not in known and body[key] is not None), None)
    if unknown is not None:
        hint = did_you_mean(str(unknown), known - _OF_BROKER)
        raise BadRequest(f"{name} has no key {unknown!r:.60}{hint}")


def _prompt(raw: object, blobs: Sequence[bytes]) -> str:
    if raw is True:
        if not blobs:
            raise BadRequest("prompt is true, but the message has no blob")
        try:
            raw = blobs[0].decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRequest(f"the prompt is not UTF-8: {error}") from None
    if not isinstance(raw, str) or not raw.strip():
        raise BadRequest(f"prompt must be a text that is not empty, got {shown(raw)}")
    return raw


def _questions(raw: object, first: int) -> tuple[Question, ...]:
    if not isinstance(raw, list | tuple) or not 1 <= len(raw) <= MAX_QUESTIONS:
        got = f"{len(raw)}" if isinstance(raw, list | tuple) else shown(raw)
        raise BadRequest(f"questions must be a list of 1 to {MAX_QUESTIONS} maps, got {got}")
    return tuple(Question.parse(f"questions[{first + at}]", item) for at, item in enumerate(raw))


def _choices(name: str, raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list | tuple) or not 2 <= len(raw) <= MAX_CHOICES:
        got = f"{len(raw)}" if isinstance(raw, list | tuple) else shown(raw)
        raise BadRequest(f"{name} must be a list of 2 to {MAX_CHOICES} texts, got {got}")
    labels: dict[str, int] = {}
    for index, choice in enumerate(raw):
        if not isinstance(choice, str) or not choice.strip() or len(choice) > MAX_CHOICE_CHARS:
            raise BadRequest(
                f"{name}[{index}] must be a text of 1 to {MAX_CHOICE_CHARS} characters,"
                f" got {shown(choice)}"
            )
        if "\n" in choice or "\r" in choice:
            raise BadRequest(f"{name}[{index}] must be one line, got {shown(choice)}")
        label = choice.strip()
        if labels.setdefault(label, index) != index:
            raise BadRequest(f"{name}[{index}] is {shown(label)}, as {name}[{labels[label]}] is")
    return tuple(labels)


def _scale(name: str, raw: object) -> tuple[int, int]:
    low, high = raw if isinstance(raw, list | tuple) and len(raw) == 2 else (None, None)
    if not is_integer(low) or not is_integer(high) or not 0 <= low < high <= MAX_SCALE:
        raise BadRequest(
            f"{name} must be the least and the greatest of its numbers, from 0 to {MAX_SCALE},"
            f" got {shown(raw)}"
        )
    if high - low >= MAX_SCALE_VALUES:
        raise BadRequest(
            f"{name} has {high - low + 1} numbers, at most {MAX_SCALE_VALUES} are taken"
        )
    return low, high


def _temperature(raw: object) -> float:
    if raw is None:
        return 1.0
    if not is_number(raw) or not MIN_TEMPERATURE <= raw <= MAX_TEMPERATURE:
        raise BadRequest(
            f"temperature must be from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, got {shown(raw)}"
        )
    return float(raw)
