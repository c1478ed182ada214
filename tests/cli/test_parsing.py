"""The command line in this process: usage, exit codes, the position of --run-dir, output."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxpool.cli import admin, formatting
from mlxpool.cli import main as cli
from mlxpool.cli.commands import check, jobs, pool, reports, run, stats
from mlxpool.cli.main import FAILED, OK, UNREACHABLE, USAGE, main
from mlxpool.cli.parser import COMMAND_MODULES
from mlxpool.cli.target import Target
from mlxpool.common.errors import BadRequest, BrokerLost, QueueFull
from support.command_lines import verbs
from support.pool import PATIENCE


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLXPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(admin, "ANSWER_TIMEOUT", 0.05)


@pytest.fixture
def empty() -> Iterator[Path]:
    """A run directory without a broker; its path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        yield Path(folder)


class FakeAdmin:
    """Replaces the admin socket: records the requests, and gives the same answer to each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
        self.answer = answer
        self.calls: list[tuple[Path, str, dict[str, Any], bytes | None]] = []
        for module in (pool, reports, stats):
            monkeypatch.setattr(module, "ask", self)

    def __call__(
        self,
        where: Target,
        kind: str,
        body: Mapping[str, Any] | None = None,
        ident: bytes | None = None,
    ) -> dict[str, Any]:
        self.calls.append((where.run_dir, kind, dict(body or {}), ident))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return dict(self.answer)


def ended(*arguments: str) -> int:
    """Runs a command line that argparse ends; returns the exit code."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    "command", ["serve", "run", "ps", "stats", "models", "load", "unload", "cancel", "stop"]
)
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(command, "--help") == OK
    text = capsys.readouterr().out
    assert "--run-dir" in text and "--json" in text


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize("prompt", ["Hello there", "-"])
@pytest.mark.parametrize("flags", [["--chat"], ["--chat", "--max-tokens", "3", "--stop", "x"]])
def test_a_prompt_may_follow_flags(
    command: str, prompt: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[argparse.Namespace] = []

    def note(options: argparse.Namespace) -> int:
        seen.append(options)
        return OK

    monkeypatch.setattr(run, "run", note)
    monkeypatch.setattr(jobs, "submit", note)
    for arguments in ([*flags, "m", prompt], ["m", *flags, prompt], ["m", prompt, *flags]):
        assert main([command, *arguments]) == OK
    assert [(namespace.model, namespace.prompt, namespace.chat) for namespace in seen] == [
        ("m", prompt, True)
    ] * 3


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["ps", "surplus"],
        ["run"],
        ["load"],
        ["cancel"],
        ["run", "m", "p", "--temperature", "hot"],
        ["run", "m", "p", "--max-tokens", "1.5"],
        ["run", "m", "p", "--nonsense"],
        ["run", "m", "--chat", "--nonsense"],
        ["run", "m", "p", "--chat", "surplus"],
        ["run", "m", "--chat", "p", "surplus"],
        ["submit", "m", "--chat", "p", "surplus"],
        ["run", "m", "p", "--deadline", "x"],
        ["serve", "--log-format", "xml"],
        ["--run-dir"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(*arguments) == USAGE
    written = capsys.readouterr()
    assert written.out == ""
    assert "usage: mlxpool" in written.err


@pytest.mark.parametrize("ident", ["", "xyz", "0" * 33, "0x12", "00 11"])
def test_an_invalid_id(ident: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(empty), "cancel", ident]) == USAGE
    error = capsys.readouterr().err
    assert "ID is the id of a request or its first digits, 1 to 32 hexadecimal digits" in error


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["serve", "--config", "/nowhere/x.toml"], "/nowhere/x.toml"),
        (["serve", "--model", "nonsense"], "NAME=PATH"),
        (["serve", "--model", "=folder"], "NAME=PATH"),
        (["serve", "--models-dir", "/nowhere/at/all"], "/nowhere/at/all"),
        (["check", ""], "MODEL must not be empty"),
    ],
)
def test_wrong_settings_of_serve(
    arguments: list[str], word: str, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run-dir", str(empty), *arguments]) == USAGE
    assert word in capsys.readouterr().err


# ---- the run directory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["--run-dir", "/a", "stop"], ["stop", "--run-dir", "/a"], ["--run-dir=/a", "stop", "--json"]],
)
def test_the_run_directory_before_and_after_the_command(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = FakeAdmin(monkeypatch, {"state": "stopping"})
    assert main(arguments) == OK
    assert admin.calls == [(Path("/a"), "stop", {}, None)]


def test_the_later_of_two_run_directories_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin(monkeypatch, {})
    main(["--run-dir", "/a", "stop", "--run-dir", "/b"])
    assert admin.calls[0][0] == Path("/b")


def test_flag_then_environment_then_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    admin = FakeAdmin(monkeypatch, {})
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    main(["stop"])
    monkeypatch.setenv("MLXPOOL_RUN_DIR", "")
    main(["stop"])
    monkeypatch.setenv("MLXPOOL_RUN_DIR", "/env")
    main(["stop"])
    main(["stop", "--run-dir", "/flag"])
    default = tmp_path / "mlxpool"
    assert [call[0] for call in admin.calls] == [default, default, Path("/env"), Path("/flag")]


@pytest.mark.parametrize("place", ["before", "after"])
def test_json_before_and_after_the_command(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeAdmin(monkeypatch, {"state": "stopping"})
    assert main(["--json", "stop"] if place == "before" else ["stop", "--json"]) == OK
    assert json.loads(capsys.readouterr().out) == {"state": "stopping"}


def test_a_run_directory_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--run-dir", "/" + "x" * 200]) == USAGE
    assert "--run-dir" in capsys.readouterr().err


def test_the_flag_of_serve_beats_the_file_even_with_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlxpool.cli import pool_flags
    from mlxpool.cli.commands import serve
    from mlxpool.common import logs
    from mlxpool.common.config.schema import PoolConfig

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "a.toml"
    file.write_text('[pool]\nrun_dir = "/of/the/file"\n')
    seen: list[PoolConfig] = []

    def settings_of(options: argparse.Namespace) -> PoolConfig:
        seen.append(original(options))
        raise ValueError("that is enough")

    original = pool_flags.settings_of
    monkeypatch.setattr(serve, "settings_of", settings_of)
    monkeypatch.setattr(logs, "set_up", lambda **_: None)
    assert main(["serve", "--config", str(file)]) == USAGE
    assert main(["serve", "--config", str(file), "--run-dir", str(tmp_path / "mlxpool")]) == USAGE
    assert [s.run_dir for s in seen] == [Path("/of/the/file"), tmp_path / "mlxpool"]


# ---- exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["ps"], ["stats"], ["models"], ["stop"], ["load", "m"], ["cancel", "0" * 32]]
)
def test_no_broker(arguments: list[str], empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--run-dir", str(empty)]) == UNREACHABLE
    written = capsys.readouterr()
    assert written.out == ""
    assert str(empty) in written.err and "mlxpool serve" in written.err


def test_no_broker_in_json(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--json", "--run-dir", str(empty)]) == UNREACHABLE
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "broker_lost"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokerLost("x"), UNREACHABLE),
        (BadRequest("x"), USAGE),
        (QueueFull("x"), FAILED),
        (ValueError("x"), USAGE),
        (OSError(5, "x"), FAILED),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    FakeAdmin(monkeypatch, error)
    assert main(["ps", "--run-dir", "/a"]) == code
    assert ("x" in capsys.readouterr().err) is (code != 130)


@pytest.mark.parametrize(("state", "code"), [("queued", OK), ("done", OK), ("unknown", FAILED)])
def test_exit_codes_of_cancel(
    state: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = FakeAdmin(monkeypatch, {"state": state, "pos": 3})
    assert main(["cancel", "0a" * 16, "--run-dir", "/a"]) == code
    assert admin.calls[0][3] == bytes([10]) * 16
    assert state in capsys.readouterr().out


def test_a_closed_pipe_prints_no_error() -> None:
    """Tests `mlxpool stats | head -0`: no traceback, no message."""
    code = (
        "import sys\nfrom mlxpool.cli.commands import stats as ops\n"
        "from mlxpool.cli.main import main\n"
        "broker = {'pid': 1, 'state': 'ready', 'uptime_s': 1.0, 'run_dir': '/a'}\n"
        "ops.ask = lambda *a, **k: {'broker': broker, **{str(n): n for n in range(100_000)}}\n"
        "sys.exit(main(['stats', '--run-dir', '/a']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    with child.stderr:
        said = child.stderr.read()
    assert child.wait(timeout=PATIENCE) == FAILED
    assert said == b""


# ---- output --------------------------------------------------------------------------------------


def test_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"type": "llama", "size": 5 * 10**9, "quantisation": "bf16", "digest": "0123"}
    base = {"name": "demo", "state": "cold", "context": 0, "queued": 2}
    rows = [
        {**base, **about, "features": ["batching", "tree"], "shares": "other", "error": None},
        {**base, "name": "bad", "state": "failed", "error": "no config.json"},
    ]
    FakeAdmin(monkeypatch, {"models": rows})
    assert main(["models", "--run-dir", "/a"]) == OK
    head, good, bad, *notes = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "STATE", "TYPE", "SIZE", "QUANTISATION", "CONTEXT", "QUEUED"]
    assert good.split() == ["demo", "cold", "llama", "5.0", "GB", "bf16", "-", "2"]
    assert bad.split() == ["bad", "failed", "-", "-", "-", "-", "2"]
    assert max(map(len, (head, good, bad))) <= 100
    assert notes == ["bad cannot be had: no config.json", "demo shares the workers of other"]


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        (None, "-"),
        ("slabs", "paged"),
        ("rows, int8", "contiguous, int8"),
        ("pool, own kernels", "paged, own kernels"),
        ("pool, own kernels, int8", "paged, own kernels, int8"),
        ("mlx-lm's code", "mlx-lm"),
        ("of a newer worker", "of a newer worker"),
    ],
)
def test_the_kv_cache_of_a_model_in_the_words_of_the_field(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layout: str | None,
    shown: str,
) -> None:
    row = {"name": "demo", "state": "cold", "context": 0, "queued": 0, "layout": layout}
    FakeAdmin(monkeypatch, {"models": [{**row, "features": ["batching", "tree"]}]})
    assert main(["models", "--wide", "--run-dir", "/a"]) == OK
    head, line = (re.split(" {2,}", text) for text in capsys.readouterr().out.splitlines())
    assert head[7:] == ["KV CACHE", "DIGEST", "SUPPORTS"]
    assert line[7:] == [shown, "-", "batching prefix-cache"]


