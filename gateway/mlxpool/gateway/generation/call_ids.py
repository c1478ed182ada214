"""Ids of calls of tools, made of the id of their answer: every reading of it has the same."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable

CALL_ID_LENGTH = 9  # letters and digits; some templates accept no other length
_DIGITS = string.digits + string.ascii_letters


def call_ids(answer: str) -> Callable[[int], str]:
    """Makes the id of the call with a number in an answer; `answer` names this one."""

    def call_id(index: int) -> str:
        digest = hashlib.sha256(f"{answer}/{index}".encode()).digest()
        return "".join(_DIGITS[byte % len(_DIGITS)] for byte in digest[:CALL_ID_LENGTH])

    return call_id
