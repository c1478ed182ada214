"""Verifies completions of the counting model, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpool.common.config.schema import Counting
from mlxpool.worker.engine.counting_engine import piece, token_at

VOCAB = Counting().vocab


def expected_ids(prompt: str, seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    """Returns the token ids that the counting model must generate."""
    ids = list(prompt.encode())
    return [token_at(ids, seed, position, vocab) for position in range(count)]


def text_of(ids: Sequence[int]) -> str:
    return b"".join(map(piece, ids)).decode()