def test_check_shows_the_first_of_many_problems() -> None:
    wrong = [f"tensor {number}" for number in range(check.MAX_SHOWN + 5)]
    shown = list(check.lines({"name": "m", "path": "/m", "problems": wrong, "model": None}))
    assert shown[3] == f"{len(wrong)} problems:"
    assert shown[4:] == [
        *(f"  - {words}" for words in wrong[: check.MAX_SHOWN]),
        "  … and 5 more, which --json lists",
    ]


def test_check_shows_a_dash_for_unknown_figures() -> None:
    model = {"type": "phi3", "size": 5, "quantisation": "f32", "context": 9, "vocabulary": 7}
    model |= {"tokenizer": "BPE", "templates": [], "eos_ids": [], "digest": "0", "features": []}
    memory: dict[str, Any] = {"context": 9, "sequences": 2, "weights": 5, "prefix_cache": 3}
    memory |= dict.fromkeys(("token", "fixed", "sequence", "all_sequences")) | {"kv": "auto"}
    machine = {"device": "cpu", "total": 8, "free": 8, "limit": 8, "pool_limit": 8, "longest": None}
    report = {"name": "m", "path": "/m", "problems": [], "machine": {**machine, "fits": True}}
    report |= {"model": {**model, "layers": None, "parameters": None}, "memory": memory}
    shown = [line.split() for line in "\n".join(check.lines(report)).splitlines()]
    rows = ("type phi3, - layers", "parameters -", "cache, a token -", "longest that fits - tokens")
    for row in rows:
        assert row.split() in shown


