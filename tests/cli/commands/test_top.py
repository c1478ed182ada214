"""`mlxpool top` without a terminal: rows from snapshots, and the order that keys select."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.cli.commands import top
from mlxpool.cli.commands.top import (
    COLUMNS,
    SORT_ORDERS,
    Row,
    View,
    cells,
    median,
    ordered,
    rows,
    summary,
)

BOUNDS = [0.1, 0.2, 0.4]


def model(name: str = "m", counts: list[int] | None = None, **more: Any) -> dict[str, Any]:
    first = {"bounds": BOUNDS, "counts": counts or [0, 0, 0, 0]}
    base = {"name": name, "state": "ready", "waiting": 0, "running": 0, "tokens": 0}
    return {**base, "accepted": 0, "first_token": first, **more}


def worker(slot: str = "m/0", **more: Any) -> dict[str, Any]:
    base = {"slot": slot, "model": slot.rpartition("/")[0], "pid": 5, "state": "ready"}
    return {**base, "tokens": 0, "uptime_s": 3.0, "restarts": 0, "memory": {}, **more}


def snapshot(
    at: float, workers: list[dict[str, Any]], models: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    requests = {"live": 1, "done": 2, "failed": 3, "cancelled": 4}
    stats = {"requests": requests, "queued": 5, "tokens": {"generated": more.pop("made", 0)}}
    broker = {"pid": 9, "boot": 1, "state": "ready", "uptime_s": at, **more}
    return {"broker": broker, "stats": stats, "models": models, "workers": workers}


def test_rates_use_the_brokers_time() -> None:
    """Rates use the broker's clock, by which the snapshots cover 4 s, not the reader's clock."""
    history = [
        snapshot(at, [worker(tokens=tokens)], [model()])
        for at, tokens in ((1.0, 0), (2.0, 900), (3.5, 1000), (5.0, 1300))
    ]
    assert rows(history)[0].rate == 1300 / 4
    assert rows([snapshot(0.0, [worker()], [model()]), *history])[0].rate == (1300 - 0) / 4
    assert rows(history[:1])[0].rate is None


def test_another_worker_in_the_slot_begins_at_zero() -> None:
    before = snapshot(1.0, [worker(tokens=5000)], [model()])
    after = snapshot(2.0, [worker(pid=6, tokens=30)], [model()])
    assert rows([before, after])[0].rate == 30


def test_snapshots_of_an_earlier_broker_are_dropped() -> None:
    before = snapshot(90.0, [worker(tokens=50)], [model(counts=[9, 0, 0, 0])])
    after = snapshot(1.0, [worker(tokens=10)], [model()], boot=2)
    row = rows([before, after])[0]
    assert (row.rate, row.first_token) == (None, None)
    assert "- tokens/s" in summary([before, after])


@pytest.mark.parametrize(
    ("counts", "value"),
    [
        ([0, 0, 0, 0], None),
        ([2, 0, 0, 0], 0.05),
        ([0, 4, 0, 0], 0.15),
        ([1, 0, 1, 0], 0.1),
        ([0, 0, 0, 7], 0.4),
    ],
)
def test_a_median_is_interpolated_within_its_bucket(counts: list[int], value: float | None) -> None:
    actual = median(BOUNDS, counts)
    assert actual == (None if value is None else pytest.approx(value))


def test_the_first_token_is_that_of_the_last_minute() -> None:
    before = snapshot(1.0, [worker()], [model(counts=[100, 0, 0, 0])])
    after = snapshot(2.0, [worker()], [model(counts=[100, 2, 0, 0])])
    assert rows([before])[0].first_token == pytest.approx(0.05)
    assert rows([before, after])[0].first_token == pytest.approx(0.15)
    assert rows([before, before])[0].first_token == pytest.approx(0.05)


def test_a_slot_without_a_worker_and_a_model_without_slots() -> None:
    gone: dict[str, Any] = {
        "slot": "m/0",
        "model": "m",
        "pid": None,
        "state": "none",
        "memory": {},
        "restarts": 2,
    }
    shown = rows([snapshot(1.0, [gone], [model(waiting=3), model("n", state="cold", waiting=1)])])
    assert shown == [
        Row("m", "m/0", "none", waiting=3, restarts=2),
        Row("n", state="cold", waiting=1),
    ]
    assert cells(shown[0])[0] == "m/0"
    assert cells(shown[1]) == ("n", "cold", "0", "1", "-", "-", "-", "-", "-", "0", "-")


def test_two_replicas_have_the_queue_of_their_model() -> None:
    shown = rows([snapshot(1.0, [worker("m/0"), worker("m/1")], [model(waiting=7)])])
    assert [(row.slot, row.waiting) for row in shown] == [("m/0", 7), ("m/1", 7)]


def test_cells() -> None:
    memory = {"limit": 1100, "weights": 100, "kv": 700, "kv_used": 250, "total": 5_000_000}
    row = rows([snapshot(1.0, [worker(memory=memory, suspect=True, running=2)], [model()])])[0]
    assert row.kv == 0.25 and row.state == "suspect"
    line = dict(zip([column.name for column in COLUMNS], cells(row), strict=True))
    assert (line["KV%"], line["MEM"], line["RUN"], line["UP"]) == ("25", "5.0 MB", "2", "3.0 s")


def drafting(at: float, drafted: int, accepted: int, pid: int = 5) -> dict[str, Any]:
    counts = {"checks": 1, "drafted": drafted, "accepted": accepted}
    return snapshot(at, [worker(pid=pid, speculation=counts)], [model()])


def test_the_acceptance_of_drafts_is_that_of_the_last_minute() -> None:
    def shown(*history: dict[str, Any]) -> str:
        names = [column.name for column in COLUMNS]
        return dict(zip(names, cells(rows(history)[0]), strict=True))["DRAFTS"]

    begin, later = drafting(1.0, 100, 90), drafting(2.0, 300, 140)
    assert shown(begin) == "90%"
    assert shown(begin, later) == "25%"
    assert shown(begin, drafting(2.0, 100, 90)) == "-", "none were checked meanwhile"
    assert shown(begin, drafting(2.0, 8, 1, pid=6)) == "12%", "another worker counts from 0"
    assert shown(snapshot(1.0, [worker(speculation={})], [model()])) == "-"
    assert rows([later])[0].as_json()["acceptance"] == pytest.approx(140 / 300)


@pytest.mark.parametrize("order", SORT_ORDERS, ids=lambda order: order.name)
def test_every_column_sorts(order: top.SortOrder) -> None:
    low = Row("a", "a/0", "loading", 0, 0, 1.0, 0.1, 0.1, 1, 0.1, 0, 1.0)
    high = Row("b", "b/0", "ready", 9, 9, 9.0, 9.0, 0.9, 9, 0.9, 9, 9.0)
    nothing = Row("c", "c/0", "starting")
    wanted = [high, low, nothing] if order.descending else [low, high, nothing]
    assert ordered([nothing, low, high], order) == wanted
    assert ordered([nothing, low, high], order, reverse=True)[-1] == wanted[0]


def test_keys() -> None:
    view = View("model")
    assert view.press("t") and view.order.name == "rate" and not view.reversed
    assert view.press("r") and view.reversed
    assert view.press("s") and view.order.name == "ttft" and not view.reversed
    assert view.press("?") and view.order.name == "ttft"
    assert not view.press("mq") and view.order.name == "model"
    for _ in SORT_ORDERS:
        view.press("s")
    assert view.order.name == "model"


@pytest.mark.parametrize(("columns", "lines"), [(40, 10), (80, 24), (200, 60)])
def test_a_page_fits_the_terminal(columns: int, lines: int) -> None:
    view = View("model")
    view.history.append(
        snapshot(1.0, [worker(f"m{n}/0") for n in range(50)], [model(f"m{n}") for n in range(50)])
    )
    page = view.page(columns, lines, keys=True).splitlines()
    assert len(page) <= lines and max(map(len, page)) <= columns
    assert page[-1].startswith("q quit, s next column")
    (head,) = (number for number, line in enumerate(page) if line.startswith("SLOT"))
    assert "TOK/S" in page[head]
    assert sum(line.startswith("m") for line in page) == min(50, lines - head - 2)


def test_each_key_has_one_meaning() -> None:
    keys = [order.key for order in SORT_ORDERS]
    assert len(set(keys)) == len(keys) and not set(keys) & set("qsr")
