"""The ids of the events of jobs."""

from __future__ import annotations

import pytest

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.jobs.bodies import Place, place_of


@pytest.mark.parametrize(
    ("id", "place"),
    [
        ("0.12", Place(0, 12)),
        ("3.end", Place(3, 0, ended=True)),
        ("0.0.failed", Place(0, 0, failed=1)),
        ("1.7.failed.3", Place(1, 7, failed=3)),
    ],
)
def test_the_id_of_an_event_names_a_place(id: str, place: Place) -> None:
    assert place_of(id) == place and place.id == id


@pytest.mark.parametrize("id", ["", "0", "0.x", "0.1.failed.", "0.end.failed", "0.1.fail", "-1.2"])
def test_another_text_is_refused(id: str) -> None:
    with pytest.raises(HttpError, match="Last-Event-ID"):
        place_of(id)


def test_a_reader_has_all_when_it_was_told_the_newest_error_of_the_place() -> None:
    job = {"gen": 0, "state": "dead", "ids": 7, "retried": [[3, 1], [7, 2]]}
    results = [Place(0, 7, failed=number).has_all(job) for number in (1, 2, 3)]
    assert results == [False, False, True]
    assert not Place(0, 7).has_all(job) and not Place(0, 3, failed=2).has_all(job)
    assert not Place(0, 7, failed=3).has_all({**job, "state": "running"})
    assert Place(0, 7, failed=1).has_all({**job, "retried": []})
    assert not Place(1, 7, failed=3).has_all(job)
    assert Place(0, 9, ended=True).has_all({**job, "state": "done"})
