"""A strategy that draws JSON schemas which a format can have."""

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
)


def _object(properties: dict[str, Any], optional: int) -> dict[str, Any]:
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names[optional:],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
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
    ),
    max_leaves=6,
)
