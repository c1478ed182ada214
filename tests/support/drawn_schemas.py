"""A Hypothesis strategy that generates JSON schemas for formats."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-100, 100),
        st.integers(0, 1000),
    ),
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 8)),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.text(max_size=6), min_size=1, max_size=4)
    ),
    st.just({"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
    st.just({"type": "integer", "multipleOf": 3, "exclusiveMinimum": 0, "maximum": 60}),
    st.builds(lambda value: {"const": value}, st.one_of(st.text(max_size=6), st.integers())),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{1,3}(-[0-9]+)?$", "maxLength": 6},
            {"type": "string", "format": "date"},
            {"type": ["integer", "null"], "maximum": 9, "minimum": -9},
        ]
    ),
)
REFERENCE = {"$ref": "#/$defs/shared"}


def _object(properties: dict[str, Any], optional: int) -> dict[str, Any]:
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names[optional:],
        "additionalProperties": False,
    }


_INNER = st.recursive(
    st.one_of(LEAVES, st.just(REFERENCE)),
    lambda inner: st.one_of(
        st.builds(
            _object, st.dictionaries(st.text(max_size=5), inner, max_size=3), st.integers(0, 2)
        ),
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(lambda several: {"anyOf": several}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda first, rest: {"type": "array", "prefixItems": first, "items": rest},
            st.lists(inner, min_size=1, max_size=2),
            st.sampled_from([False, {"type": "boolean"}]),
        ),
        st.builds(
            lambda values: {
                "type": "object",
                "properties": {},
                "additionalProperties": values,
                "maxProperties": 2,
            },
            inner,
        ),
    ),
    max_leaves=6,
)
# A schema of each kind, with the definition to which its references refer.
SCHEMAS = st.builds(lambda schema, shared: {"$defs": {"shared": shared}, **schema}, _INNER, LEAVES)