def test_check_says_why_a_model_cannot_run() -> None:
    machine = {"fits": False, "why": ["no back end"]}
    report: dict[str, Any] = {"name": "m", "path": "/m", "problems": [], "model": None}
    assert list(check.lines({**report, "machine": machine}))[3:] == [
        "nothing is wrong with it",
        "it cannot run on this machine:",
        "  - no back end",
    ]


@pytest.mark.parametrize(
    ("target", "key"),
    [("demo", "model"), ("org/name", "model"), ("demo/0", "slot"), ("a/b/12", "slot")],
)
def test_drain_tells_a_slot_from_a_model(
    monkeypatch: pytest.MonkeyPatch, target: str, key: str
) -> None:
    admin = FakeAdmin(monkeypatch, {"draining": target, "timeout_ms": 1})
    assert main(["drain", target, "--run-dir", "/a"]) == OK
    assert admin.calls == [(Path("/a"), "drain", {key: target}, None)]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (["m"], "m: draining, 30.0 s at most; closed to new requests until `mlxpool load m`"),
        (["m/0"], "m/0: draining, 30.0 s at most; then its slot is free for a new worker"),
        ([], "pool: draining, 30.0 s at most; then the broker ends"),
    ],
)
def test_drain_says_what_follows(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: list[str],
    told: str,
) -> None:
    FakeAdmin(monkeypatch, {"draining": (target or ["pool"])[0], "timeout_ms": 30_000})
    assert main(["drain", *target, "--run-dir", "/a"]) == OK
    assert capsys.readouterr().out == told + "\n"


