"""Compares a gateway's answers with their schemas in its /openapi.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

from mlxpool.gateway.description.answers import COMPONENTS


def validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    """Returns a validator of a schema, which may refer to components of the document."""
    whole = {**schema, "components": {"schemas": dict(COMPONENTS)}}
    return Draft202012Validator(whole, format_checker=FormatChecker())


def faults(answer: Any, component: str) -> list[str]:
    """Returns the violations of a component's schema in an answer."""
    errors = validator({"$ref": f"#/components/schemas/{component}"}).iter_errors(answer)
    return [f"{error.json_path}: {error.message}" for error in errors]


def unknown_members(answer: Any, schema: Mapping[str, Any], where: str = "$") -> Iterator[str]:
    """Yields members of an answer that its schema does not name."""
    if "$ref" in schema:
        schema = COMPONENTS[schema["$ref"].rpartition("/")[2]]
    if isinstance(answer, list):
        for item in answer:
            yield from unknown_members(item, schema.get("items", {}), f"{where}[]")
    known = schema.get("properties")
    if isinstance(answer, Mapping) and known is not None:
        for name, value in answer.items():
            if name not in known:
                yield f"{where}.{name}"
            else:
                yield from unknown_members(value, known[name], f"{where}.{name}")
