"""A format whose answers go on for as long as a measurement takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# An answer that does not end within the measurement, of the kinds of values that answers have.
RECORDS: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["cat", "dog", "horse"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}
FORMAT = {"type": "json_schema", "schema": RECORDS}
