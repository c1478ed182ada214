"""The Node client gets the right tokens after every kind of loss."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.counting_checker import expected_ids, text_of
from support.doc_blocks import blocks
from support.pool import PATIENCE, Pool, until
from support.resume_scenario import output_over_every_loss

EXAMPLE = Path(__file__).parents[2] / "examples" / "node_client"
CONFIG = """
[models.slow]
path = "builtin:counting"
counting.step_us = 5000

[models.failing]
path = "builtin:counting"
counting = { fault = "raise", fault_at = 3 }
"""

if not shutil.which("node"):
    pytest.skip("nodejs is not installed", allow_module_level=True)
if not shutil.which("npm"):
    pytest.skip("npm is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the command that runs a copy of the client, whose packages are installed."""
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        pytest.skip(f"the packages of node_client are not installed: {done.stderr[-500:]}")
    return ["node", str(folder / "main.mjs")]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), CONFIG) as running:
        yield running


def complete(main: list[str], pool: Pool, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*main, str(pool.run_dir), *arguments], capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.parametrize("count", [1, 40, 1500])
def test_it_prints_the_completion(main: list[str], pool: Pool, count: int) -> None:
    """1,500 tokens exceed the flow-control window, so the client must send acks."""
    done = complete(main, pool, "counting", "hello", "--max-tokens", str(count), "--seed", "7")
    expected = text_of(expected_ids("hello", 7, count)) + "\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_it_prints_the_reason_of_a_failure(main: list[str], pool: Pool) -> None:
    unknown = complete(main, pool, "nobody", "hello")
    assert unknown.returncode == 1 and "unknown_model: " in unknown.stderr
    midway = complete(main, pool, "failing", "hello", "--max-tokens", "9", "--seed", "7")
    assert midway.returncode == 1 and "internal: " in midway.stderr
    assert midway.stdout == text_of(expected_ids("hello", 7, 3))
    wrong = complete(main, pool, "counting", "hello", "--max-tokens", "x")
    assert wrong.returncode == 1 and "bad_request: " in wrong.stderr


def test_a_killed_worker_does_not_change_the_completion(main: list[str], pool: Pool) -> None:
    command = [*main, str(pool.run_dir), "slow", "hello", "--max-tokens", "300", "--seed", "7"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    try:
        assert process.stdout is not None
        begun = process.stdout.read(20)
        pool.kill_worker("slow/0")
        rest, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert (begun + rest).decode() == text_of(expected_ids("hello", 7, 300)) + "\n"


def test_ctrl_c_ends_it_and_the_stream(main: list[str], pool: Pool) -> None:
    command = [*main, str(pool.run_dir), "slow", "hello", "--max-tokens", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.read(5)
        process.send_signal(2)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1 and b"broker_lost: the client was closed" in said
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "its stream is cancelled")


def test_it_gives_up_without_a_broker(main: list[str], tmp_path: Path) -> None:
    """The client gives up after 5 s; its limit of 60 s is for a broker that answered before."""
    done = subprocess.run(
        [*main, str(tmp_path), "m", "x"], capture_output=True, text=True, timeout=PATIENCE / 2
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert f"broker_lost: no broker answers at ipc://{tmp_path}/front.ipc for 5 s" in done.stderr
    assert "mlxpool serve" in done.stderr


def test_it_resumes_after_every_kind_of_loss(main: list[str]) -> None:
    assert output_over_every_loss(main) == "xxxxxx\n"


def test_the_program_of_the_docs_page(main: list[str], pool: Pool) -> None:
    """The program of docs/examples.md runs against this pool."""
    pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)
    page = (EXAMPLE.parents[1] / "docs" / "examples.md").read_text("utf-8")
    [program] = (block.text for block in blocks(page) if block.kind == "js")
    usual = "ipc:///run/user/1000/mlxpool/front.ipc"
    assert usual in program
    script = Path(main[1]).with_name("page.mjs")
    script.write_text(program.replace(usual, f"ipc://{pool.run_dir}/front.ipc"), "utf-8")
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "completion_tokens: 40" in done.stdout or "stop {" in done.stdout
