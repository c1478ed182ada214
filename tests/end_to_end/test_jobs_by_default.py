"""`mlxpool serve` stores jobs on disk even if no setting demands this.

If it cannot store jobs, it logs the reason, and serves streams without jobs.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpool.common.errors import JobsOff
from mlxpool.common.paths import default_state_dir
from support.pool import Pool, with_path

WITHOUT_HOME = """\
import os, pwd

def unknown(uid):
    raise KeyError(uid)

pwd.getpwuid = unknown
os.environ.pop("HOME", None)
"""


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets and returns the folder for the user's state (XDG_STATE_HOME)."""
    folder = tmp_path / "states"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


def serving(tmp_path: Path, *arguments: str, config: str = "") -> Pool:
    tmp_path.mkdir(exist_ok=True)
    return Pool(tmp_path, config, arguments=arguments, jobs_by_default=True)


@pytest.fixture
def blocked(tmp_path: Path, states: Path) -> Iterator[Pool]:
    """A pool that cannot use the user's state folder, because a file has the folder's path."""
    states.write_text("")
    with serving(tmp_path, "--metrics", "127.0.0.1:0") as pool:
        yield pool


def test_submit_after_serve_needs_no_setting(tmp_path: Path, states: Path) -> None:
    pool = serving(tmp_path)
    with pool:
        assert (
            pool.cli("submit", "counting", "x", "--key", "k", "--max-tokens", "5").stdout == "k\n"
        )
        assert pool.cli("fetch", "k").returncode == 0
        folder = default_state_dir(pool.run_dir)
        assert f"jobs={folder}" in pool.log()
        assert folder.is_relative_to(states) and (folder / "jobs-1.db").exists()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert pool.ask("ps")["jobs"]["store"] == "ok"
        pool.stop()
        pool.start()
        assert pool.cli_json("jobs", "k")["state"] == "done", "the next broker has it"


def test_a_pool_that_nobody_gives_jobs_writes_next_to_nothing(tmp_path: Path, states: Path) -> None:
    for _ in range(2):
        with serving(tmp_path) as pool, pool.client() as client:
            assert client.generate("counting", "x", max_tokens=1).ids
    assert sum(file.stat().st_size for file in states.rglob("*")) < 2**21


def test_two_pools_of_a_user_keep_their_jobs_apart(tmp_path: Path, states: Path) -> None:
    with serving(tmp_path / "one") as first, serving(tmp_path / "two") as second:
        for pool in (first, second):
            with pool.client() as client:
                client.submit("counting", "x", key="same", max_tokens=len(pool.tmp_path.name))
                assert client.fetch("same").read().ids
    assert len(list(states.rglob("jobs-1.db"))) == 2


def test_an_empty_state_dir_turns_jobs_off(tmp_path: Path, states: Path) -> None:
    config = '[pool]\nstate_dir = ""\n'
    with serving(tmp_path, config=config) as pool, pool.client() as client:
        with pytest.raises(JobsOff, match=r'its state_dir is "".*--state-dir'):
            client.submit("counting", "x")
        assert "jobs" not in pool.ask("ps")
        assert client.generate("counting", "x", max_tokens=1).ids
    assert not states.exists()


def test_a_folder_that_cannot_be_written_is_told_and_streams_go_on(blocked: Pool) -> None:
    why = "the folder of the store of jobs cannot be made"
    assert "level=warning" in blocked.log() and "no jobs are kept, streams go on" in blocked.log()
    assert why in blocked.log()
    with blocked.client() as client:
        with pytest.raises(JobsOff, match=f"keeps no jobs: {why}.*set state_dir"):
            client.submit("counting", "x")
        assert client.generate("counting", "x", max_tokens=3).ids
    jobs = blocked.ask("ps")["jobs"]
    assert jobs["store"] == "unusable" and why in jobs["why"]
    assert f"no jobs are kept: {why}" in " ".join(blocked.cli("ps").stdout.split())
    assert why in blocked.cli("submit", "counting", "x").stderr
    assert why in blocked.cli("jobs", "--all-owners").stderr
    url = blocked.ask("ps")["broker"]["metrics"].rstrip("/")
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        metrics = answer.read().decode()
    assert "\nmlxpool_job_store_up 0" in metrics, "an alert is made of it"
    assert "\nmlxpool_job_store_room_bytes" not in metrics, "and one is enough"
    with urllib.request.urlopen(f"{url}/readyz") as answer:
        assert answer.status == 200


def test_a_folder_that_is_named_and_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    named = str(tmp_path / "file" / "jobs")
    with serving(tmp_path, "--state-dir", named) as pool, pool.client() as client:
        assert named in pool.ask("ps")["jobs"]["why"]
        assert client.generate("counting", "x", max_tokens=1).ids


def test_a_damaged_store_of_the_default_folder_ends_no_stream(tmp_path: Path, states: Path) -> None:
    pool = serving(tmp_path)
    folder = default_state_dir(pool.run_dir)
    folder.mkdir(parents=True)
    (folder / "jobs-1.db").write_bytes(b"this is no database" * 1000)
    with pool, pool.client() as client:
        assert "not a database" in pool.ask("ps")["jobs"]["why"]
        assert client.generate("counting", "x", max_tokens=1).ids
        assert pool.process is not None
        held = [os.readlink(f.path) for f in os.scandir(f"/proc/{pool.process.pid}/fd")]
        assert not [path for path in held if path.startswith(str(folder))], "it is let go"


def test_a_user_without_a_home_can_serve(tmp_path: Path, states: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_HOME)
    environment = {"PYTHONPATH": with_path(tmp_path), "XDG_STATE_HOME": str(states / "a")}
    states.mkdir()
    (states / "a").write_text("")
    pool = Pool(tmp_path, environment=environment, jobs_by_default=True)
    pool.environment.pop("XDG_CONFIG_HOME", None)
    with pool, pool.client() as client:
        assert pool.ask("ps")["jobs"]["store"] == "unusable"
        assert client.generate("counting", "x", max_tokens=1).ids
