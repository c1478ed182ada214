"""Choices: several completions of one prompt. Each choice is a request of its own.

The key `choice` of each request names the group of all choices of the prompt. One worker therefore
computes the whole group, and reads the prompt only once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import integer
from mlxpool.common.errors import BadRequest

KEY = "choice"
MAX_CHOICES = 64  # the most choices of one prompt
MAX_GROUP = 64  # characters


class Choice(Struct, frozen=True):
    """Choice `index`, from 0, of `of` choices of one prompt.

    `group` is a text that the client uses only for the choices of this prompt.
    """

    group: str
    index: int
    of: int

    def body(self) -> dict[str, Any]:
        return {"group": self.group, "index": self.index, "of": self.of}

    @classmethod
    def parse(cls, raw: object) -> Choice | None:
        """Reads `choice` of a `generate`; None if it is absent. Raises BadRequest."""
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise BadRequest(f"choice must be a map {{group, index, of}}, got {raw!r:.60}")
        group = raw.get("group")
        if not isinstance(group, str) or not 1 <= len(group) <= MAX_GROUP:
            raise BadRequest(f"choice.group must be a text of 1 to {MAX_GROUP} characters")
        named = {f"{KEY}.{name}": raw.get(name) for name in ("of", "index")}
        of = integer(named, f"{KEY}.of", 1, MAX_CHOICES)
        index = integer(named, f"{KEY}.index", 0, MAX_CHOICES - 1)
        if of is None or index is None or index >= of:
            raise BadRequest(f"choice.index is {index}, must be below choice.of, which is {of}")
        return cls(group, index, of)
