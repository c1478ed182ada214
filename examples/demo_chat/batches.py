"""Training batches of demo-chat: token ids of conversations, and the positions that are trained."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from multiprocessing import get_context
from multiprocessing.queues import Queue

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_chat.conversations import Conversation, conversations
from demo_chat.shown import SHOWN
from demo_chat.template import segments

AHEAD = 8  # batches that a process makes in advance
SHARE_OF_SHOWN = 0.02
POOL = 400  # conversations per pool; a batch has conversations of similar length from one pool


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of a conversation, and the spans [begin, end) that the assistant writes."""

    ids: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Batch:
    """A training batch: `ids` [rows, tokens]. Only the assistant's tokens in it are trained.

    `targets`: the trained tokens. `counted`: for each trained token, the position of the token
    before it in the flattened `ids`.
    """

    ids: npt.NDArray[np.int32]
    counted: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]


def encode(tokenizer: Tokenizer, conversation: Conversation) -> Encoded:
    ids: list[int] = []
    spans = []
    for text, written in segments(conversation):
        part = tokenizer.encode(text).ids
        if written and part:
            spans.append((len(ids), len(ids) + len(part)))
        ids += part
    return Encoded(ids, spans)


def batches(tokenizer: Tokenizer, seed: int, tokens: int, longest: int) -> Iterator[Batch]:
    """Yields batches of up to `tokens` tokens, padding included, without end."""
    drawn = (encode(tokenizer, conversation) for conversation in _with_shown(seed))
    fitting = (encoded for encoded in drawn if len(encoded.ids) <= longest)
    rng = random.Random(seed)
    while True:
        groups = list(_grouped(islice(fitting, POOL), tokens))
        rng.shuffle(groups)
        yield from map(_batch, groups)


def _with_shown(seed: int) -> Iterator[Conversation]:
    """Yields random conversations, and among them a few conversations from the project's pages."""
    rng = random.Random(seed)
    for conversation in conversations(seed):
        if rng.random() < SHARE_OF_SHOWN:
            shown = rng.choice(SHOWN)
            yield replace(shown, thinks=(rng.random() < 0.5,) * len(shown.rounds))
        yield conversation


def drawn_ahead(
    tokenizer: Tokenizer, seed: int, tokens: int, longest: int, processes: int
) -> Iterator[Batch]:
    """Yields batches from `processes` processes in turn. Each process has its own seed."""
    context = get_context("spawn")
    queues: list[Queue[Batch]] = [context.Queue(AHEAD) for _ in range(processes)]
    for number, queue in enumerate(queues):
        given = (tokenizer.to_str(), seed * processes + number, tokens, longest, queue)
        context.Process(target=_draw, args=given, daemon=True).start()
    for queue in cycle(queues):
        yield queue.get()


def _draw(tokenizer: str, seed: int, tokens: int, longest: int, queue: Queue[Batch]) -> None:
    for batch in batches(Tokenizer.from_str(tokenizer), seed, tokens, longest):
        queue.put(batch)


def _grouped(encoded: Iterable[Encoded], tokens: int) -> Iterator[list[Encoded]]:
    group: list[Encoded] = []
    for conversation in sorted(encoded, key=lambda conversation: len(conversation.ids)):
        if group and (len(group) + 1) * len(conversation.ids) > tokens:
            yield group
            group = []
        group.append(conversation)
    yield group


def _batch(group: list[Encoded]) -> Batch:
    width = max(len(conversation.ids) for conversation in group)
    ids = np.zeros((len(group), width), np.int32)
    counted = []
    for row, conversation in enumerate(group):
        ids[row, : len(conversation.ids)] = conversation.ids
        for begin, end in conversation.spans:
            counted += [(row, at) for at in range(begin - 1, end - 1)]
    rows, places = np.array(counted, np.int32).T
    return Batch(ids[:, :-1], rows * (width - 1) + places, ids[rows, places + 1])
