"""An answer as a list of blocks: thoughts, text, calls of tools.

An answer that is streamed sends steps: the beginning, the pieces and the end of each block. Other
answers contain the finished blocks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, field

from mlxpool.client import Result
from mlxpool.common.protocol.chat import arguments_map, parsed_arguments
from mlxpool.gateway.formats.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    merged,
)
from mlxpool.gateway.generation.choice_streams import ChoiceUpdate, Updates, call_ids

ENDS_EARLY = ("length", "cancelled")  # reasons of an answer's end that may cut a block


class Kind(Enum):
    """The type of a block's content."""

    THOUGHTS = "thoughts"
    TEXT = "text"
    CALL = "call"


class Action(Enum):
    """The type of a step: a block begins, grows by a piece of text, or ends."""

    BEGIN = "begin"
    PIECE = "piece"
    END = "end"


class Block(Struct, eq=False):
    """A block. A call's `text` is the JSON of its arguments, and its `name` is its tool.

    `cut`: the token limit or a cancel ended the answer inside the block; a call with complete
    arguments is not cut. `logprobs`: the log-probabilities of the tokens of a text.
    """

    kind: Kind
    index: int  # the block's number in the answer
    id: str = ""  # id of a call
    name: str = ""
    text: str = ""
    cut: bool = False
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of a call, see `arguments_map`; empty for a call that was cut."""
        return {} if self.cut else arguments_map(self.text)


class Step(Struct, frozen=True):
    """A step of a block: it begins, gets a piece of text, or ends.

    `logprobs`: the log-probabilities of the tokens of the piece.
    """

    action: Action
    block: Block
    piece: str = ""
    logprobs: tuple[Mapping[str, Any], ...] = ()


class OutputBlocks:
    """The blocks of an answer, made from its updates."""

    def __init__(self, call_id: Callable[[int], str] | None = None) -> None:
        """`call_id` makes the id of a call from its index; without `call_id`, ids are random."""
        self.blocks: list[Block] = []
        self._call_id = call_id or call_ids(secrets.token_hex())
        self._open: Block | None = None
        self._logprobs: list[Mapping[str, Any]] = []  # of text that is in no block yet

    @property
    def calls(self) -> int:
        """The number of calls of tools."""
        return sum(block.kind is Kind.CALL for block in self.blocks)

    def push(self, update: ChoiceUpdate) -> list[Step]:
        """Returns the steps of the next update; the last update ends the open block."""
        self._logprobs += update.logprobs
        steps: list[Step] = []
        for event in merged(update.events):
            steps += self._event(event, last=update.result is not None)
        if update.result is not None and self._open is not None:
            self._open.cut = update.result.reason in ENDS_EARLY and not _is_whole(self._open)
            steps += self._end()
        return steps

    async def read(self, generation: Updates) -> Result:
        """Reads an answer to its end and returns its result. Raises HttpError."""
        result: Result | None = None
        async for update in generation.updates():
            if update is not None:
                self.push(update)
                result = update.result
        assert result is not None
        return result

    def _event(self, event: Event, *, last: bool) -> list[Step]:
        if isinstance(event, Content | Reasoning):
            kind = Kind.TEXT if isinstance(event, Content) else Kind.THOUGHTS
            begin = [] if self._is_open(kind) else self._begin(kind)
            return [*begin, *self._piece(event.text)]
        if isinstance(event, CallBegin):
            return self._begin(Kind.CALL, event.name)
        if isinstance(event, CallArguments):
            return self._piece(event.text)
        return [] if last else self._end()  # `push` ends the last block, which may be cut

    def _is_open(self, kind: Kind) -> bool:
        return self._open is not None and self._open.kind is kind

    def _begin(self, kind: Kind, name: str = "") -> list[Step]:
        steps = self._end()
        id = self._call_id(len(self.blocks)) if kind is Kind.CALL else ""
        self._open = block = Block(kind, len(self.blocks), id, name)
        self.blocks.append(block)
        return [*steps, Step(Action.BEGIN, block)]

    def _piece(self, text: str) -> list[Step]:
        block, logprobs = self._open, tuple(self._logprobs)
        assert block is not None
        self._logprobs.clear()
        block.text += text
        if block.kind is not Kind.TEXT:
            logprobs = ()
        block.logprobs += logprobs
        return [Step(Action.PIECE, block, text, logprobs)]

    def _end(self) -> list[Step]:
        block, self._open = self._open, None
        return [] if block is None else [Step(Action.END, block)]


def _is_whole(block: Block) -> bool:
    """Whether a block is a call with complete arguments."""
    known = block.kind is Kind.CALL and block.text.strip()
    return bool(known) and parsed_arguments(block.text) is not None
