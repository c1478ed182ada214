"""Real pools: operators' actions on jobs, the feed of ended jobs, notices, a stalled disk."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest, Damaged
from support.counting_checker import expected_ids, text_of
from support.disk_shim import ShimmedDisk
from support.pool import PATIENCE, Pool, until
from support.secret_file import secret_file
from support.web_receiver import OK, receiver

CONFIG = """\
[pool]
restart_delay = 0.05
{pool}
[models.m]
path = "builtin:counting"
[models.m.counting]
step_us = 2000
[models.bad]
path = "builtin:counting"
[models.bad.counting]
fault = "segfault"
"""


def make_pool(folder: Path, pool: str = "", **options: object) -> Pool:
    state = str(folder / "jobs")
    return Pool(
        folder,
        CONFIG.format(pool=pool),
        arguments=("--state-dir", state),
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with make_pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


def done_job(client: Client, key: str, count: int = 5) -> bytes:
    """Returns the id of a job that is done."""
    job = client.submit("m", key, key=key, max_tokens=count, seed=7)
    client.fetch(job).read()
    until(lambda: client.job(key)["state"] == "done", "it is done")
    return job.id


# ---- operators -----------------------------------------------------------------------------------


def test_operators_list_the_jobs_of_all_owners(pool: Pool) -> None:
    with pool.client() as client:
        id = done_job(client, "listed")
    rows = pool.cli_json("jobs", "--all-owners")["jobs"]
    (row,) = [row for row in rows if row["key"] == "listed"]
    assert row["job"] == id.hex() and row["owner"].startswith("uid:") and row["state"] == "done"
    owner = row["owner"]
    for flags, expected in (
        (("--owner", owner, "--model", "m", "--state", "done"), True),
        (("--owner", "uid:nobody"), False),
        (("--model", "bad"), False),
        (("--of-batch", "00" * 16), False),
    ):
        shown = pool.cli("jobs", *flags)
        assert shown.returncode == 0 and ("listed" in shown.stdout) is expected, flags
    assert "listed" in pool.cli("jobs", "--all-owners").stdout
    for mixed in (("--files",), ("--after", "0"), ("--follow",), ("--batch", "b")):
        refused = pool.cli("jobs", "--all-owners", *mixed)
        assert refused.returncode == 2 and f"{mixed[0]} is about your own jobs" in refused.stderr
        refused = pool.cli("jobs", "listed", *mixed)
        assert refused.returncode == 2 and f"{mixed[0]} lists jobs" in refused.stderr


def test_operators_list_the_batches_of_all_owners(pool: Pool) -> None:
    with pool.client() as client:
        batch = client.submit_batch([{"prompt": "a"}], "m", key="theirs", max_tokens=3)
        for _ in batch.progress():
            pass
    rows = pool.cli_json("jobs", "--batches", "--all-owners")["batches"]
    (row,) = [row for row in rows if row["key"] == "theirs"]
    assert row["batch"] == batch.row["batch"].hex() and row["owner"].startswith("uid:")
    assert (row["state"], row["done"], row["tenant"]) == ("done", 1, "")
    for flags, expected in ((("--owner", row["owner"]), True), (("--owner", "uid:nobody"), False)):
        shown = pool.cli("jobs", "--batches", *flags)
        assert shown.returncode == 0 and ("theirs" in shown.stdout) is expected, flags
    shown = pool.cli("jobs", "--of-batch", row["batch"], "--json")
    assert [job["line"] for job in json.loads(shown.stdout)["jobs"]] == [0]
    for mixed in (("--model", "m"), ("--of-batch", "00" * 16), ("--show", "00" * 16)):
        refused = pool.cli("jobs", "--batches", "--all-owners", *mixed)
        assert refused.returncode == 2 and f"{mixed[0]} is about jobs" in refused.stderr
    for listed in ("--batches", "--files"):
        for of_jobs in (("--state", "done"), ("--after", "0"), ("--follow",)):
            refused = pool.cli("jobs", listed, *of_jobs)
            assert refused.returncode == 2 and f"without {listed}" in refused.stderr


def test_a_dead_job_has_its_causes_and_the_stacks_of_its_workers(pool: Pool) -> None:
    with pool.client() as client:
        job = client.submit("bad", "poison", key="poison", max_tokens=5)
        until(lambda: client.job("poison")["state"] == "dead", "it is dead")
        row = client.job("poison")
        assert "ended two workers" in row["cause"]
        assert [set(failure) for failure in row["failures"]] == [{"at", "cause"}] * 3
        assert "poison" in [row["key"] for row in client.jobs(state="dead")]
    own = pool.cli("jobs", "poison")
    assert own.returncode == 0, own.stderr
    assert "state:       dead" in own.stdout and own.stdout.count("failure ") == 3
    assert "in a row that failed" in own.stdout
    assert "Fatal Python error" not in own.stdout, "stacks are for operators"
    details = pool.cli_json("jobs", "poison")
    assert details["job"] == job.id.hex() and len(details["failures"]) == 3
    for flags, text in (
        (("--state", "dead"), "--state lists jobs"),
        (("--show", "00" * 16), "--show"),
    ):
        refused = pool.cli("jobs", "poison", *flags)
        assert refused.returncode == 2 and text in refused.stderr
    shown = pool.cli("jobs", "--show", job.id.hex())
    assert shown.returncode == 0, shown.stderr
    assert "killed by SIGSEGV" in shown.stdout and "ended two workers" in shown.stdout
    assert "Fatal Python error: Segmentation fault" in shown.stdout
    assert "counting_engine.py" in shown.stdout or "faults.py" in shown.stdout
    details = pool.cli_json("jobs", "--show", job.id.hex())
    assert details["state"] == "dead" and details["charge"] >= 1
    assert [bool(failure["stacks"]) for failure in details["failures"]] == [True, True, False]
    with pool.client() as client:
        assert client.retry("poison")["state"] in ("waiting", "running")
        until(lambda: client.job("poison")["state"] == "dead", "it is dead again")


def test_operators_look_at_a_job_and_change_it(pool: Pool) -> None:
    with pool.client() as client:
        job = client.submit("m", "long", key="long", max_tokens=100_000, seed=7)
        first = list(islice(client.fetch(job), 3))
        assert first
    shown = pool.ask("job", job=job.id)
    assert shown["state"] == "running" and shown["text_from"] == 0
    assert shown["text"].startswith(text_of(expected_ids("long", 7, 3)))
    assert pool.ask("cancel_job", job=job.id)["state"] == "running"
    assert pool.ask("job", job=job.id)["state"] == "cancelled"
    read = pool.cli("fetch", "long")
    assert read.returncode == 1 and "the job 'long' was cancelled" in read.stderr
    for id in ("long", "abc"):  # a job's key instead of a request's id
        refused = pool.cli("cancel", id)
        assert refused.returncode == 2 and "--job KEY" in refused.stderr
    with pytest.raises(BadRequest, match="only dead and expired jobs"):
        pool.ask("retry", job=job.id)
    assert pool.ask("release", owner=shown["owner"], key="long")["state"] == "gone"
    assert pool.cli("jobs", "--show", "xyz").returncode == 2
    unknown = pool.cli("jobs", "--show", "00" * 16)
    assert unknown.returncode == 1 and "unknown_job" in unknown.stderr


def test_jobs_are_exported_whole(pool: Pool, tmp_path: Path) -> None:
    with pool.client() as client:
        id = done_job(client, "exported", 300).hex()
    file = tmp_path / "jobs.jsonl"
    written = pool.cli("jobs", "--export", str(file))
    assert written.returncode == 0, written.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["mlxpool_jobs"] == 1 and file.stat().st_mode & 0o777 == 0o600
    heads = [line["job"] for line in lines if "job" in line]
    assert lines[-1] == {"end": {"jobs": len(heads), "lines": len(lines) - 1}}
    (head,) = [job for job in heads if job["key"] == "exported"]
    assert (head["job"], head["state"], head["seed"]) == (id, "done", 7)
    assert head["request"]["prompt"] == "exported" and head["end"]["reason"] == "length"
    output = [line["output"] for line in lines if line.get("output", {}).get("job") == id]
    ids = [token for part in output for token in part["ids"]]
    assert ids == expected_ids("exported", 7, 300)
    assert "".join(part["text"] for part in output) == text_of(ids)
    assert [part["from"] for part in output] == sorted(part["from"] for part in output)
    shown = pool.cli("jobs", "--export", "-", "--state", "done")
    assert json.loads(shown.stdout.splitlines()[-1])["end"]["jobs"] <= len(heads)
    refused = pool.cli("jobs", "--export", str(tmp_path / "none" / "file"))
    assert refused.returncode == 2 and "cannot write" in refused.stderr
    assert pool.cli("jobs", "--verify").stdout.endswith("0 damaged\n")


def test_a_bit_that_the_disk_changes_is_told(tmp_path: Path) -> None:
    with make_pool(tmp_path) as pool:
        with pool.client() as client:
            done_job(client, "whole", 3)
            id = done_job(client, "broken", 300)
        pool.stop()
        file = tmp_path / "jobs" / "jobs-1.db"
        text = text_of(expected_ids("broken", 7, 300)).encode()
        data = file.read_bytes()
        # A boundary of chunks or pages can be anywhere in the text, so several parts are tried.
        parts = (text[at : at + 24] for at in range(200, 1200, 8))
        part = next(part for part in parts if part in data)
        file.write_bytes(data.replace(part, bytes([part[0] ^ 1]) + part[1:]))
        pool.start()
        with pool.client() as client:
            assert list(client.fetch("whole").read().ids) == expected_ids("whole", 7, 3)
            with pytest.raises(Damaged, match="'broken'"):
                client.fetch("broken").read()
        verified = pool.cli("jobs", "--verify")
        assert verified.returncode == 1 and "2 jobs" in verified.stdout
        assert f"'broken' ({id.hex()}): ids from" in verified.stdout


# ---- the feed ------------------------------------------------------------------------------------


def ended_in_all(client: Client, count: int) -> bool:
    return len(client.jobs(after=0)) == count


def test_a_reader_of_the_feed_misses_nothing_over_restarts(tmp_path: Path) -> None:
    with make_pool(tmp_path) as pool:
        seen: list[tuple[int, str]] = []
        for round in range(3):
            with pool.client() as client:
                for number in range(4):
                    key = f"{round}-{number}"
                    client.submit("m", key, key=key, max_tokens=5, seed=7)
                until(partial(ended_in_all, client, 4 * (round + 1)), "all have ended")
                if round == 1:
                    client.release("1-2")  # the end of a released job is reported, too
                last = seen[-1][0] if seen else 0
                # Reads only some of the rows.
                rows = list(islice(client.follow_jobs(last, interval=0.01), 3))
                seen += [(row["end_seq"], row["key"]) for row in rows]
            pool.kill()
            pool.start()
        with pool.client() as client:
            rows = client.jobs(after=seen[-1][0])
            seen += [(row["end_seq"], row["key"]) for row in rows]
        numbers = [number for number, _ in seen]
        assert numbers == sorted(set(numbers))
        assert sorted(key for _, key in seen) == sorted(
            f"{round}-{number}" for round in range(3) for number in range(4)
        )


def test_the_command_line_follows_ends(pool: Pool) -> None:
    with pool.client() as client:
        done_job(client, "before")
        last = client.jobs(after=0)[-1]["end_seq"]
        follower = subprocess.Popen(
            [*pool.command(), "jobs", "--follow", "--after", str(last)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with follower:
            done_job(client, "followed")
            assert follower.stdout is not None
            line = follower.stdout.readline().split()
            assert line[1:4] == ["followed", "done", "5"] and int(line[0]) > last
            follower.terminate()


# ---- notices -------------------------------------------------------------------------------------

SECRET = base64.b64encode(bytes(range(32))).decode()


def test_a_notice_is_signed_and_outlives_the_broker(tmp_path: Path) -> None:
    secret = secret_file(tmp_path / "secret", f"whsec_{SECRET}\n")
    well = threading.Event()

    def serve(connection: socket.socket, request: bytes) -> None:
        connection.sendall(OK if well.is_set() else b"HTTP/1.1 503 Later\r\n\r\n")

    with receiver(serve) as (port, requests):
        url = f"http://127.0.0.1:{port}"
        settings = f'job_notify_hosts = ["{url}"]\njob_notify_secret = "{secret}"'
        with make_pool(tmp_path, settings) as pool:
            with pool.client() as client:
                job = client.submit("m", "told", key="told", max_tokens=5, notify=f"{url}/ends?a=1")
                with pytest.raises(BadRequest, match="job_notify_hosts"):
                    client.submit("m", "x", notify="http://127.0.0.1:1/")
                with pytest.raises(BadRequest, match="four decimal numbers"):
                    client.submit("m", "x", notify="http://0x7f000001/")

            def refused_once() -> dict[str, Any] | None:
                notices = pool.ask("notices")["notices"]
                return notices[0] if notices and notices[0]["tries"] else None

            waiting = until(refused_once, "it was refused")
            assert waiting["cause"] == "HTTP 503" and waiting["given_up"] is None
            assert "told" in pool.cli("jobs", "--notices").stdout
            pool.kill()
            well.set()
            pool.start()
            until(lambda: not pool.ask("notices")["notices"], "it is delivered")
            with pool.client() as client:
                assert client.job("told")["job"] == job.id
    assert len(requests) >= 2  # on a busy machine, the notice is refused more than once
    for request in requests:
        head, _, body = request.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        signed = f"{fields['webhook-id']}.{fields['webhook-timestamp']}.".encode() + body
        digest = hmac.new(base64.b64decode(SECRET), signed, hashlib.sha256).digest()
        assert fields["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
        assert abs(time.time() - int(fields["webhook-timestamp"])) < 600
        notice = json.loads(body)
        assert notice["data"]["key"] == "told" and notice["data"]["state"] == "done"
    assert head.startswith(b"POST /ends?a=1 ")


def test_a_wrong_secret_is_told_at_the_start(tmp_path: Path) -> None:
    secret = secret_file(tmp_path / "secret", "whsec_short\n")
    pool = make_pool(tmp_path, f'job_notify_secret = "{secret}"')
    try:
        started = pool.cli(
            "serve", "--config", str(pool.config), "--state-dir", str(tmp_path / "jobs")
        )
        assert started.returncode == 2 and "job_notify_secret" in started.stderr + pool.log()
    finally:
        pool.close()


# ---- a disk that stalls --------------------------------------------------------------------------


def test_streams_go_on_while_the_disk_of_jobs_stalls(tmp_path: Path) -> None:
    """The disk of the job store blocks until the test frees it; streams begin and end meanwhile."""
    root = tmp_path / "disk"
    with ShimmedDisk(root) as disk:
        state = str(root / "jobs")
        pool = Pool(
            tmp_path,
            CONFIG.format(pool=""),
            arguments=("--state-dir", state),
            environment=disk.environment,
        )
        with pool, pool.client() as client, pool.client() as other:
            done_job(client, "before")
            disk.stall(True)
            accepted = threading.Event()

            def submit() -> None:
                other.submit("m", "held", key="held", max_tokens=5, seed=7)
                accepted.set()

            submitting = threading.Thread(target=submit)
            submitting.start()
            disk.until_stalled()
            for number in range(3):
                prompt = f"stream {number}"
                result = client.generate("m", prompt, max_tokens=200, seed=7)
                assert list(result.ids) == expected_ids(prompt, 7, 200)
            assert not accepted.is_set()  # nothing is reported before it is on the disk
            disk.stall(False)
            submitting.join(PATIENCE)
            assert accepted.is_set()
            assert list(client.fetch("held").read().ids) == expected_ids("held", 7, 5)
