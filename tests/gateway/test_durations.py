"""`keep_alive` of Ollama's interface."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.ollama.requests import FOREVER, MAX_SECONDS, keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0), ("0", 0), ("0s", 0), (0.0, 0), ("-0", 0),
        (3600, 3600), ("3600", 3600), (1.5, 1.5), ("1.5", 1.5),
        ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), (".5s", 0.5), ("+2s", 2),
        ("250ms", 0.25), ("1h1m1s1ms", 3661.001), ("1000000us", 1), ("1µs", 1e-6), ("1ns", 1e-9),
        (-1, FOREVER), ("-1", FOREVER), ("-1m", FOREVER), (-0.5, FOREVER), ("-1h5m", FOREVER),
        (10**400, FOREVER), ("99999999h", FOREVER), (float("inf"), FOREVER),
    ],
)  # fmt: skip
def test_a_duration(value: Any, seconds: float | None) -> None:
    assert keep_alive(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "value", ["", "soon", "5 m", "m", "1d", "5m ", "1h-5m", "٣s", True, [], {}, float("nan")]
)
def test_what_is_none_is_refused(value: Any) -> None:
    with pytest.raises(HttpError, match="'keep_alive' must be seconds, or a duration") as caught:
        keep_alive(value)
    assert (caught.value.status, caught.value.param) == (400, "keep_alive")


@given(st.text("0123456789.hmsnuµ+-e ", max_size=12) | st.floats() | st.integers())
def test_any_value_is_in_the_bounds_or_refused(value: Any) -> None:
    try:
        seconds = keep_alive(value)
    except HttpError as error:
        assert error.status == 400
    else:
        assert seconds is not None and (seconds == FOREVER or 0 <= seconds <= MAX_SECONDS)
