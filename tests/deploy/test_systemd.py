"""The systemd units: valid, with few privileges, and with valid command lines."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from mlxpool.broker.edge.http_gateway import ABORT_GRACE
from mlxpool.broker.edge.loop import LATE
from mlxpool.cli.target import ENDPOINT_VARIABLES, KEY_VARIABLE, SERVER_KEY_VARIABLE
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.paths import default_state_dir
from mlxpool.gateway.settings import Settings
from support.command_lines import parsed
from support.pool import PATIENCE

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
BROKERS = ("mlxpool.service", "mlxpool-broker.service")
GATEWAY = "mlxpool-gateway.service"
UNITS = (*BROKERS, "mlxpool-worker@.service")
EVERY = (*UNITS, GATEWAY)
PROGRAM = "/opt/mlxpool/current/bin/mlxpool"
# The maximum score of `systemd-analyze security`, in tenths, of 100.
EXPOSED = {
    "mlxpool.service": 14,
    "mlxpool-broker.service": 12,
    "mlxpool-worker@.service": 14,
    GATEWAY: 12,
}


def settings(unit: str) -> dict[str, list[str]]:
    """Returns every value of each key; sections are ignored, because no key is in two of them."""
    values: dict[str, list[str]] = {}
    for line in (FOLDER / unit).read_text("utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            values.setdefault(key, []).append(value)
    return values


def one(unit: str, key: str) -> str:
    (value,) = settings(unit)[key]
    return value


@pytest.mark.parametrize("unit", BROKERS)
def test_a_broker_keeps_jobs_in_the_folder_that_systemd_makes_for_it(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one(unit, "StateDirectory") == "mlxpool"
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/mlxpool")
    run_dir = parsed(shlex.split(one(unit, "ExecStart"))[1:]).run_dir
    assert default_state_dir(run_dir) == Path("/var/lib/mlxpool/jobs/run-mlxpool")
    assert "# Jobs are kept in it: /var/lib/mlxpool/jobs/run-mlxpool." in (FOLDER / unit).read_text(
        "utf-8"
    )


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=PATIENCE)


def placed(unit: str, folder: Path, text: str | None = None) -> str:
    """Writes a copy of a unit, with /bin/true as its program; returns the path.

    The copy of a template unit is its instance `demo`.
    """
    text = (FOLDER / unit).read_text("utf-8") if text is None else text
    path = folder / unit.replace("@.", "@demo.")
    path.write_text(text.replace(PROGRAM, "/bin/true"))
    return str(path)


@pytest.mark.parametrize("unit", EVERY)
def test_systemd_verifies_the_unit(unit: str, tmp_path: Path) -> None:
    done = analyze("verify", "--man=no", placed(unit, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_verify_finds_errors(tmp_path: Path) -> None:
    text = (FOLDER / BROKERS[0]).read_text("utf-8").replace("Restart=on-", "Restrat=on-")
    done = analyze("verify", "--man=no", placed(BROKERS[0], tmp_path, text))
    assert "Restrat" in done.stderr


@pytest.mark.parametrize("unit", EVERY)
def test_the_security_score_is_low(unit: str, tmp_path: Path) -> None:
    most = f"--threshold={EXPOSED[unit]}"
    done = analyze("security", "--offline=yes", "--no-pager", most, placed(unit, tmp_path))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("unit", UNITS)
def test_the_command_line_is_valid(unit: str) -> None:
    line = one(unit, "ExecStart").replace("%I", "org/name").replace("%i", "org-name")
    program, *arguments = shlex.split(re.sub(r"\$\{(\w+)\}", r"of-\1", line))
    assert program == PROGRAM
    options = parsed(arguments)
    assert options.config == Path("/etc/mlxpool/mlxpool.toml")


@pytest.mark.parametrize("unit", UNITS)
def test_the_run_directory_is_the_one_that_systemd_makes(unit: str) -> None:
    (run_dir,) = re.findall(r"--run-dir (\S+)", one(unit, "ExecStart"))
    assert run_dir == f"/run/{one(unit, 'RuntimeDirectory')}"
    assert one(unit, "RuntimeDirectoryMode") == "0700"


@pytest.mark.parametrize("unit", BROKERS)
def test_times_fit_those_of_the_broker(unit: str) -> None:
    assert float(one(unit, "WatchdogSec")) / 2 > 10 * LATE, "a late turn is no hang"
    pool = PoolConfig()
    ends = pool.http_drain_timeout + ABORT_GRACE + 2 * pool.stop_grace
    assert float(one(unit, "TimeoutStopSec")) > ends
    assert one(unit, "Type") == "notify" and one(unit, "NotifyAccess") == "main"
    assert one(unit, "TimeoutStartSec").endswith("min"), "a store may be copied before it is ready"


def test_the_gateways_unit() -> None:
    text = (FOLDER / "gateway.env").read_text("utf-8")
    given = dict(re.findall(r"^(\w+)=(.+)$", text, re.M))
    line = re.sub(r"\$\{(\w+)\}", lambda match: given.pop(match[1]), one(GATEWAY, "ExecStart"))
    assert given == {}, "a variable that nothing reads"
    program, *arguments = shlex.split(line)
    options = parsed(arguments)
    assert program == PROGRAM
    assert (options.host, options.port) == ("127.0.0.1", 11434)
    assert options.keys == Path("/etc/mlxpool/http.keys")
    assert one(GATEWAY, "EnvironmentFile") == "/etc/mlxpool/gateway.env"
    assert (
        f"MLXPOOL_RUN_DIR=/run/{one(BROKERS[0], 'RuntimeDirectory')}"
        in settings(GATEWAY)["Environment"]
    )
    assert "RuntimeDirectory" not in settings(GATEWAY), "its end would remove the broker's"
    assert float(one(GATEWAY, "TimeoutStopSec")) > Settings().drain_timeout
    others = set(re.findall(r"^# (MLXPOOL_\w+)=", text, re.M))
    assert others == {ENDPOINT_VARIABLES["front"], KEY_VARIABLE, SERVER_KEY_VARIABLE}


def test_the_worker_units_files_exist() -> None:
    text = (FOLDER / "worker.env").read_text("utf-8")
    given = dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#"))
    unit = "mlxpool-worker@.service"
    assert set(re.findall(r"\$\{(\w+)\}", one(unit, "ExecStart"))) == set(given)
    assert one(unit, "EnvironmentFile") == "/etc/mlxpool/worker.env"
    assert given["MLXPOOL_BACK_ENDPOINT"].startswith("tcp://")


def test_the_user_is_that_of_sysusers() -> None:
    (user,) = re.findall(r"^u (\S+) ", (FOLDER / "sysusers.conf").read_text("utf-8"), re.MULTILINE)
    for unit in EVERY:
        assert one(unit, "User") == one(unit, "Group") == user
