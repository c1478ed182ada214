"""The thread that posts notices: it reads the settings for each post, and survives all errors."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.broker.notices.posting import Names, Outcome, Poster
from mlxpool.broker.notices.sender import NoticeSender, Posting, PostingRules, headers, read_secrets
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.web_targets import Allowed, IpAddress
from support.pool import PATIENCE, until


@dataclass
class Office:
    """Replaces the poster of notices: records posts, each of which waits until `held` is set."""

    posts: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    cancelled: int = 0

    async def post(self, url: str, body: bytes, headers: Any, allowed: Allowed) -> Outcome:
        self.posts.append((url, body, dict(headers)))
        try:
            while not self.held.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise RuntimeError("a bug")
        return Outcome(True)


@dataclass
class Parts:
    office: Office
    rules: PostingRules
    sender: NoticeSender
    woken: threading.Semaphore

    def outcomes(self, count: int) -> list[tuple[int, Outcome]]:
        outcomes: list[tuple[int, Outcome]] = []

        def came() -> bool:
            outcomes.extend(self.sender.take())
            return len(outcomes) >= count

        until(came, f"{count} outcomes")
        return outcomes


@pytest.fixture
def parts() -> Iterator[Parts]:
    office, woken = Office(), threading.Semaphore(0)
    untyped: Any = office
    box: list[Parts] = []
    sender = NoticeSender(lambda: box[0].rules, woken.release, lambda: untyped)
    box.append(Parts(office, PostingRules(Allowed(), None), sender, woken))
    yield box[0]
    office.held.set()
    sender.close()


def posting(number: int) -> Posting:
    return Posting(number, f"id-{number}", "https://there/", b"body")


def test_notices_are_posted_beside_each_other_and_wake_the_loop(parts: Parts) -> None:
    for number in range(64):
        parts.sender.post(posting(number))
    until(lambda: len(parts.office.posts) == 64, "all are under way")
    assert parts.sender.take() == []
    parts.office.held.set()
    outcomes = parts.outcomes(64)
    assert sorted(end_seq for end_seq, _ in outcomes) == list(range(64))
    assert all(parts.woken.acquire(timeout=PATIENCE) for _ in range(64))


def test_the_end_waits_for_no_try(parts: Parts) -> None:
    """On close, running and queued posts are cancelled, and no outcome is reported for them."""
    parts.sender.post(posting(1))
    until(lambda: len(parts.office.posts) == 1, "one is under way")
    parts.sender.close()
    assert parts.office.cancelled == 1 and parts.sender.take() == []
    assert not [thread for thread in threading.enumerate() if thread.name == "notices"]
    parts.sender.close()


def test_the_end_waits_for_no_resolver() -> None:
    """A hanging look-up has its own thread, for which the process does not wait."""
    over, asked = threading.Event(), threading.Event()

    def resolve(host: str, port: int) -> list[IpAddress]:
        asked.set()
        assert over.wait(PATIENCE)
        return []

    rules = PostingRules(Allowed.of(["http://hooks.example"], []), None)
    before = set(threading.enumerate())  # look-ups of other tests may end in the meantime
    with NoticeSender(lambda: rules, lambda: None, lambda: Poster(names=Names(resolve))) as sender:
        sender.post(Posting(1, "id", "http://hooks.example/", b""))
        assert asked.wait(PATIENCE)
    (hanging,) = set(threading.enumerate()) - before
    assert hanging.name.startswith("notices-name")
    assert hanging.daemon
    over.set()
    hanging.join(PATIENCE)


HANGS = """
import threading
from mlxpool.broker.notices.sender import NoticeSender, Posting, PostingRules
from mlxpool.broker.notices.posting import Names
from mlxpool.broker.notices.posting import Poster
from mlxpool.common.web_targets import Allowed

asked = threading.Event()
def resolve(host, port):
    asked.set()
    threading.Event().wait()

