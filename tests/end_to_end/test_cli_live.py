"""Interactive output of the command line: `top`, `stats --watch`, `chat`, a model's load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.counting_checker import expected_ids, text_of
from support.pool import Pool, until
from support.terminal import Terminal

CONFIG = """
[models.slow]
path = "builtin:counting"
counting.step_us = 20000

[models.stuck]
path = "builtin:counting"
counting = { load_bytes = 100000000, fault = "lock", fault_in = "load", fault_at = 5 }

[models.broken]
path = "/nowhere/at/all"
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), CONFIG) as running:
        yield running


def on_terminal(pool: Pool, *arguments: str) -> Terminal:
    return Terminal([*pool.command(), *arguments], pool.environment)


# ---- top -----------------------------------------------------------------------------------------


def test_top_shows_sorts_and_quits(pool: Pool) -> None:
    with pool.client() as client, client.stream("slow", "x") as stream:
        deltas = iter(stream)
        next(deltas)
        with on_terminal(pool, "top") as top:
            top.until("slow/0")
            assert "RESTARTS" in top.shown and "1 live" in top.shown
            assert "sorted by model, rising" in top.shown
            top.send("t")
            top.until("sorted by rate, falling")
            top.send("r")
            top.until("sorted by rate, rising")
            top.send("s")
            top.until("sorted by ttft, falling")
            top.send("q")
            assert top.ended() == 0
            assert top.raw.endswith("\x1b[?25h\x1b[?1049l")


def test_top_leaves_the_terminal_as_it_was_at_ctrl_c(pool: Pool) -> None:
    with on_terminal(pool, "top", "--sort", "memory") as top:
        top.until("sorted by memory")
        top.send("\x03")
        assert top.ended() == 130
        assert "\x1b[?25h\x1b[?1049l" in top.raw


def test_top_without_rich_shows_the_same(pool: Pool) -> None:
    pool.cli("load", "counting", "--wait")
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from importlib import util; find = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name == 'rich' else find(name, *a)\n"
        "from mlxpool.cli.main import main; sys.exit(main())"
    )
    command = [pool.command()[0], "-c", code, "--run-dir", str(pool.run_dir), "top"]
    with Terminal(command, pool.environment) as top:
        top.until("counting/0")
        assert "MODEL" in top.shown
        top.send("q")
        assert top.ended() == 0


def test_top_into_a_pipe_is_plain_text(pool: Pool) -> None:
    pool.cli("load", "counting", "--wait")
    done = pool.cli("top", "--count", "1")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert "counting/0" in done.stdout and "quit" not in done.stdout


def test_top_reports_an_absent_broker(pool: Pool) -> None:
    done = pool.cli("--run-dir", str(pool.tmp_path), "top", "--count", "1")
    assert done.returncode == 3
    assert str(pool.tmp_path) in done.stderr and "mlxpool serve" in done.stderr


def test_stats_watch(pool: Pool) -> None:
    done = pool.cli("stats", "--watch", "--count", "2", "--json")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["broker"]["uptime_s"] < second["broker"]["uptime_s"]
    assert set(first) == set(pool.cli_json("stats"))
    assert pool.cli("stats", "--watch", "--count", "1").stdout.count("requests.accepted") == 1


def test_stats_watch_reports_a_dead_broker(tmp_path: Path) -> None:
    with (
        Pool(tmp_path) as other,
        on_terminal(other, "stats", "--watch") as watching,
    ):
        watching.until("broker.pid")
        other.kill()
        assert watching.ended() == 3
        assert "no broker answers at ipc://" in watching.shown


# ---- a load --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [("run", "stuck", "hello"), ("load", "stuck", "--wait"), ("chat", "stuck")]
)
def test_commands_that_wait_for_a_load_show_its_progress(
    pool: Pool, command: tuple[str, ...]
) -> None:
    with on_terminal(pool, *command) as waiting:
        if command[0] == "chat":
            waiting.until(">>> ")
            waiting.send("hello\n")
        at = waiting.until("loading stuck: 50 %, ")
        waiting.send("\x03")
        if command[0] == "chat":
            waiting.until(">>> ", after=waiting.until("(cancelled)", after=at))
            waiting.send("\x04")
        assert waiting.ended() == (0 if command[0] == "chat" else 130)
    assert waiting.raw.count("\r\x1b[K") > waiting.raw.count("stuck: ")  # the line is erased


def test_without_a_terminal_no_progress_is_shown(pool: Pool) -> None:
    done = pool.cli("load", "counting", "--wait")
    assert (done.returncode, done.stdout, done.stderr) == (0, "counting: loaded\n", "")


def test_load_reports_why_a_model_fails(pool: Pool) -> None:
    done = pool.cli("load", "broken", "--wait")
    assert done.returncode == 1
    assert "/nowhere/at/all" in done.stderr


# ---- chat ----------------------------------------------------------------------------------------


def said(*lines: tuple[str, str]) -> str:
    """The prompt that the counting model makes of a conversation."""
    return "".join(f"{role}: {text}\n" for role, text in lines)


def test_a_chat_remembers(pool: Pool) -> None:
    done = pool.cli(
        "chat", "counting", "--seed", "7", "--max-tokens", "2", "--system", "be brief", "--json",
        stdin="one\ntwo\n",
    )  # fmt: skip
    first, second = map(json.loads, done.stdout.splitlines())
    begin = ("system", "be brief"), ("user", "one")
    assert first["content"] == text_of(expected_ids(said(*begin), 7, 2))
    rest = ("assistant", first["content"]), ("user", "two")
    assert second["content"] == text_of(expected_ids(said(*begin, *rest), 7, 2))


def test_ctrl_c_ends_the_answer_but_not_the_chat(pool: Pool) -> None:
    with on_terminal(pool, "chat", "slow", "--seed", "7") as chat:
        chat.until(">>> ")
        chat.send("hello\n")
        begun = chat.until("hello")
        begun = chat.until(" ", after=begun + 2)  # its first token is shown
        chat.send("\x03")
        at = chat.until("(cancelled)", after=begun)
        at = chat.until(">>> ", after=at)
        at = chat.interrupt("Ctrl-D", after=at)
        at = chat.until(">>> ", after=at)
        chat.send("/clear\n")
        at = chat.until("forgotten", after=at)
        chat.until(">>> ", after=at)
        chat.send("\x04")
        assert chat.ended() == 0
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "the stream is cancelled")


def test_an_error_ends_the_answer_but_not_the_chat(pool: Pool) -> None:
    done = pool.cli("chat", "nobody", stdin="one\n/help\n/nonsense\n/quit\nnever\n")
    assert done.returncode == 1
    assert done.stderr.count("unknown_model") == 1
    assert "/clear" in done.stderr and "unknown command /nonsense" in done.stderr
