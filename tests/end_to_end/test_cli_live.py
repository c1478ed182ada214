"""Interactive output of the command line: `top`, `stats --watch`, `chat`, a model's load."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path

import pytest

from support.counting_checker import expected_ids, text_of
from support.pool import Pool, until
from support.terminal import COLUMNS, LINES, Terminal

CONFIG = """
[models.slow]
path = "builtin:counting"
counting.step_us = 20000

[models.stuck]
path = "builtin:counting"
counting = { load_bytes = 100000000, fault = "lock", fault_in = "load", fault_at = 5 }

[models."org/a-model-with-a-long-name-4bit"]
path = "builtin:counting"
counting.step_us = 20000

[models.broken]
path = "/nowhere/at/all"
"""


def on_terminal(
    pool: Pool, *arguments: str, columns: int = COLUMNS, lines: int = LINES
) -> Terminal:
    command = [*pool.command(), *arguments]
    return Terminal(command, pool.environment, columns=columns, lines=lines)


# ---- tables --------------------------------------------------------------------------------------

LONG = "org/a-model-with-a-long-name-4bit"


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("ps",), ("SLOT", "STATE", "MEMORY")),
        (("models",), ("NAME", "STATE", "SIZE")),
        (("requests",), ("ID", "MODEL", "STATE")),
        (("top", "--count", "1"), ("SLOT", "STATE", "TOK/S")),
    ],
    ids=lambda words: words[0],
)
def test_tables_fit_the_terminal(
    pool: Pool, command: tuple[str, ...], shown: tuple[str, ...], columns: int
) -> None:
    """Columns are left out until the others have room; each figure in the table has its unit."""
    with pool.client() as client, client.stream(LONG, "x") as stream:
        deltas = iter(stream)
        next(deltas)
        with on_terminal(pool, *command, columns=columns) as terminal:
            assert terminal.ended() == 0
    lines = [line.rstrip() for line in terminal.shown.splitlines()]
    (head,) = (number for number, line in enumerate(lines) if line.startswith(shown[0]))
    # A line with the path /nowhere is not cut.
    assert max(len(line) for line in lines if "/nowhere" not in line) <= columns
    rows = list(takewhile(lambda line: not re.match("broken|no room|q quit", line), lines[head:]))
    assert set(shown) <= set(lines[head].split())
    assert all(re.search(r"\d (B|kB|MB|GB|s|ms|min|h)$|\w$|-$", row) for row in rows), rows
    if {"TOTAL", "SIZE", "MEM"} & set(lines[head].split()):
        assert re.search(r"\d [kMG]?B\b", "\n".join(rows))
    if command == ("requests",):
        assert any(stream.id.hex().startswith(row.split()[0]) for row in rows[1:])


def test_a_pipe_gets_lines_of_100_characters(pool: Pool) -> None:
    for command in ("ps", "models"):
        lines = pool.cli(command).stdout.splitlines()
        wide = pool.cli(command, "--wide").stdout.splitlines()
        assert max(map(len, lines[1:])) <= 100 < max(map(len, wide[1:]))


def test_a_narrow_terminal_is_told_what_has_no_room(pool: Pool) -> None:
    with on_terminal(pool, "models", columns=60) as models:
        models.until("no room in 60 columns for ")
        assert models.ended() == 0
    with on_terminal(pool, "models", columns=200) as models:
        assert models.ended() == 0
        assert "no room" not in models.shown


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_unless_no_color_is_set(pool: Pool, no_color: str, coloured: bool) -> None:
    pool.cli("load", "counting", "--wait")
    environment = {**pool.environment, "NO_COLOR": no_color}
    with Terminal([*pool.command(), "ps"], environment) as ps:
        assert ps.ended() == 0
        assert ("\x1b[32mready\x1b[0m" in ps.raw) is coloured
        assert "ready" in ps.shown
    with Terminal([*pool.command(), "run", "nobody", "x"], environment) as failing:
        assert failing.ended() == 1
        assert ("\x1b[1;31mmlxpool:\x1b[0m" in failing.raw) is coloured
    assert "\x1b" not in pool.cli("ps").stdout


# ---- top -----------------------------------------------------------------------------------------


def test_top_shows_sorts_and_quits(pool: Pool) -> None:
    with pool.client() as client, client.stream("slow", "x") as stream:
        deltas = iter(stream)
        next(deltas)
        with on_terminal(pool, "top") as top:
            top.until("slow/0")
            top.until("1 live")  # another test's stream has ended, whose cancel may come late
            assert "RESTARTS" in top.shown
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
    assert pool.cli("stats", "--watch", "--count", "1").stdout.count("\n  accepted ") == 1


def test_stats_watch_turns_pages(pool: Pool) -> None:
    with on_terminal(pool, "stats", "--watch", columns=80, lines=12) as watching:
        at = watching.until("page 1 of ")
        assert "requests " in watching.shown and "broker.boot" not in watching.shown
        watching.send(" ")
        at = watching.until("page 2 of ", after=at)
        watching.send("   ")
        at = watching.until("sizes.", after=at)
        watching.send("bbbbbbbbb")
        watching.until("page 1 of ", after=at)
        watching.send("q")
        assert watching.ended() == 0
        assert watching.raw.endswith("\x1b[?25h\x1b[?1049l")


def test_stats_watch_reports_a_dead_broker(tmp_path: Path) -> None:
    with (
        Pool(tmp_path) as other,
        on_terminal(other, "stats", "--watch") as watching,
    ):
        watching.until("broker.boot")
        other.kill()
        assert watching.ended() == 3
        assert "has ended without removing" in watching.shown and "admin.ipc" in watching.shown


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
        at = waiting.until(", 50 %, ")
        waiting.send("\x03")
        if command[0] == "chat":
            waiting.until(">>> ", after=waiting.until("(cancelled)", after=at))
            waiting.send("\x04")
        assert waiting.ended() == (0 if command[0] == "chat" else 130)
    assert waiting.raw.count("\r\x1b[K") > waiting.raw.count("stuck: ")  # the line is erased


def test_without_a_terminal_the_phases_of_a_load_are_lines(pool: Pool) -> None:
    done = pool.cli("load", "counting", "--wait")
    assert (done.returncode, done.stdout) == (0, "counting: loaded\n")
    assert "\r" not in done.stderr

    def begins_with_a_phase() -> bool:
        """Returns whether the broker has answered within the timeout."""
        done = pool.cli("load", "stuck", "--wait", "--timeout", "0.1")
        assert done.returncode == 1
        assert "stuck is not loaded after 0.1 s" in done.stderr and "\r" not in done.stderr
        return bool(re.match(r"mlxpool: (starting a worker for|loading) stuck", done.stderr))

    until(begins_with_a_phase, "the first line is the phase of the load")


def test_load_reports_why_a_model_fails(pool: Pool) -> None:
    done = pool.cli("load", "broken", "--wait")
    assert done.returncode == 1
    assert "/nowhere/at/all" in done.stderr


# ---- chat ----------------------------------------------------------------------------------------


def said(*lines: tuple[str, str]) -> str:
    """Returns the prompt that the counting model makes of a conversation."""
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
        begun = chat.until(" ", after=begun + 2)  # the answer's first token is shown
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


def test_a_chat_in_a_terminal(pool: Pool) -> None:
    with on_terminal(pool, "chat", "counting", "--max-tokens", "2") as chat:
        chat.until("Send a message; /? lists commands")
        at = chat.until(">>> ")
        chat.send("/set seed 7\n")
        at = chat.until(">>> ", after=chat.until("seed is 7", after=at))
        chat.send("/set verbose\n")
        at = chat.until(">>> ", after=chat.until("figures follow", after=at))
        chat.send('"""one\n')
        at = chat.until("... ", after=at)
        chat.send('two"""\n')
        wanted = text_of(expected_ids(said(("user", "one\ntwo")), 7, 2))
        at = chat.until(wanted.rstrip(), after=at)
        at = chat.until("[2 tokens", after=at)
        chat.until(">>> ", after=at)
        chat.send("/bye\n")
        assert chat.ended() == 0


def test_a_chat_without_a_terminal_reads_several_lines_as_one_message(pool: Pool) -> None:
    done = pool.cli(
        "chat", "counting", "--max-tokens", "2", "--json",
        stdin='/set seed 7\n"""\none\n\ntwo\n"""\n/exit\nnever\n',
    )  # fmt: skip
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["content"] == text_of(expected_ids(said(("user", "one\n\ntwo")), 7, 2))
    assert done.stderr == "seed is 7\n"


def test_an_error_ends_the_answer_but_not_the_chat(pool: Pool) -> None:
    done = pool.cli("chat", "nobody", stdin="one\n/help\n/nonsense\n/quit\nnever\n")
    assert done.returncode == 1
    assert done.stderr.count("unknown_model") == 1
    assert "/clear" in done.stderr and "unknown command /nonsense" in done.stderr