rules = PostingRules(Allowed.of(["http://hooks.example"], []), None)
with NoticeSender(lambda: rules, lambda: None, lambda: Poster(names=Names(resolve))) as sender:
    sender.post(Posting(1, "id", "http://hooks.example/", b""))
    asked.wait()
"""


def test_a_process_ends_while_a_resolver_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_secret_signs_and_can_be_changed(parts: Parts, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("whsec_" + "A" * 32)
    parts.office.held.set()
    parts.sender.post(posting(1))
    parts.outcomes(1)
    parts.rules = replace(parts.rules, secret=file)
    parts.sender.post(posting(2))
    parts.outcomes(1)
    plain, signed = (sent for _, _, sent in parts.office.posts)
    assert plain == {"webhook-id": "id-1"}
    wanted = headers([bytes(24)], "id-2", int(signed["webhook-timestamp"]), b"body")
    assert signed == wanted


def test_a_secret_that_cannot_be_read_is_a_failed_try(parts: Parts, tmp_path: Path) -> None:
    parts.rules = replace(parts.rules, secret=tmp_path / "none")
    parts.sender.post(posting(1))
    ((_, outcome),) = parts.outcomes(1)
    assert not outcome.delivered and "cannot read" in outcome.why and not parts.office.posts


def test_a_bug_is_a_failed_try_and_ends_no_thread(parts: Parts) -> None:
    parts.office.held.set()
    parts.office.fails = True
    for number in range(4):
        parts.sender.post(posting(number))
    assert all("a bug" in outcome.why for _, outcome in parts.outcomes(4))


def test_a_secret_that_is_changed_signs_the_next_try(parts: Parts, tmp_path: Path) -> None:
    """The file is read for each post: a refused notice can be signed with a new secret."""
    file = tmp_path / "secret"
    file.touch(0o600)
    parts.rules = replace(parts.rules, secret=file)
    parts.office.held.set()
    keys = [bytes([number]) * 24 for number in range(2)]
    for key in keys:
        file.write_text("whsec_" + base64.b64encode(key).decode())
        parts.sender.post(posting(1))
        parts.outcomes(1)
    for key, (_, body, sent) in zip(keys, parts.office.posts, strict=True):
        assert sent == headers([key], "id-1", int(sent["webhook-timestamp"]), body)


def test_nothing_is_started_without_a_notice() -> None:
    before = set(threading.enumerate())
    with NoticeSender(lambda: PostingRules(Allowed(), None), lambda: None):
        assert set(threading.enumerate()) <= before  # threads of other tests may end in between


# ---- signing -------------------------------------------------------------------------------------
# Signatures of notices: an example of Standard Webhooks, several secrets, the file of secrets.


SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "notify.secret"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_the_example_of_standard_webhooks(tmp_path: Path) -> None:
    secrets = read_secrets(secret_file(tmp_path, SECRET + "\n"))
    signed = headers(secrets, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_each_secret_signs(tmp_path: Path) -> None:
    other = "whsec_" + "A" * 32
    secrets = read_secrets(secret_file(tmp_path, f"{SECRET}\n{other}\n"))
    both = headers(secrets, "id", 1, b"body")["webhook-signature"].split(" ")
    assert both == [headers([secret], "id", 1, b"body")["webhook-signature"] for secret in secrets]


@pytest.mark.parametrize(
    "text", ["", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_c2hvcnQ=", "whsec_!", f"{SECRET}\n" * 5]
)
def test_what_is_no_secret_is_refused_and_not_told(tmp_path: Path, text: str) -> None:
    file = secret_file(tmp_path, text)
    with pytest.raises(ConfigError, match=r"job_notify_secret.*notify\.secret") as error:
        read_secrets(file)
    assert "MfKQ" not in str(error.value)


def test_a_file_that_others_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secrets(secret_file(tmp_path, SECRET, 0o640))
    with pytest.raises(ConfigError, match="cannot read"):
        read_secrets(tmp_path / "none")
