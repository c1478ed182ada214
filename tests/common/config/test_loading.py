"""Settings: their sources, the precedence of sources, and the errors of wrong settings."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.config.bounds import ConfigError, seconds, size
from mlxpool.common.config.loading import check_run_dir, load
from mlxpool.common.config.schema import (
    BUILTIN,
    Counting,
    ModelConfig,
    PoolConfig,
    Scaling,
    WorkerConfig,
)
from mlxpool.common.records import as_map


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLXPOOL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mlxpool.toml"


def loaded(file: Path, text: str, **flags: Any) -> PoolConfig:
    file.write_text(text)
    return load(file, flags)


def refused(file: Path, text: str, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(file, text, **flags)
    return str(caught.value)


# ---- precedence ----------------------------------------------------------------------------------


def test_without_anything_there_are_defaults_and_the_built_in_models() -> None:
    config = load(None)
    assert config.queue_limit == 512
    assert config.models == BUILTIN


def test_flag_beats_environment_beats_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[pool]\nqueue_limit = 1\n"
    assert loaded(file, text).queue_limit == 1
    monkeypatch.setenv("MLXPOOL_QUEUE_LIMIT", "2")
    assert loaded(file, text).queue_limit == 2
    assert loaded(file, text, queue_limit=3).queue_limit == 3
    assert loaded(file, text, queue_limit=None).queue_limit == 2


def test_the_environment_is_checked_like_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPOOL_DEADLINE", "5m")
    monkeypatch.setenv("MLXPOOL_QUEUE_BYTES", "1MiB")
    config = load(None)
    assert (config.deadline, config.queue_bytes) == (300.0, 2**20)
    monkeypatch.setenv("MLXPOOL_DEADLINE", "soon")
    with pytest.raises(ConfigError, match=r"pool\.deadline"):
        load(None)


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        load(None).queue_limit = 3  # type: ignore[misc]


# ---- models --------------------------------------------------------------------------------------


def test_a_model_of_the_file(file: Path) -> None:
    config = loaded(
        file,
        '[models.a]\npath = "/models/a"\nreplicas = 2\nkeep_alive = "-1"\n'
        '[models.b]\npath = "builtin:counting"\ncounting = { step_us = 5, fault = "kill" }\n'
        '[models.c]\npath = "/models/c"\nreplicas = { min = 2, max = 4, cool_down = "1m" }\n'
        '[models.d]\npath = "/models/d"\nreplicas = { min = 0, max = 4 }\n',
    )
    assert config.models["a"] == ModelConfig(path="/models/a", replicas=2, keep_alive=-1.0)
    assert config.models["b"].counting == Counting(step_us=5, fault="kill")
    scaling = Scaling(min=2, max=4, cool_down=60.0)
    assert config.models["c"] == ModelConfig(path="/models/c", replicas=2, scaling=scaling)
    assert config.models["d"].replicas == 1 and config.models["d"].scaling.min == 0
    assert config.models["demo"] == BUILTIN["demo"]


def test_gpus_are_named_by_number_and_by_name(file: Path) -> None:
    text = '[models.a]\npath = "/a"\ngpu_ids = {}\n'
    for given, ids in (
        ("[]", ()),
        ("[3, 0]", ("3", "0")),
        ("1", ("1",)),
        ('["GPU-8f3c", "MIG-GPU-8f3c/1/0", "2"]', ("GPU-8f3c", "MIG-GPU-8f3c/1/0", "2")),
    ):
        model = loaded(file, text.format(given)).models["a"]
        assert model == ModelConfig(path="/a", gpu_ids=ids)
        assert ModelConfig.from_table(json.loads(json.dumps(as_map(model)))) == model


def test_a_built_in_model_can_be_set_otherwise(file: Path) -> None:
    config = loaded(file, '[models.demo]\npath = "builtin:demo"\ncontext = 128\n')
    assert config.models["demo"].context == 128


def test_each_folder_with_a_config_is_a_model(file: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "empty"):
        (tmp_path / "models" / name).mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (tmp_path / "models" / "config.json").write_text("{}")
    text = f'[pool]\nmodels_dir = "{tmp_path}/models"\n[models.b]\npath = "/elsewhere"\n'
    config = loaded(file, text)
    assert set(config.models) == {"a", "b", *BUILTIN}
    assert config.models["a"].path == str(tmp_path / "models" / "a")
    assert config.models["a"].within == str(tmp_path / "models")
    assert config.models["b"] == ModelConfig(path="/elsewhere"), "the file knows better"


def test_a_pinned_model_is_kept(file: Path) -> None:
    config = loaded(file, '[models.a]\npath = "/a"\npin = true\n')
    assert config.models["a"] == ModelConfig(path="/a", pin=True, keep_alive=-1.0)
    both = '[models.a]\npath = "/a"\npin = true\nkeep_alive = -1\n'
    assert loaded(file, both).models["a"].keep_alive == -1.0


def test_a_name_by_flag_is_no_path() -> None:
    with pytest.raises(ConfigError, match=r"the name must not be a path"):
        load(None, None, {"../a": "/flag"})


def test_models_by_flag(file: Path) -> None:
    file.write_text('[models.a]\npath = "/file"\n')
    assert load(file, None, {"a": "/flag"}).models["a"].path == "/flag"


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pool = 3", ["[pool] must be a table"]),
        ("models = 3", ["[models] must be a table"]),
        ("[models]\na = 3", ["[a] must be a table"]),
        ("[pol]", ["unknown key 'pol'", "did you mean 'pool'?"]),
        ("[pool]\nqueue_limits = 3", ["pool: unknown key", "did you mean 'queue_limit'?"]),
        ("[pool]\nzzz = 3", ["known: ", "run_dir"]),
        ("[pool]\nmodels = 3", ["unknown key 'models'"]),
        ('[models.a]\npath = "/a"\nreplica = 3', ["models.a", "did you mean 'replicas'?"]),
        ("[models.a]\ncontext = 3", ["models.a.path is missing"]),
        ('[models.a]\npath = "/a"\nreplicas = 0', ["models.a.replicas is 0", "from 1 to 64"]),
        ('[models.a]\npath = "/a"\nreplicas = {min = 1}', ["models.a.replicas.max is missing"]),
        (
            '[models.a]\npath = "/a"\nreplicas = {min = 5, max = 4}',
            ["models.a.replicas: min is 5", "above max, which is 4"],
        ),
        ('[models.a]\npath = "/a"\nreplicas = {max = 0}', ["replicas.max is 0", "from 1 to 1024"]),
        (
            '[models.a]\npath = "/a"\nreplicas = {max = 2, mni = 1}',
            ["models.a.replicas: unknown key 'mni'", "did you mean 'min'?"],
        ),
        ('[models.a]\npath = "/a"\ngpus = 65', ["models.a.gpus is 65, must be from -1 to 64"]),
        (
            '[models.a]\npath = "/a"\ngpu_ids = [0, -1]',
            ["models.a.gpu_ids has '-1'", "from 0 to 9999", "GPU- or MIG-", "such as [0, 1]"],
        ),
        ('[models.a]\npath = "/a"\ngpu_ids = "0,1"', ["models.a.gpu_ids has '0,1'"]),
        ('[models.a]\npath = "/a"\ngpu_ids = ["00"]', ["models.a.gpu_ids has '00'"]),
        ('[models.a]\npath = "/a"\ngpu_ids = ["cuda:0"]', ["has 'cuda:0', which is neither"]),
        ('[models.a]\npath = "/a"\ngpu_ids = [1, "1"]', ["has '1' 2 times: name a GPU once"]),
        (
            '[models.a]\npath = "/a"\ngpu_ids = [true]',
            ["models.a.gpu_ids must be a list of numbers or strings, got [True]"],
        ),
        ('[models.a]\npath = "/a"\ngpu_ids = { a = 1 }', ["must be a list of numbers or"]),
        (
            '[models.a]\npath = "/a"\ndevices = 4\ngpu_ids = [2, 3]',
            ["gpu_ids names 2 GPUs (2, 3), but devices is 4", "name at least 4", "at most 2"],
        ),
        ('[models.a]\npath = "/a"\nprefix_cache = "all"', ["'all'", "single"]),
        (
            '[models.a]\npath = "/a"\ndeterministic = 1',
            ["deterministic must be true or false", "1"],
        ),
        ("[models.a]\npath = 3", ["models.a.path must be a string"]),
        ('[models.a]\npath = "/a"\nwithin = "/"', ["unknown key 'within'"]),
        ('[models."../a"]\npath = "/a"', ["'../a'", "the name must not be a path"]),
        ('[models."a\\u0000"]\npath = "/a"', ["the name must be printable text"]),
        (
            '[models.a]\npath = "/a"\npin = true\nkeep_alive = "5m"',
            ["models.a: pin = true", "keep_alive is 300"],
        ),
        ('[models.a]\npath = "/a"\ncounting = 3', ["models.a.counting must be a table"]),
        ('[models.a]\npath = "/a"\ncounting = {x = 1}', ["models.a.counting: unknown key 'x'"]),
        ('[models.a]\npath = "/a"\ncounting = {fault = "nap"}', ["fault is 'nap'", "'segfault'"]),
        ('[models.a]\npath = "/a"\ncounting = {fault_in = "bed"}', ["fault_in is 'bed'"]),
        ('[models.a]\npath = "/a"\nmemory_limit = "much"', ['such as "4GB"']),
        ("[pool]\nstep_limit = 0", ["step_limit is 0", "from 0.1"]),
        ('[models.a]\npath = "/a"\ncounting = {step_us = -1}', ["step_us is -1"]),
        ('[models.a]\npath = "/a"\nkeep_alive = nan', ["keep_alive"]),
        ('[pool]\nqueue_limit = "many"', ["pool.queue_limit must be an integer"]),
        ("[pool]\nqueue_limit = true", ["pool.queue_limit must be an integer"]),
        ("[pool]\nqueue_limit = 1.5", ["pool.queue_limit must be an integer"]),
        ("[pool]\nqueue_limit = 0", ["from 1 to"]),
        ("[pool]\ndeadline = nan", ["pool.deadline"]),
        ("[pool]\ndeadline = true", ["pool.deadline must be a time"]),
        ('[pool]\nqueue_bytes = "4XB"', ["must be a size"]),
        ("[pool]\nqueue_bytes = -4096", ["pool.queue_bytes"]),
        ("[pool]\nfront = 3", ["pool.front must be a list of strings"]),
        ("[pool]\nfront = [3]", ["pool.front must be a list of strings"]),
        ('[pool]\nfront = ["tcp://0.0.0.0:5555"]', ["pool.front", "tcp://0.0.0.0:5555"]),
        ("[pool]\nrun_dir = 3", ["pool.run_dir must be a string"]),
        ('[pool]\nlog_format = "xml"', ["'xml'", "json"]),
        ('[pool]\nmodels_dir = "/nowhere/at/all"', ["there is no folder /nowhere/at/all"]),
        (
            '[pool]\nmetrics_admin_token = "/t"',
            ["metrics_admin_token needs pool.metrics on the loopback interface", "got ''"],
        ),
        (
            '[pool]\nmetrics = "0.0.0.0:9464"\nmetrics_admin_token = "/t"',
            ["pool.metrics_admin_token", "got '0.0.0.0:9464'", "not encrypted", "ssh -L"],
        ),
        ("[pool", ["is not TOML"]),
    ],
)
def test_an_error_names_the_key_its_value_and_what_it_must_be(
    file: Path, text: str, words: list[str]
) -> None:
    message = refused(file, text)
    assert all(word in message for word in words), message


SEVERAL = """
[pol]
[pool]
queue_limti = 3
deadline = "soon"
front = ["tcp://0.0.0.0:7200"]
models_dir = "/nowhere/at/all"
[models.a]
pth = "/a"
replicas = 0
[models.b]
path = 3
counting = { x = 1, step_us = -1 }
[keys.alice]
role = "king"
[keys.bob]
role = "client"
public = "short"
"""


def test_all_that_is_wrong_is_told_at_once(file: Path) -> None:
    """Each wrong setting is reported as if it were the only one.

    No error is reported that only follows from another error.
    """
    file.write_text(SEVERAL)
    with pytest.raises(ConfigError) as caught:
        load(file)
    wanted = [
        "unknown key 'pol'; did you mean 'pool'?",
        "pool: unknown key 'queue_limti'; did you mean 'queue_limit'?",
        "pool.deadline must be a time",
        "pool.models_dir: there is no folder /nowhere/at/all",
        "pool.front: 'tcp://0.0.0.0:7200'",
        "models.a: unknown key 'pth'; did you mean 'path'?",
        "models.a.replicas is 0, must be from 1 to 64",
        "models.b.path must be a string, got 3",
        "models.b.counting: unknown key 'x'",
        "models.b.counting.step_us is -1, must be from 0 to 1000000000",
        "keys.alice.role is 'king'",
        "keys.alice.public is missing",
        "keys.bob.public is 'short'",
    ]
    problems = caught.value.problems
    assert len(problems) == len(wanted), problems
    assert all(words in problem for problem, words in zip(problems, wanted, strict=True)), problems
    assert str(caught.value) == "\n  ".join(["13 settings are wrong:", *problems])


def test_a_batch_without_a_place_for_prompts_is_refused_before_a_worker_loads(file: Path) -> None:
    """The settings are refused when they are read.

    Otherwise a reload would end running workers, and the new workers could not load the model.
    """
    model = '[models.a]\npath = "builtin:demo"\n'
    for settings in ("batch = 8", "batch = 12\nsequences = 12"):
        file.write_text(f"{model}{settings}")
        with pytest.raises(ConfigError, match=r"models\.a\.batch is (8|12) tokens, must be more"):
            load(file)
    file.write_text(f"{model}batch = 9")
    assert load(file).models["a"].batch == 9


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config .*missing\.toml"):
        load(tmp_path / "missing.toml")


def test_a_file_that_is_no_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(file)


# ---- units ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (3, 3.0),
        (1.5, 1.5),
        ("7", 7.0),
        ("250ms", 0.25),
        ("5m", 300.0),
        ("1.5h", 5400.0),
        ("-1", -1.0),
        (" 2s ", 2.0),
    ],
)
def test_times(value: Any, result: float) -> None:
    assert seconds(value, "x") == result


@pytest.mark.parametrize("value", ["", "5d", "m", "1e3", "5 m", None, True, [], b"5"])
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(ConfigError, match="x must be a time"):
        seconds(value, "x")


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (5, 5),
        ("5", 5),
        ("4GB", 4 * 10**9),
        ("512MiB", 2**29),
        ("1.5 kb", 1500),
        ("2gib", 2**31),
    ],
)
def test_sizes(value: Any, result: int) -> None:
    assert size(value, "x") == result


@pytest.mark.parametrize("value", ["", "-1", "4TB", "GB", 1.5, None, True, []])
def test_what_is_no_size(value: Any) -> None:
    with pytest.raises(ConfigError, match="x must be a size"):
        size(value, "x")


# ---- folders and workers -------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:9464", "[::1]:0", "localhost:9464"])
def test_the_token_of_the_status_page_is_a_file(file: Path, address: str) -> None:
    file.write_text(f'[pool]\nmetrics = "{address}"\nmetrics_admin_token = "/t"\n')
    assert load(file).metrics_admin_token == Path("/t")


def test_paths_are_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert loaded(file, '[pool]\nrun_dir = "~/run"\n').run_dir == Path("/home/ann/run")
    assert loaded(file, '[pool]\nrun_dir = "run"\n').run_dir == Path.cwd() / "run"


def test_the_default_run_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert load(None).run_dir == tmp_path / "mlxpool"
    monkeypatch.setenv("HOME", "/home/ann")
    for nowhere in ("", "/nowhere/at/all"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", nowhere)
        assert load(None).run_dir == Path("/home/ann/.mlxpool/run")


def test_the_run_directory_is_made_for_us_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "run"
    check_run_dir(run_dir)
    check_run_dir(run_dir)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert (run_dir / "logs").is_dir()
    assert list((run_dir / "logs").iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_run_directory_that_others_may_only_read_becomes_ours_alone(
    tmp_path: Path, mode: int
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    check_run_dir(run_dir)
    assert run_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_run_directory_that_others_may_write_to(tmp_path: Path, mode: int) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    pattern = f"has the mode 0{mode:o}.*must be 0700: chmod 700 {run_dir}"
    with pytest.raises(ConfigError, match=pattern):
        check_run_dir(run_dir)


def test_a_run_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the wrong owner, not the mode, which only the owner can change."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    owner = pwd.getpwuid(run_dir.stat().st_uid).pw_name
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(ConfigError) as caught:
        check_run_dir(run_dir)
    text = str(caught.value)
    assert f"belongs to the user {owner} (" in text and f"runs as {2**31 - 7}" in text
    assert "mode" not in text


@pytest.mark.parametrize("name", ["run", "run/logs"])
def test_a_run_directory_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / name).write_text("a file")
    with pytest.raises(ConfigError, match="give another with --run-dir"):
        check_run_dir(tmp_path / "run")


def test_what_a_worker_is_told_comes_back() -> None:
    counting = Counting(step_us=7, fault="gil")
    spec = ModelConfig(path="/a", counting=counting, scaling=Scaling(max=3))
    config = WorkerConfig("ipc:///x", "m/0", "token", "m", spec, "json", 5, 6, 2)
    assert WorkerConfig.from_environment(config.to_environment()) == config


def test_an_empty_variable_is_not_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("MLXPOOL_RUN_DIR", "")
    assert load(None).run_dir == tmp_path / "mlxpool"
