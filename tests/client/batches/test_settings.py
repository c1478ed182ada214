"""The settings of a batch in its message."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mlxpool.client.batches.steps import source_and_settings
from mlxpool.client.jobs import BatchOptions
from mlxpool.common.errors import BadRequest

WEEK, YEAR = 7 * 24 * 3600, 366 * 24 * 3600


def settings(**given: Any) -> dict[str, Any]:
    return source_and_settings([], "m", cast(BatchOptions, given))[1]


def test_times_are_sent_in_milliseconds() -> None:
    fields = settings(keep=YEAR, deadline=WEEK)
    assert (fields["keep_ms"], fields["deadline_ms"]) == (YEAR * 1000, WEEK * 1000)


@pytest.mark.parametrize(("name", "most"), [("keep", YEAR), ("deadline", WEEK)])
def test_a_time_that_is_too_long_is_told_its_bound(name: str, most: int) -> None:
    said = f"{name} is {most + 1}, must be seconds from 0 to {most}$"
    with pytest.raises(BadRequest, match=said):
        settings(**{name: most + 1})