def test_ps_shows_a_drained_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = {"pid": 5, "state": "ready", "uptime_s": 7.0, "run_dir": "/a"}
    slots = [
        {"slot": f"{name}/0", "model": name, "pid": None, "state": "none", "phase": None}
        for name in ("m", "other")
    ]
    models = [{"name": "m", "state": "drained"}, {"name": "other", "state": "cold"}]
    FakeAdmin(monkeypatch, {"broker": broker, "workers": slots, "models": models})
    assert main(["ps", "--run-dir", "/a"]) == OK
    *_, drained, cold, note = capsys.readouterr().out.splitlines()
    assert drained.split()[:3] == ["m/0", "-", "drained"]
    assert cold.split()[:3] == ["other/0", "-", "none"]
    assert note == "m is drained: closed to new requests until `mlxpool load m`"


def test_ps_of_a_slot_without_a_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = {"pid": 5, "state": "ready", "uptime_s": 7.0, "run_dir": "/a"}
    slot: dict[str, Any] = {
        "slot": "m/0",
        "pid": None,
        "state": "none",
        "phase": None,
        "memory": {},
    }
    row = {**slot, "model": "m", "restarts": 2, "last_exit": "killed by SIGKILL", "epoch": None}
    FakeAdmin(monkeypatch, {"broker": broker, "workers": [row], "models": []})
    assert main(["ps", "--run-dir", "/a"]) == OK
    first, _head, _slot, line = capsys.readouterr().out.splitlines()
    assert "broker 5 ready" in first
    assert line == "m/0: last exit: killed by SIGKILL"


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert formatting.table([("A", "BB"), ("xxx", "y")]) == ["A    BB", "xxx  y"]


def test_every_command_is_found_in_its_module() -> None:
    """Each command is known to the parser of all commands, and to the parser of its module."""
    whole = verbs(cli.parser())
    assert set(whole) == set(COMMAND_MODULES)
    for name in COMMAND_MODULES:
        for before in ([], ["--json"], ["--run-dir", "serve"], ["--run-dir=x", "--json"]):
            own = verbs(cli.parser([*before, name, "x"]))
            assert name in own and len(own) < len(whole)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["nonsense", "ps"], ["--run-dir"]])
def test_help_and_errors_know_every_command(arguments: list[str]) -> None:
    assert set(verbs(cli.parser(arguments))) == set(COMMAND_MODULES)


def test_ps_imports_few_modules() -> None:
    code = (
        "import sys\nfrom mlxpool.cli.commands import reports as ops\n"
        "ops.ask = lambda *a, **k: sys.exit(0)\n"
        "import atexit; atexit.register(lambda: print(*sys.modules))\n"
        "from mlxpool.cli.main import main; main(['ps', '--run-dir', '/a'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    heavy = {"mlx", "asyncio", "subprocess", "shtab", "tomllib", "mlxpool.client", "numpy"}
    assert done.returncode == 0 and not heavy & set(done.stdout.split())
