"""Checked reading of a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpool.common.checks import is_number
from mlxpool.common.errors import ModelLoadFailed


class Fields:
    """The metadata of a GGUF file; keys of its architecture are given without their prefix.

    Every method except `find` raises ModelLoadFailed, with the file, the key and the value, if the
    value has another type, or is missing without a default.
    """

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file = file
        self._metadata = metadata
        self.architecture = ""
        self.architecture = self.text("general.architecture")

    def find(self, key: str) -> Any:
        """Returns the value of a key; None if the key is missing."""
        return self._metadata.get(self._full(key))

    def text(self, key: str) -> str:
        """Returns the text of a key."""
        return str(self._checked(key, self.find(key), str, "a text"))

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a key's integer; a list of equal integers is read as this integer."""
        stored = self.find(key)
        if isinstance(stored, list) and stored and all(item == stored[0] for item in stored):
            stored = stored[0]
        value = default if stored is None else stored
        return int(self._checked(key, value, int, "a whole number"))

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the number of a key, rounded to 7 digits, because files have 32-bit floats."""
        stored = self.find(key)
        value = default if stored is None else stored
        if not is_number(value):
            self._refuse(key, value, "a number")
        return float(f"{value:.7g}")

    def flag(self, key: str, default: bool) -> bool:
        """Returns the boolean of a key."""
        stored = self.find(key)
        return bool(
            self._checked(key, default if stored is None else stored, bool, "true or false")
        )

    def texts(self, key: str) -> list[str]:
        """Returns the list of texts of a key."""
        return [str(text) for text in self._list(key, str, "a list of texts")]

    def integers(self, key: str) -> list[int]:
        """Returns the list of integers of a key."""
        return [int(number) for number in self._list(key, int, "a list of whole numbers")]

    def numbers(self, key: str) -> list[float]:
        """Returns the list of numbers of a key."""
        numbers = self.find(key)
        if not isinstance(numbers, list) or not all(
            isinstance(number, float | int) for number in numbers
        ):
            self._refuse(key, numbers, "a list of numbers")
        return [float(number) for number in numbers]

    def _full(self, key: str) -> str:
        return key if key.partition(".")[0] in _SHARED else f"{self.architecture}.{key}"

    def _list(self, key: str, kind: type, shown: str) -> list[Any]:
        items = self.find(key)
        if not isinstance(items, list) or not all(type(item) is kind for item in items):
            self._refuse(key, items, shown)
        return list(items)

    def _checked(self, key: str, value: Any, kind: type, shown: str) -> Any:
        if type(value) is not kind:
            self._refuse(key, value, shown)
        return value

    def _refuse(self, key: str, value: Any, shown: str) -> None:
        has = "no" if value is None else f"{value!r:.60} as"
        raise ModelLoadFailed(
            f"{self.file} has {has} {self._full(key)!r} in its metadata, must have {shown}"
        )


_SHARED = ("general", "tokenizer", "split")  # prefixes of keys that are not an architecture's
