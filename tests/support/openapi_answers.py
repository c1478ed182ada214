"""Compares answers of a gateway with the schemas that its /openapi.json has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

from mlxpool.gateway.description.answers import COMPONENTS


def validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    """A validator of a schema that may refer to components of the document."""
    whole = {**schema, "components": {"schemas": dict(COMPONENTS)}}
    return Draft202012Validator(whole, format_checker=FormatChecker())


def faults(answer: Any, component: str) -> list[str]:
    """What is wrong with an answer that should have this component's schema."""
    found = validator({"$ref": f"#/components/schemas/{component}"}).iter_errors(answer)
    return [f"{error.json_path}: {error.message}" for error in found]


def unknown_members(answer: Any, schema: Mapping[str, Any], where: str = "$") -> Iterator[str]:
    """Members of an answer that its schema does not name."""
    if "$ref" in schema:
        schema = COMPONENTS[schema["$ref"].rpartition("/")[2]]
    if isinstance(answer, list):
        for each in answer:
            yield from unknown_members(each, schema.get("items", {}), f"{where}[]")
    known = schema.get("properties")
    if isinstance(answer, Mapping) and known is not None:
        for name, value in answer.items():
            if name not in known:
                yield f"{where}.{name}"
            else:
                yield from unknown_members(value, known[name], f"{where}.{name}")
