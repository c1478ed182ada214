"""A model with escape sequences in files and tokens: the output of `run`, `chat` and the logs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.pool import PATIENCE, Pool, until
from support.terminal import Terminal
from support.worker_checkpoints import config, random_weights, write_checkpoint

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

ASSISTANT = 259  # the id at which the answer to a chat begins
# No byte occurs twice, because each token has one successor. Each byte is a token, so the deltas
# split the escape sequence, the two bytes of a C1 control and of é, and the three bytes of a mark
# that reverses text.
TEXT = "A\x1b[2J\r\x07\x7f\u009b\u202eé\nz"
SHOWN = r"A\x1b[2J\r\x07\x7f\x9b\u202e" + "é\nz"
ERROR = "\x1b[2J\u202e\nmlxpool: a fake line\nts=1970-01-01 a fake line"
ERROR_SHOWN = r"\x1b[2J\u202e\nmlxpool: a fake line\nts=1970-01-01 a fake line"
RAISING = "{{ raise_exception(messages[0].content) }}"
NAME = "line\u2028break"  # a name may hold any character that is not of a category C
RUN = ("--temperature", "0", "--max-tokens", str(len(TEXT.encode())))


def chain_weights(ids: Sequence[int], starts: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns weights of a model that generates `ids` in order after each id of `starts`.

    After an id of `starts` the first of `ids` is the likeliest, after an id of `ids` its successor
    in `ids`. Attention and MLP add nothing, so the next token depends only on the last token.
    """
    weights = {
        name: np.ones_like(array) if "norm" in name else np.zeros_like(array)
        for name, array in random_weights(config()).items()
    }
    embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    for place, (before, after) in enumerate(zip([starts[0], *ids], [*ids, 257], strict=True)):
        embed[before, place] = head[after, place] = 1
    for start in starts:
        embed[start] = embed[starts[0]]
    return weights


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp("models")
    weights = chain_weights(list(TEXT.encode()), [ord("?"), ASSISTANT])
    write_checkpoint(root / "chain", weights=weights)
    write_checkpoint(root / "raising", tokenizer_config={"chat_template": RAISING})
    paths = {"chain": "chain", "raising": "raising", NAME: ERROR}  # this folder does not exist
    tables = [
        f'[models."{name}"]\npath = {json.dumps(str(root / folder))}'
        for name, folder in paths.items()
    ]
    with Pool(tmp_path_factory.mktemp("pool"), "\n".join(tables)) as running:
        for name in ("chain", "raising"):  # loads the models, so that no progress is shown later
            assert running.cli("load", name, "--wait").returncode == 0
        yield running


def on_terminal(pool: Pool, *arguments: str) -> Terminal:
    return Terminal([*pool.command(), *arguments], pool.environment)


def test_run_escapes_on_a_terminal(pool: Pool) -> None:
    with on_terminal(pool, "run", "chain", "?", "--quiet", *RUN) as run:
        assert run.ended() == 0
        assert run.raw == SHOWN.replace("\n", "\r\n") + "\r\n"


def test_run_raw_prints_the_text_as_it_is(pool: Pool) -> None:
    with on_terminal(pool, "run", "chain", "?", "--quiet", "--raw", *RUN) as run:
        assert run.ended() == 0
        assert run.raw == TEXT.replace("\n", "\r\n") + "\r\n"


@pytest.mark.parametrize("flags", [(), ("--raw",)])
def test_run_into_a_pipe_prints_the_text_as_it_is(pool: Pool, flags: tuple[str, ...]) -> None:
    command = [*pool.command(), "run", "chain", "?", "--quiet", *flags, *RUN]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=pool.environment, timeout=PATIENCE)
    assert done.returncode == 0
    assert done.stdout == TEXT.encode() + b"\n"


@pytest.mark.parametrize(("flags", "expected"), [((), SHOWN), (("--raw",), TEXT)])
def test_chat_escapes_on_a_terminal_but_for_raw(
    pool: Pool, flags: tuple[str, ...], expected: str
) -> None:
    with on_terminal(pool, "chat", "chain", *flags, *RUN) as chat:
        chat.until(">>> ")
        chat.send("hello\n")
        end = chat.until("z\r\n")
        chat.until(">>> ", after=end)
        chat.send("\x04")
        assert chat.ended() == 0
        assert expected.replace("\n", "\r\n") in chat.raw
        assert ("\x1b[2J" in chat.raw) is bool(flags)


@pytest.mark.parametrize("flags", [(), ("--raw",)])
def test_the_error_of_a_template_is_one_line(pool: Pool, flags: tuple[str, ...]) -> None:
    with on_terminal(pool, "run", "raising", ERROR, "--chat", *flags) as run:
        assert run.ended() == 2
        assert ERROR_SHOWN in run.raw
        assert run.raw.count("\n") == 1
        assert "\x1b" not in run.raw.removeprefix("\x1b[1;31mmlxpool:\x1b[0m")  # our own colour
    with on_terminal(pool, "chat", "raising", *flags) as chat:
        chat.until(">>> ")
        chat.send("\x16\x1b[2J\n")  # Ctrl-V and Escape
        at = chat.until("refused the messages: ")
        chat.until(r"\x1b[2J", after=at)
        assert "\x1b[2J" not in chat.raw[chat.raw.index("refused the messages: ") :]
        chat.send("\x04")


def test_what_is_told_of_a_broken_model(pool: Pool) -> None:
    name = NAME.encode("unicode_escape").decode()
    until(lambda: error_of(pool), "the model has been looked at")
    assert ERROR in error_of(pool)
    outputs = [pool.cli(verb).stdout for verb in ("models", "ps")]
    outputs.append(pool.cli("check", NAME, "--config", str(pool.config)).stdout)
    for verb in ("load", "run"):
        done = pool.cli(verb, NAME, *(("--wait",) if verb == "load" else ("hi",)))
        assert done.returncode == 1
        outputs.append(done.stderr)
    for text in outputs:
        assert ERROR_SHOWN in text
        assert all(line.isprintable() for line in text.split("\n"))
        assert "\nmlxpool: a fake line" not in text
    assert all(name in text for text in outputs[:3])


def error_of(pool: Pool) -> Any:
    """Returns the error of the broken model, from the JSON that `models` prints."""
    rows = {row["name"]: row for row in pool.cli_json("models")["models"]}
    return rows[NAME]["error"]


def test_the_logs_hold_no_control_character_and_no_fake_line(pool: Pool) -> None:
    pool.cli("run", "raising", ERROR, "--chat")
    pool.cli("load", NAME, "--wait")
    workers = [path.read_text() for path in Path(pool.run_dir, "logs").glob("*.log")]
    assert "a fake line" in pool.log()
    for text in (pool.log(), *workers):
        assert all(line.isprintable() for line in text.split("\n")), text
        assert "\nts=1970-01-01 a fake line" not in text
