"""What all records share: typed values that are declared as `msgspec.Struct`s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct


def as_map(record: Struct) -> dict[str, Any]:
    """The fields of a record by their names; records inside it become maps as well."""
    return {name: _plain(getattr(record, name)) for name in record.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return as_map(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
