"""`mlxpool ray` without Ray: names, refusals, output."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mlxpool.cli.commands import ray
from mlxpool.cli.main import main
from mlxpool.common.errors import BadRequest

STATUS: dict[str, Any] = {
    "name": "pool",
    "fault": None,
    "broker": {"state": "ready"},
    "endpoint": "tcp://10.0.0.5:7200",
    "server_key": "KEY",
    "models": [
        {"name": "small", "min": 1, "max": 4, "started": 2, "ready": 1},
        {"name": "fixed", "min": 2, "max": 2, "started": 2, "ready": 2},
    ],
    "workers": [
        {"id": "w1", "model": "small", "state": "placed", "address": "10.0.0.6"},
        {"id": "w2", "model": "small", "state": "waits for a place", "address": None},
    ],
}


def test_without_ray_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("mlxpool.cluster.ray_cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    file = tmp_path / "pool.toml"
    file.write_text("[models.m]\npath = 'builtin:counting'\n")
    for verb in ("up", "status", "down"):
        assert main(["ray", verb, str(file)]) == 2
        assert "pip install 'mlxpool[ray]'" in capsys.readouterr().err


def test_settings_are_checked_before_ray_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pool.toml"
    file.write_text("[models.m]\npath = 'builtin:counting'\nreplicas = { min = 3, max = 2 }\n")
    assert main(["ray", "up", str(file)]) == 2
    assert "models.m.replicas: min is 3, must not be above max" in capsys.readouterr().err


def test_a_pool_is_named_by_its_file_or_by_a_flag() -> None:
    assert ray.name_of(Namespace(name=None, file=Path("/etc/small.toml"))) == "small"
    assert ray.name_of(Namespace(name="other", file=Path("/etc/small.toml"))) == "other"
    with pytest.raises(BadRequest, match="name the pool"):
        ray.name_of(Namespace(name=None, file=None))


def test_a_status_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    ray.print_status(Namespace(json=False), STATUS)
    assert capsys.readouterr().out.splitlines() == [
        "pool pool: the broker answers",
        "--endpoint tcp://10.0.0.5:7200 --server-key 'KEY'",
        "MODEL  REPLICAS  READY  STARTED",
        "small  1 to 4    1      2",
        "fixed  2         2      2",
        "",
        "WORKER  MODEL  STATE              NODE",
        "w1      small  placed             10.0.0.6",
        "w2      small  waits for a place  -",
    ]
    ray.print_status(Namespace(json=False), {**STATUS, "broker": None})
    assert "the broker does not answer" in capsys.readouterr().out
    ray.print_status(Namespace(json=False), {"name": "pool", "fault": "no store"})
    assert capsys.readouterr().out == "pool: no broker: no store\n"


def test_a_status_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    ray.print_status(Namespace(json=True), STATUS)
    assert json.loads(capsys.readouterr().out) == STATUS
