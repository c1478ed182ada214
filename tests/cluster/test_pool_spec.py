"""The settings that `mlxpool ray up` reads from a file, and the settings that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from mlxpool.cluster.pool_spec import ModelSpec, PoolSpec, check_name, read
from mlxpool.common.config.bounds import ConfigError

MODELS = """
[models.small]
path = "/models/small"
replicas = { min = 1, max = 4, cool_down = "1m" }
[models.fixed]
path = "/models/fixed"
replicas = 2
gpus = 2
[models.count]
path = "builtin:counting"
"""


def spec_of(tmp_path: Path, text: str, front: int = 7200, back: int = 7201) -> PoolSpec:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    return read(path, "pool", "", front, back)


def test_models_with_a_section_are_those_of_the_cluster(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, f"[pool]\nstate_dir = '/jobs'\n{MODELS}")
    same = {model.name: replace(model, fingerprint="") for model in spec.models}
    assert same == {
        "small": ModelSpec("small", 1, 4, -1, 60.0, ""),
        "fixed": ModelSpec("fixed", 2, 2, 2, 300.0, ""),
        "count": ModelSpec("count", 1, 1, 0, 300.0, ""),  # a counting model, which uses no GPU
    }
    assert spec.state_dir == "/jobs"
    assert spec.folder_path() == Path.home() / ".mlxpool" / "ray" / "pool"


def test_a_fingerprint_changes_with_what_a_worker_is_started_with(tmp_path: Path) -> None:
    def fingerprint(text: str) -> str:
        return spec_of(tmp_path, f"[models.m]\npath = '/m'\n{text}").models[0].fingerprint

    before = fingerprint("")
    assert fingerprint("replicas = 3") == fingerprint("replicas = { max = 3 }") == before
    assert fingerprint("sequences = 3") != before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[pool]", ["names no model", "[models.small]"]),
        (f"[pool]\nfront = ['ipc:///x']\n{MODELS}", ["pool.front is made by `mlxpool ray up`"]),
        (f"[pool]\nrun_dir = '/x'\n{MODELS}", ["pool.run_dir is made by"]),
        (
            "[models.m]\npath = '/m'\ndevices = 4\ngpus = 2",
            ["gpus = 2 and devices = 4", "leave gpus out, or set it to 4"],
        ),
        (
            "[models.m]\npath = '/m'\ngpu_ids = [0, 1]",
            ["model 'm' has gpu_ids = [0, 1], but Ray chooses", "leave gpu_ids out"],
        ),
        ("[models.m]\npath = '/m'\nreplica = 2", ["did you mean 'replicas'?"]),
        (
            f"{MODELS}[keys.ray-w1]\nrole = 'worker'\npublic = '{'k' * 40}'",
            ["keys.ray-w1: names that begin with 'ray-'"],
        ),
    ],
)
def test_settings_that_it_makes_itself_are_refused(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(tmp_path, text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_ports_have_bounds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the port of front is 0, must be from 1 to 65535"):
        spec_of(tmp_path, MODELS, front=0)
    with pytest.raises(ConfigError, match="front and back have one port, 7; give two"):
        spec_of(tmp_path, MODELS, 7, 7)


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a" * 41, "ä"])
def test_a_pool_has_a_name_that_an_actor_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match="the name of the pool is"):
        check_name(name)
