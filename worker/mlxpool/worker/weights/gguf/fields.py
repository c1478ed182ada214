"""Checked reading of a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpool.common.checks import is_number
from mlxpool.common.errors import ModelLoadFailed


class Fields:
    """The metadata of a file; keys without a dot are those of its architecture.

    Every method raises ModelLoadFailed naming the file, the key and its value where it is missing
    and has no default, or is of another type.
    """

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file = file
        self._metadata = metadata
        self.architecture = ""
        self.architecture = self.text("general.architecture")

    def find(self, key: str) -> Any:
        """The value of a key; None where there is none."""
        return self._metadata.get(self._full(key))

    def text(self, key: str) -> str:
        """A text."""
        return str(self._checked(key, self.find(key), str, "a text"))

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; a list of one for each layer counts where all are equal."""
        found = self.find(key)
        if isinstance(found, list) and found and all(one == found[0] for one in found):
            found = found[0]
        value = default if found is None else found
        return int(self._checked(key, value, int, "a whole number"))

    def number(self, key: str, default: float | None = None) -> float:
        """A number, as one writes it: files hold the nearest one of 32 bits."""
        found = self.find(key)
        value = default if found is None else found
        if not is_number(value):
            self._refuse(key, value, "a number")
        return float(f"{value:.7g}")

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        found = self.find(key)
        return bool(self._checked(key, default if found is None else found, bool, "true or false"))

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        return [str(one) for one in self._list(key, str, "a list of texts")]

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers."""
        return [int(one) for one in self._list(key, int, "a list of whole numbers")]

    def numbers(self, key: str) -> list[float]:
        """A list of numbers."""
        found = self.find(key)
        if not isinstance(found, list) or not all(isinstance(one, float | int) for one in found):
            self._refuse(key, found, "a list of numbers")
        return [float(one) for one in found]

    def _full(self, key: str) -> str:
        return key if key.partition(".")[0] in _SHARED else f"{self.architecture}.{key}"

    def _list(self, key: str, kind: type, shown: str) -> list[Any]:
        found = self.find(key)
        if not isinstance(found, list) or not all(type(one) is kind for one in found):
            self._refuse(key, found, shown)
        return list(found)

    def _checked(self, key: str, value: Any, kind: type, shown: str) -> Any:
        if type(value) is not kind:
            self._refuse(key, value, shown)
        return value

    def _refuse(self, key: str, value: Any, shown: str) -> None:
        has = "no" if value is None else f"{value!r:.60} as"
        raise ModelLoadFailed(
            f"{self.file} has {has} {self._full(key)!r} in its metadata, must have {shown}"
        )


_SHARED = ("general", "tokenizer", "split")  # keys that begin so are of no architecture
