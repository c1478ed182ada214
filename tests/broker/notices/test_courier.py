"""The threads that post notices: they read the settings for each try, and never end by an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mlxpool.broker.notices.courier import Courier, Posting, PostingRules
from mlxpool.broker.notices.posting import Outcome
from mlxpool.broker.notices.signing import headers
from mlxpool.common.web_targets import Allowed
from support.pool import PATIENCE, until


@dataclass
class Office:
    """Stands for the poster; `held` holds back every post until it is set."""

    posts: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    fails: bool = False

    def post(self, url: str, body: bytes, headers: Any, allowed: Allowed) -> Outcome:
        self.posts.append((url, body, dict(headers)))
        assert self.held.wait(PATIENCE)
        if self.fails:
            raise RuntimeError("a bug")
        return Outcome(True)


@dataclass
class Parts:
    office: Office
    rules: PostingRules
    courier: Courier
    woken: threading.Semaphore

    def outcomes(self, count: int) -> list[tuple[int, Outcome]]:
        found: list[tuple[int, Outcome]] = []

        def came() -> bool:
            found.extend(self.courier.take())
            return len(found) >= count

        until(came, f"{count} outcomes")
        return found


@pytest.fixture
def parts() -> Iterator[Parts]:
    office, woken = Office(), threading.Semaphore(0)
    made: Any = office
    box: list[Parts] = []
    courier = Courier(lambda: box[0].rules, woken.release, made, threads=2)
    box.append(Parts(office, PostingRules(Allowed(), None), courier, woken))
    yield box[0]
    office.held.set()
    courier.close()


def posting(number: int) -> Posting:
    return Posting(number, f"id-{number}", "https://there/", b"body")


def test_notices_are_posted_beside_each_other_and_wake_the_loop(parts: Parts) -> None:
    for number in range(3):
        parts.courier.post(posting(number))
    until(lambda: len(parts.office.posts) == 2, "both threads have one")
    assert parts.courier.take() == []
    parts.office.held.set()
    outcomes = parts.outcomes(3)
    assert sorted(end_seq for end_seq, _ in outcomes) == [0, 1, 2]
    assert all(parts.woken.acquire(timeout=PATIENCE) for _ in range(3))


def test_a_secret_signs_and_can_be_changed(parts: Parts, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("whsec_" + "A" * 32)
    parts.office.held.set()
    parts.courier.post(posting(1))
    parts.outcomes(1)
    parts.rules = replace(parts.rules, secret=file)
    parts.courier.post(posting(2))
    parts.outcomes(1)
    plain, signed = (sent for _, _, sent in parts.office.posts)
    assert plain == {"webhook-id": "id-1"}
    wanted = headers([bytes(24)], "id-2", int(signed["webhook-timestamp"]), b"body")
    assert signed == wanted


def test_a_secret_that_cannot_be_read_is_a_failed_try(parts: Parts, tmp_path: Path) -> None:
    parts.rules = replace(parts.rules, secret=tmp_path / "none")
    parts.courier.post(posting(1))
    ((_, outcome),) = parts.outcomes(1)
    assert not outcome.delivered and "cannot read" in outcome.why and not parts.office.posts


def test_a_bug_is_a_failed_try_and_ends_no_thread(parts: Parts) -> None:
    parts.office.held.set()
    parts.office.fails = True
    for number in range(4):
        parts.courier.post(posting(number))
    assert all("a bug" in outcome.why for _, outcome in parts.outcomes(4))


def test_nothing_is_started_without_a_notice() -> None:
    before = threading.active_count()
    with Courier(lambda: PostingRules(Allowed(), None), lambda: None):
        assert threading.active_count() == before
