"""Bad input gets a clear error and does not affect other streams."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from mlxpool.common.errors import BadRequest, Draining
from mlxpool.common.protocol import frames, token_ids
from mlxpool.common.protocol.frames import Header
from mlxpool.common.protocol.images import MAX_IMAGE
from support import kinds
from support.bystander import Bystander
from support.counting_checker import expected_ids
from support.pool import Pool, until
from support.raw_peer import RawPeer

CONFIG = """
[models.fast]
path = "builtin:counting"
counting.step_us = 0
[models.slow]
path = "builtin:counting"
counting.step_us = 20000
[models.other]
path = "builtin:counting"
"""


@pytest.fixture(scope="module")
def strict_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool that gives up a client after a second without an ack."""
    with Pool(tmp_path_factory.mktemp("strict"), '[pool]\nack_grace = "1s"\n' + CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def bystander(pool: Pool) -> Iterator[Bystander]:
    with Bystander(pool.client, "slow") as running:
        yield running


@pytest.fixture(autouse=True)
def a_stream_that_must_not_notice(bystander: Bystander) -> Iterator[None]:
    """A stream beside every test of this file; fails if it is affected."""
    yield
    bystander.check_ids(2)


def generate(**body: Any) -> list[bytes]:
    ident = os.urandom(16)
    whole = {"model": "counting", "prompt": "x", "options": {"max_tokens": 3}, **body}
    return frames.encode(Header(kinds.GENERATE, ident, 0, 1), whole)


# One bad value for each decoder; tests/common/protocol and broker/core/test_life.py test all.
GARBAGE: dict[str, tuple[list[bytes], str, str]] = {
    "no msgpack": ([b"\xc1\xc1"], "bad_request", "not msgpack"),
    "other version": ([msgpack.packb([2, "ping", None, 0, 0, 0])], "version_mismatch", "version 2"),
    "too many parts": ([b"a"] * (frames.MAX_PARTS + 1), "bad_request", str(frames.MAX_PARTS)),
    "huge header": ([b"\xda\xff\xff" + bytes(65535)], "too_large", "128"),
    "no id": (frames.encode(Header(kinds.GENERATE)), "bad_request", "needs an id"),
    "unknown kind": (frames.encode(Header("explode", bytes(16))), "bad_request", "explode"),
    "body too large": (
        [*frames.encode(Header(kinds.GENERATE, bytes(16))), bytes(300_000)],
        "too_large",
        str(frames.MAX_BODY),
    ),
    "blob too large": (
        [*frames.encode(Header(kinds.GENERATE, bytes(16)), {"a": 1}), bytes(MAX_IMAGE + 1)],
        "too_large",
        str(MAX_IMAGE),
    ),
    "unknown option": (generate(options={"temprature": 1}), "bad_request", "temprature"),
    "unknown model": (generate(model="no/such"), "unknown_model", "no/such"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_bad_input_gets_one_clear_error(pool: Pool, name: str) -> None:
    parts, code, words = GARBAGE[name]
    with RawPeer(pool.run_dir) as peer:
        peer.send(parts)
        answer = peer.receive()
        assert answer.kind == kinds.ERROR and answer.body["code"] == code, answer
        assert words in answer.body["message"]
        peer.say(Header(kinds.PING))
        assert peer.receive().kind == kinds.PONG, "the connection goes on"


def error_beside(peer: RawPeer, ident: bytes) -> frames.Message:
    """Returns an error that arrives while the stream `ident` runs; the stream must not be affected.

    The stream has the seed 1. It is cancelled afterwards.
    """
    error: frames.Message | None = None
    ids: list[int] = []
    behind = 0  # deltas that came after the error
    while behind < 3:
        message = peer.receive()
        assert message.kind != kinds.DONE, message
        if message.kind == kinds.ERROR:
            error = message
        elif message.kind == kinds.DELTA:
            assert (message.header.id, message.header.pos) == (ident, len(ids))
            ids += token_ids.unpack_ids(message.blobs[0])
            behind += error is not None
    assert error is not None and ids == expected_ids("x", 1, len(ids))
    peer.say(Header(kinds.CANCEL, ident))
    done = peer.receive_kind(kinds.DONE)
    assert done.header.id == ident and done.body["reason"] == "cancelled"
    return error


def read_ids(peer: RawPeer, least: int) -> None:
    """Waits until a stream has sent `least` ids; on a busy machine one message has several."""
    had = 0
    while had < least:
        had += len(token_ids.unpack_ids(peer.receive_kind(kinds.DELTA).blobs[0]))


def test_a_duplicate_id_ends_nothing(pool: Pool) -> None:
    ident = os.urandom(16)
    # The stream still runs when the second message comes: the id of an ended stream is free.
    body = {"model": "slow", "prompt": "x", "options": {"max_tokens": 2000, "seed": 1}}
    with RawPeer(pool.run_dir) as peer:
        peer.say(Header(kinds.GENERATE, ident, 0, 1), body)
        peer.say(Header(kinds.GENERATE, ident, 0, 1), {**body, "prompt": "other"})
        peer.receive_kind(kinds.ACCEPTED)
        error = error_beside(peer, ident)
        assert error.header.id is None and error.body["about"] == ident
        assert error.body["code"] == "duplicate_id"


def test_a_second_attempt_resumes_at_the_clients_position(pool: Pool) -> None:
    ident = os.urandom(16)
    body = {"model": "slow", "prompt": "x", "options": {"max_tokens": 20, "seed": 1}}
    right = expected_ids("x", 1, 20)
    with RawPeer(pool.run_dir) as peer:
        peer.say(Header(kinds.GENERATE, ident, 0, 1), body)
        read_ids(peer, 4)
        resume = {"count": 3, "facts": {}, "resumes": 1}
        peer.say(
            Header(kinds.GENERATE, ident, 0, 2),
            {**body, "resume": resume},
            token_ids.pack_ids(right[:3]),
        )
        ids = right[:3]
        while True:
            message = peer.receive()
            if message.header.attempt != 2:
                continue
            if message.kind == kinds.DELTA:
                assert message.header.pos == len(ids)
                ids += token_ids.unpack_ids(message.blobs[0])
            if message.kind == kinds.DONE:
                break
        assert ids == right


@pytest.mark.parametrize(
    ("resume", "ids", "words"),
    [
        ({"count": 2}, [1, 2], "ids of resume differ from the stream's first ids"),
        ({"count": 5000}, list(range(5000)), "resume has 5000 ids, max_tokens is 2000"),
        ({"count": 2}, [1], "resume.count is 2, its blob has 1 ids"),
        ({"count": 1, "facts": {"max_tokens": "many"}}, [1], "resume.facts.max_tokens"),
        ({"count": 1, "facts": {"digest": 7}}, [1], "resume.facts.digest must be text"),
        ({"count": 1, "facts": []}, [1], "resume.facts must be the map"),
        ({"count": -1}, [], "count must be an integer from 0"),
    ],
)
def test_a_resume_that_does_not_fit_the_stream(
    pool: Pool, resume: dict[str, object], ids: list[int], words: str
) -> None:
    """The resumed stream gets an error; streams of other clients are not affected."""
    ident = os.urandom(16)
    body = {"model": "slow", "prompt": "x", "options": {"max_tokens": 2000, "seed": 1}}
    with RawPeer(pool.run_dir) as peer:
        peer.say(Header(kinds.GENERATE, ident, 0, 1), body)
        read_ids(peer, 3)
        again = {**body, "resume": resume}
        peer.say(Header(kinds.GENERATE, ident, 0, 2), again, token_ids.pack_ids(ids))
        error = peer.receive_kind(kinds.ERROR)
        assert (error.header.id, error.header.attempt) == (ident, 2)
        assert error.body["code"] == "bad_request"
        assert words in error.body["message"]


@pytest.mark.parametrize(
    ("resume", "ids", "code", "words"),
    [
        ({"count": 1}, [2**31], "bad_request", "resume: token id 2147483648 is not below"),
        ({"count": 1, "facts": {"digest": "another"}}, [1], "model_unavailable", "digest another"),
        ({"count": 1, "facts": {"context": 10**9}}, [1], "model_unavailable", "context 1000000000"),
        ({"count": 1, "facts": {"prompt_tokens": 9}}, [1], "bad_request", "with prompt_tokens 9"),
        ({"count": 3, "facts": {"max_tokens": 2}}, [1, 2, 3], "bad_request", "max_tokens is 2"),
    ],
)
def test_a_resume_that_no_worker_can_take(
    pool: Pool, resume: dict[str, object], ids: list[int], code: str, words: str
) -> None:
    """After a broker's death a resume with wrong ids or `facts` gets an error."""
    body = {"model": "slow", "prompt": "x", "options": {"seed": 1}, "resume": resume}
    with RawPeer(pool.run_dir) as peer:
        peer.say(Header(kinds.GENERATE, os.urandom(16), 0, 2), body, token_ids.pack_ids(ids))
        error = peer.receive_kind(kinds.ERROR)
        assert error.body["code"] == code
        assert words in error.body["message"]


def test_a_second_drain_is_refused_and_a_load_ends_the_first(pool: Pool) -> None:
    with pool.client() as client:
        client.generate("other", "x", max_tokens=1)
    pool.ask("drain", model="other")
    with pytest.raises(BadRequest, match="drained already"):
        pool.ask("drain", model="other")
    with pool.client() as client, pytest.raises(Draining, match="mlxpool load other"):
        client.generate("other", "x", max_tokens=1)
    pool.ask("load", model="other")
    with pool.client() as client:
        assert len(client.generate("other", "x", max_tokens=2).ids) == 2


def test_a_client_that_never_acks_gets_slow_consumer(strict_pool: Pool) -> None:
    ident = os.urandom(16)
    with RawPeer(strict_pool.run_dir) as peer:
        peer.say(
            Header(kinds.GENERATE, ident, 0, 1),
            {"model": "fast", "prompt": "x", "window": 10, "options": {"max_tokens": 90_000}},
        )

        def ended() -> int:
            peer.say(Header(kinds.PING))  # the client is alive, but does not read
            return _failed(strict_pool, "slow_consumer")

        until(ended, "it is too slow")
        error = peer.receive_kind(kinds.ERROR)
        assert error.header.id == ident and error.body["code"] == "slow_consumer"
        strict_pool.in_state("fast/0", running=0)


def test_a_stream_continues_when_its_window_opens_again(pool: Pool) -> None:
    ident = os.urandom(16)
    right = expected_ids("x", 4, 300)
    with RawPeer(pool.run_dir) as peer:
        peer.say(
            Header(kinds.GENERATE, ident, 0, 1),
            {
                "model": "fast",
                "prompt": "x",
                "window": 16,
                "options": {"max_tokens": 300, "seed": 4},
            },
        )
        ids: list[int] = []
        while (message := peer.receive()).kind != kinds.DONE:
            if message.kind == kinds.DELTA:
                assert message.header.pos == len(ids)
                ids += token_ids.unpack_ids(message.blobs[0])
                peer.say(Header(kinds.ACK), {"have": [[ident, len(ids)]]})
        assert ids == right and message.header.pos == 300


def test_an_ack_beyond_the_sent_ids_is_an_error(pool: Pool) -> None:
    ident = os.urandom(16)
    with RawPeer(pool.run_dir) as peer:
        peer.say(
            Header(kinds.GENERATE, ident, 0, 1),
            {"model": "slow", "prompt": "x", "options": {"max_tokens": 2000, "seed": 1}},
        )
        # The stream still runs: an ended stream has no ids to acknowledge.
        peer.say(Header(kinds.ACK), {"have": [[ident, 10_000]]})
        error = error_beside(peer, ident)
        assert error.header.id is None and "10000" in error.body["message"]


def test_a_vanished_client_frees_the_worker(strict_pool: Pool) -> None:
    pool, ident = strict_pool, os.urandom(16)

    def ended() -> int:
        return int(pool.ask("stats")["requests"]["cancelled"]) + _failed(pool, "slow_consumer")

    before = ended()
    peer = RawPeer(pool.run_dir)
    peer.say(Header(kinds.GENERATE, ident, 0, 1), {"model": "fast", "prompt": "gone"})
    peer.receive_kind(kinds.DELTA)
    peer.close()
    until(lambda: ended() > before, "its stream is ended")
    pool.in_state("fast/0", running=0)


def test_a_client_cannot_reach_the_workers_socket(pool: Pool) -> None:
    with RawPeer(pool.run_dir, "back") as peer:
        peer.say(Header(kinds.HELLO), {"slot": "counting/0", "token": "guessed", "pid": 1})
        peer.say(Header(kinds.DELTAS, None, 1), {"rows": []})
        refused = peer.receive()
        assert refused.kind == kinds.STOP and refused.body["error"]["code"] == "unauthorized"
        assert peer.receive().kind == kinds.WHO
        assert peer.quiet(0.2)


def _failed(pool: Pool, code: str) -> int:
    return int(pool.ask("stats")["failures"].get(code, 0))


# ---- the machine ---------------------------------------------------------------------------------


def test_an_unusable_run_directory(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = pool.cli("--run-dir", str(file), "serve")
    assert done.returncode == 2 and "cannot use the run directory" in done.stderr
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    done = pool.cli("--run-dir", str(open_to_all), "serve")
    assert done.returncode == 2 and "chmod 700" in done.stderr


def test_an_unwritable_worker_log_fails_that_start_only(strict_pool: Pool) -> None:
    pool = strict_pool
    with pool.client() as client:
        client.generate("other", "x", max_tokens=1)
        pool.ask("unload", model="other")
        pool.in_state("other/0", state="none")
        log = pool.run_dir / "logs" / "other-0.log"
        log.unlink()
        log.mkdir()  # a folder cannot be opened for writing, not even by root
        with pytest.raises(Exception, match="cannot start the worker"):
            client.generate("other", "x", max_tokens=1)
        log.rmdir()
        pool.ask("load", model="other")
        assert len(client.generate("other", "x", max_tokens=2).ids) == 2


def test_a_full_log_does_not_stop_the_pool(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with Pool(tmp_path) as pool, pool.client() as client:
        (pool.run_dir / "logs" / "counting-0.log").symlink_to(full)
        assert len(client.generate("counting", "x", max_tokens=2).ids) == 2
