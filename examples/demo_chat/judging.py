"""How often demo-chat writes exactly what it should, in conversations drawn from other words."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_chat.batches import encode
from demo_chat.conversations import UNASKED, Conversation, Round, with_tools, without_tools
from demo_chat.tools import FAMILIES, drawn
from demo_chat.words import Words

Expected = Callable[[list[int]], npt.NDArray[np.int64]]  # the likeliest token behind each token

# Their invented words are others than those of training, and tools have names from other lists.
SETS: dict[str, tuple[int, Callable[[Words], Conversation]]] = {
    "known tools": (10**7 + 1, lambda words: with_tools(words, FAMILIES)),
    "unseen tools": (10**7 + 2, lambda words: with_tools(words, (drawn,))),
    "no tools": (10**7 + 3, without_tools),
}


@dataclass(frozen=True, slots=True)
class Miss:
    """What the model would have written instead, as far as it agrees with what came before."""

    kind: str
    user: str
    wanted: str
    written: str


Results = dict[str, dict[str, list[int]]]  # set -> kind of answer -> [right, all]


def judge(
    expected: Expected, tokenizer: Tokenizer, count: int, longest: int
) -> tuple[Results, list[Miss]]:
    """Right and all answers of each kind, by the name of the set; and all that are not right.

    An answer is right if each of its tokens, its thought and end mark included, is the likeliest
    behind those before it: then it is what the model writes at temperature 0.
    """
    results: Results = {}
    misses: list[Miss] = []
    for name, (seed, draw) in SETS.items():
        for thinks in (False, True):
            words = Words(random.Random(seed), unseen=True)
            label = f"{name}, thinking" if thinks else name
            right, tried = Counter[str](), Counter[str]()
            for _ in range(count):
                one = draw(words)
                one = replace(one, thinks=(thinks,) * len(one.rounds))
                for kind, miss in _answers(expected, tokenizer, one, longest):
                    tried[kind] += 1
                    right[kind] += miss is None
                    misses += [] if miss is None else [replace(miss, kind=f"{label}: {kind}")]
            results[label] = {kind: [right[kind], tried[kind]] for kind in sorted(tried)}
    return results, misses


def _answers(
    expected: Expected, tokenizer: Tokenizer, conversation: Conversation, longest: int
) -> Iterator[tuple[str, Miss | None]]:
    """The kind of each answer, and how it misses."""
    encoded = encode(tokenizer, conversation)
    if len(encoded.ids) > longest:
        return
    likeliest = expected(encoded.ids).tolist()
    kinds = [(kind, one) for one in conversation.rounds for kind in _kinds(one)]
    for (kind, one), (begin, end) in zip(kinds, encoded.spans, strict=True):
        if kind == UNASKED:
            continue
        wanted, written = encoded.ids[begin:end], likeliest[begin - 1 : end - 1]
        shown = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (wanted, written)]
        yield kind, None if wanted == written else Miss(kind, one.user, *shown)


def _kinds(one: Round) -> Sequence[str]:
    return ("call", "answer") if one.call is not None else (one.family,)


def table(results: Results) -> str:
    """The shares of right answers as Markdown."""
    rows = [
        "| conversations with | calls | answers to a result | other answers |",
        "|---|---|---|---|",
    ]
    for name, kinds in results.items():
        others = [pair for kind, pair in kinds.items() if kind not in ("call", "answer")]
        groups = [
            kinds.get("call"),
            kinds.get("answer"),
            [sum(one) for one in zip(*others, strict=True)],
        ]
        rows.append(f"| {name} | {' | '.join(_share(pair) for pair in groups)} |")
    return "\n".join(rows) + "\n"


def _share(pair: Sequence[int] | None) -> str:
    if not pair or not pair[1]:
        return ""
    right, tried = pair
    return f"{right / tried:.3f} of {tried}"
