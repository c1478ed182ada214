"""`mlxpool config` and `mlxpool completion`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from mlxpool.cli.commands import about
from mlxpool.cli.main import USAGE, main, parser
from support.command_lines import verbs
from support.pool import PATIENCE


@pytest.fixture(autouse=True)
def nobody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("MLXPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "a.toml").write_text(text)
    return str(tmp_path / "a.toml")


def test_what_is_shown_can_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The TOML can be read again, also with origins, which are comments."""
    text = '[pool]\nqueue_limit = 9\n[models."größer/x"]\npath = "a\\tb\\"c"\n'
    first = written(tmp_path, text)
    for flags in ([], ["--origin"]):
        assert main(["config", "show", *flags, "--config", first]) == 0
        shown = capsys.readouterr().out
        again = tomllib.loads(shown)
        assert again["pool"]["queue_limit"] == 9
        assert again["models"]["größer/x"]["path"] == 'a\tb"c'
        (tmp_path / "b.toml").write_text(shown)
        assert main(["config", "show", "--config", str(tmp_path / "b.toml")]) == 0
        assert tomllib.loads(capsys.readouterr().out) == again
    assert "queue_limit = 9" in shown and f"# {first}:2" in shown and "# default" in shown


def test_the_file_of_the_usual_place_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "config" / "mlxpool" / "mlxpool.toml"
    place.parent.mkdir(parents=True)
    place.write_text("[pool]\nqueue_limit = 3\n")
    assert main(["config", "show", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["file"] == str(place)
    wanted = {"key": "pool.queue_limit", "value": 3, "origin": f"{place}:2"}
    assert wanted in answer["settings"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[pool]\nqueue_limti = 3", ["queue_limti", "did you mean 'queue_limit'"]),
        ("[pool]\nqueue_limit = true", ["pool.queue_limit", "integer", "True"]),
        ("[pool]\nqueue_limit = 0", ["pool.queue_limit is 0", "from 1 to 1000000"]),
        ("[pol]", ["'pol'", "did you mean 'pool'"]),
        ("[models.x]", ["models.x.path is missing"]),
        ("queue =", ["a.toml is not TOML"]),
    ],
)
def test_settings_that_a_broker_would_refuse(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("show", "check"):
        assert main(["config", verb, "--config", written(tmp_path, text)]) == USAGE
        said = capsys.readouterr().err
        assert all(word in said for word in words), said


def test_check_lists_every_problem_of_refused_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "[pool]\nqueue_limit = 0\nqueue_limti = 3\n[models.x]\n")
    assert main(["config", "check", "--config", file, "--json"]) == USAGE
    printed = capsys.readouterr()
    problems = json.loads(printed.out)["error"]["details"]["problems"]
    assert len(problems) == 3
    shown = "".join(f"  {problem}\n" for problem in problems)
    assert printed.err == f"mlxpool: 3 settings are wrong:\n{shown}"


def test_check_finds_missing_models_and_unread_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, '[models.x]\npath = "/nowhere/at/all"')
    assert main(["config", "check"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    monkeypatch.setenv("MLXPOOL_DEADLIN", "5m")
    assert main(["config", "check", "--config", file, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["problems"] == [
        "models.x.path: there is no /nowhere/at/all",
        "$MLXPOOL_DEADLIN is read by nobody; did you mean $MLXPOOL_DEADLINE?",
    ]
    assert main(["config", "check", "--config", file]) == 1
    assert "/nowhere/at/all" in capsys.readouterr().out


# ---- completion ----------------------------------------------------------------------------------

COMMANDS = sorted(verbs(parser()))


@pytest.mark.parametrize("shell", about.SHELLS)
def test_the_script_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "run-dir", "max-tokens", "origin"):
        assert word in script


def completed_by_bash(words: list[str]) -> list[str]:
    """Returns bash's completions of the last of these words, with the script loaded."""
    quoted = " ".join(f"'{word}'" for word in words)
    ask = (
        'source /dev/stdin <<< "$SCRIPT"\n'
        f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE="${{COMP_WORDS[*]}}"\n'
        "spec=($(complete -p mlxpool)); function=''\n"
        "for ((i = 0; i < ${#spec[@]}; i++)); do\n"
        '  [ "${spec[i]}" = -F ] && function=${spec[i+1]}\ndone\n'
        'compopt() { :; }\n$function mlxpool "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"\n'
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", ask],
        env={**os.environ, "SCRIPT": about.script(parser(), "bash")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return sorted(word.strip() for word in done.stdout.split())


def test_bash_completes_commands_and_flags() -> None:
    assert completed_by_bash(["mlxpool", "dr"]) == ["drain"]
    assert completed_by_bash(["mlxpool", ""]) == COMMANDS
    assert completed_by_bash(["mlxpool", "run", "--max"]) == ["--max-tokens"]
    assert completed_by_bash(["mlxpool", "config", "show", "--or"]) == ["--origin"]
    assert completed_by_bash(["mlxpool", "completion", "z"]) == ["zsh"]


@pytest.mark.parametrize("shell", about.SHELLS)
def test_each_shell_can_read_its_script(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    no_run = ["--no-execute"] if shell == "fish" else ["-n"]
    script = about.script(parser(), shell)
    done = subprocess.run(
        [program, *no_run], input=script, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
