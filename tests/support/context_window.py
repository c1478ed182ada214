"""The context of a stream with shifts, token by token, as docs/concepts.md describes it."""

from __future__ import annotations

from collections.abc import Sequence


def window(stream: Sequence[int], context: int, keep: int) -> list[int]:
    """Returns the tokens of a stream that a model reads before it generates the next token."""
    inputs: list[int] = []
    for token in stream:
        if len(inputs) == context:
            del inputs[keep : keep + max((context - keep) // 2, 1)]
        inputs.append(token)
    return inputs
