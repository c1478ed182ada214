"""The thoughts of an answer: their natural end, and the tokens that end them at a bound.

The state of the thoughts depends only on the ids, so a resumed answer is bounded as before. Pure.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from msgspec import Struct

from mlxpool.common.errors import BadRequest


class ThoughtMarks(Struct, frozen=True):
    """The texts that begin and end thoughts in one format of chat templates.

    `ends`: the end markers. `closings`: texts with an end marker, which are forced when thoughts
    reach their token limit. In a request with tools, the first text is forced the first time, and
    the last text is forced later. Without tools, the last text is always forced. `again`: thoughts
    may begin anywhere, not only at the beginning of the answer.
    """

    begin: bytes
    ends: tuple[bytes, ...]
    closings: tuple[str, ...]
    again: bool = False


# Format of thoughts, see chat_template/output_format.py -> the marks of the format.
MARKS: Mapping[str, ThoughtMarks] = {
    "tags": ThoughtMarks(b"<think>", (b"</think>",), ("</think>",)),
    "brackets": ThoughtMarks(b"[THINK]", (b"[/THINK]",), ("[/THINK]",)),
    # The closings also begin the next message. With tools, the model chooses the channel of this
    # message, possibly the channel of a tool call.
    "harmony": ThoughtMarks(
        b"<|channel|>analysis<|message|>",
        (b"<|end|>", b"<|start|>", b"<|channel|>", b"<|call|>", b"<|return|>"),
        ("<|end|><|start|>assistant", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        again=True,
    ),
}
# The marks of thoughts that a prompt has opened, in any format whose prompts can open thoughts.
OPENED = ThoughtMarks(
    b"", MARKS["tags"].ends + MARKS["brackets"].ends, MARKS["tags"].closings, again=False
)


def closings_of(thinking: str | None, templates: Iterable[str]) -> tuple[str, ...]:
    """Returns the texts that end thoughts at a bound, as templates write them; () if unknown.

    An end tag is returned with the line breaks that the templates write around it.
    """
    marks = MARKS.get(thinking or "")
    if marks is None or marks.again:
        return () if marks is None else marks.closings
    begin, (end,) = re.escape(marks.begin.decode()), marks.closings
    tags = re.findall(rf"({begin})?((?:\\n)*){re.escape(end)}((?:\\n)*)", "\n".join(templates))
    around = [(before, after) for empty, before, after in tags if not empty]
    before, after = max(around, key=lambda breaks: len("".join(breaks)), default=("", ""))
    return (f"{before}{end}{after}".replace("\\n", "\n"),)


class Thoughts:
    """Follows the tokens of an answer until its thoughts (the model's reasoning) have ended.

    `most`: the token limit of the thoughts; None: no limit. The tokens of a begin or end marker are
    not counted; tokens of `closings` in front of the end marker are counted. At the limit, `forced`
    has the tokens that must follow.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        marks: ThoughtMarks = OPENED,
        *,
        inside: bool = True,
        most: int | None = None,
        closings: Sequence[Sequence[int]] = (),
    ) -> None:
        """`piece` returns the bytes of a token. `inside`: the prompt has opened the thoughts."""
        self._piece = piece
        self._marks = marks
        self._inside = inside
        self._closings = closings
        self._bounds = [self._bound(most, closing) for closing in closings if most is not None]
        self._closed = 0  # times that a bound has closed thoughts
        self._text = b""  # the last text of the answer, which may begin a mark
        self._longest = max(map(len, (marks.begin, *marks.ends)))
        self.count = 0
        self.forced: deque[int] = deque()  # the next forced tokens, if the bound is reached
        self.ended = False
        if inside:
            self._close_at_bound()

    @property
    def left(self) -> int | None:
        """The fewest tokens that can be sampled before a token is forced; None: no bound."""
        return max(0, min(self._bounds) - self.count) if self._bounds else None

    def _bound(self, most: int, closing: Sequence[int]) -> int:
        """Returns the number of sampled tokens after which `closing` is forced.

        Then at most `most` tokens precede the end marker in `closing`.
        """
        sizes = [len(self._piece(token)) for token in closing]
        text = b"".join(map(self._piece, closing))
        begin = min(text.find(end) for end in self._marks.ends if end in text)
        return most - sum(sum(sizes[: n + 1]) <= begin for n in range(len(sizes)))

    def take(self, token: int) -> None:
        """Appends a token. Raises BadRequest if the bound forces another token."""
        if self.forced:
            if token != self.forced[0]:
                raise BadRequest(
                    f"thinking_budget: the thoughts end with token id {self.forced[0]}, got {token}"
                )
            self.forced.popleft()
            if not self.forced:
                self._after(self._closed >= len(self._closings))
            return
        self._text += self._piece(token)
        if not self._inside:
            self._look_for_begin()
            return
        if any(mark in self._text for mark in self._marks.ends):
            self._after(not self._marks.again)
            return
        self._text = self._text[1 - self._longest :]
        self.count += 1
        self._close_at_bound()

    def _look_for_begin(self) -> None:
        begin, text = self._marks.begin, self._text
        if begin in text:
            self._inside, self._text = True, b""
            self._close_at_bound()
        elif self._marks.again:
            self._text = text[1 - self._longest :]
        else:
            text = text.lstrip()
            self.ended = not begin.startswith(text) and not text.startswith(begin)

    def _close_at_bound(self) -> None:
        place = min(self._closed, len(self._closings) - 1)
        if self._bounds and self.count >= self._bounds[place]:
            self.forced.extend(self._closings[place])
            self._closed += 1

    def _after(self, ended: bool) -> None:
        """Handles the end of thoughts; unless `ended`, the answer may have more thoughts."""
        self._inside, self._text, self.ended = False, b"", ended

    def copy(self) -> Self:
        """Returns an independent copy."""
        thoughts = copy.copy(self)
        thoughts.forced = self.forced.copy()
        return thoughts
