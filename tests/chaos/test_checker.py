"""The checker finds each kind of error in traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaos.checker import Findings, check, read

IDENT = "aa" * 16
WANTED = [5, 6, 7]


def client(t: float, what: str, **facts: Any) -> dict[str, Any]:
    return {"t": t, "who": "client", "pid": 1, "what": what, "id": IDENT, **facts}


def taken(t: float, pos: int, *ids: int) -> dict[str, Any]:
    return client(t, "taken", pos=pos, ids=list(ids))


def findings(*lines: dict[str, Any]) -> Findings:
    return check(list(lines), {IDENT: WANTED})


SOUND = (taken(1, 0, 5), taken(2, 1, 6, 7), client(3, "end", reason="length"))


def test_a_sound_stream() -> None:
    verdict = findings(*SOUND)
    assert verdict.sound
    assert verdict.summary()["ends"] == {"length": 1}
    assert verdict.summary()["ids"] == 3


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ((SOUND[0], SOUND[2]), "short"),
        ((SOUND[1], SOUND[2]), "lost"),
        ((SOUND[0], SOUND[0], *SOUND[1:]), "doubled"),
        ((*SOUND, SOUND[2]), "doubled"),
        ((*SOUND, taken(4, 3, 8)), "unexpected"),
        ((taken(1, 0, 5), taken(2, 1, 6, 9), SOUND[2]), "wrong"),
        (SOUND[:2], "stuck"),
        ((), "stuck"),
        ((taken(1, 1, 6), taken(2, 0, 5), SOUND[2]), "reordered"),
    ],
)
def test_an_unsound_stream(lines: tuple[dict[str, Any], ...], fault: str) -> None:
    verdict = findings(*lines)
    assert not verdict.sound
    assert IDENT in getattr(verdict, fault)


def test_ids_of_an_unknown_stream() -> None:
    stranger = {**taken(1, 0, 5), "id": "bb" * 16}
    assert findings(*SOUND, stranger).unexpected == ["bb" * 16]


def test_an_error_is_an_end() -> None:
    verdict = findings(SOUND[0], client(2, "end", code="worker_lost"))
    assert verdict.sound
    assert verdict.ends == {"worker_lost": 1}


def test_the_time_from_a_fault_to_its_detection() -> None:
    fault = {"t": 4.0, "who": "worker-m-0", "pid": 2, "what": "fault", "name": "kill"}
    seen = {"t": 4.5, "who": "broker", "pid": 3, "what": "exited", "slot": "m/0"}
    other = {**seen, "t": 4.1, "slot": "m/1"}
    assert findings(*SOUND, fault, other, seen).detection_s == [0.5]


def test_traces_are_read_in_the_order_of_the_clock(tmp_path: Path) -> None:
    (tmp_path / "a-1.jsonl").write_text('{"t": 2, "who": "a"}\n{"t": 4, "who"')
    (tmp_path / "b-2.jsonl").write_text('{"t": 1, "who": "b"}\n{"t": 3, "who": "b"}\n')
    assert [line["t"] for line in read(tmp_path)] == [1, 2, 3]
