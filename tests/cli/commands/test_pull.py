"""`mlxpool pull` against a hub on the loopback, also with the faults of real hubs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from mlxpool.cli.main import FAILED, OK, USAGE, main
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.locate import find_files
from support.model_hub import TOKEN, ModelHub, Repository, folder_of, running_hub
from support.pool import Pool, until
from support.worker_checkpoints import write_checkpoint

NAME = "some-org/Some.Model"
WEIGHTS = "model.safetensors"
Usage = namedtuple("Usage", "total used free")
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("folder") / "model")


@pytest.fixture
def hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """A hub with the model NAME and files of other programs, and an empty cache."""
    others = {"pytorch_model.bin": b"x", "onnx/model.onnx": b"x", ".gitattributes": b"x"}
    with running_hub() as running:
        running.repositories[NAME] = Repository(folder_of(folder) | others)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running
        huggingface_hub.close_session()


@pytest.fixture
def cache(hub: ModelHub, tmp_path: Path) -> Path:
    """The folder of the repository NAME in the cache."""
    return tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"


def refused(output: Output, *words: str, model: str = NAME, code: int = FAILED) -> str:
    """Returns the only line of a pull that fails."""
    assert main(["pull", model, *words]) == code
    captured = output.readouterr()
    assert captured.out == ""
    return captured.err


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_the_files_of_a_model_come_into_the_cache(
    hub: ModelHub, cache: Path, folder: Path, capsys: Output
) -> None:
    assert main(["pull", NAME]) == OK
    captured = capsys.readouterr()
    snapshot = cache / "snapshots" / hub.repositories[NAME].commit
    assert captured.out == f"{snapshot}\n"
    assert captured.err.endswith(f"serve it: mlxpool serve --model Some.Model=hf:{NAME}\n")
    assert files_in(snapshot) == files_in(folder)
    model = inspect(find_files(f"hf:{NAME}"))
    assert (model.path, model.digest) == (snapshot, inspect(folder).digest)
    hub.asked.clear()
    assert main(["pull", f"hf:{NAME}", "--json"]) == OK
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert json.loads(capsys.readouterr().out) == {
        "model": f"hf:{NAME}",
        "path": str(snapshot),
        "files": len(files_in(folder)),
        "size": size,
    }
    assert [path for _, path, *_ in hub.asked] == [f"/api/models/{NAME}"], "all was there"


def test_the_index_says_which_shards_come(
    hub: ModelHub, cache: Path, tmp_path: Path, capsys: Output
) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", shards=2)
    others = {WEIGHTS: b"x", "consolidated.safetensors": b"x"}
    hub.repositories[NAME] = Repository(folder_of(sharded) | others)
    assert main(["pull", NAME]) == OK
    assert files_in(Path(capsys.readouterr().out.strip())) == files_in(sharded)
    assert inspect(find_files(NAME)).digest == inspect(sharded).digest


def test_gguf_files_come_alone_and_split_ones_whole(
    hub: ModelHub, cache: Path, capsys: Output
) -> None:
    parts = [f"Q8/x-0000{number}-of-00002.gguf" for number in (1, 2)]
    names = ["README.md", "config.json", "mmproj.gguf", "x-Q4_0.gguf", *parts]
    hub.repositories[NAME] = Repository({name: name.encode() for name in names})
    error = refused(capsys)
    assert f"name one as {NAME}:FILE: {parts[0]}, x-Q4_0.gguf" in error
    assert "has no file y.gguf; its GGUF models are" in refused(capsys, model=f"{NAME}:y.gguf")
    assert not cache.exists()
    assert main(["pull", f"{NAME}:{parts[1]}"]) == OK
    told_parts = capsys.readouterr()
    snapshot = cache / "snapshots" / hub.repositories[NAME].commit
    assert told_parts.out == f"{snapshot / parts[0]}\n"
    assert told_parts.err.endswith(f" --model Some.Model=hf:{NAME}:{parts[0]}\n")
    assert files_in(snapshot) == set(parts)
    hub.repositories[NAME] = Repository({name: name.encode() for name in names[:4]})
    assert main(["pull", NAME]) == OK
    assert capsys.readouterr().err.endswith(f"=hf:{NAME}:x-Q4_0.gguf\n")
    assert files_in(snapshot) == {*parts, "x-Q4_0.gguf"}


def test_a_connection_that_is_cut_is_taken_up_where_it_was(
    hub: ModelHub, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.repositories[NAME].cuts[WEIGHTS] = 4500
    assert main(["pull", NAME]) == OK
    assert hub.gets(WEIGHTS) == ["", "bytes=4000-"], "whole chunks were kept"
    assert inspect(find_files(NAME)).digest == inspect(folder).digest


def test_an_older_revision_counts_until_all_of_a_newer_one_has_come(
    hub: ModelHub, cache: Path, folder: Path, tmp_path: Path, capsys: Output
) -> None:
    assert main(["pull", NAME]) == OK
    newer = write_checkpoint(tmp_path / "newer", seed=1)
    hub.repositories[NAME] = Repository(folder_of(newer), commit="a" * 40, sent={WEIGHTS: b"x"})
    capsys.readouterr()
    assert "Consistency check failed" in refused(capsys)
    assert inspect(find_files(NAME)).digest == inspect(folder).digest
    hub.repositories[NAME].sent.clear()
    assert main(["pull", NAME]) == OK
    assert (cache / "refs" / "main").read_text() == "a" * 40
    assert inspect(find_files(NAME)).digest == inspect(newer).digest
    assert len(hub.gets("config.json")) == 1, "what both have is not downloaded again"


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
def test_a_file_with_another_hash_is_removed(
    hub: ModelHub, cache: Path, file: str, capsys: Output
) -> None:
    repository = hub.repositories[NAME]
    repository.sent[file] = repository.files[file][:-1] + b"!"
    error = refused(capsys)
    assert f"{file} has another hash than in the hub, and was removed" in error
    assert not (cache / "refs").exists()
    assert file not in files_in(cache / "snapshots" / repository.commit)
    repository.sent.clear()
    assert main(["pull", NAME]) == OK
    assert inspect(find_files(NAME)).digest


def test_what_was_damaged_in_the_cache_comes_again(
    hub: ModelHub, cache: Path, folder: Path, capsys: Output
) -> None:
    assert main(["pull", NAME]) == OK
    blob = (cache / "snapshots" / hub.repositories[NAME].commit / WEIGHTS).resolve()
    blob.write_bytes(b"?" * blob.stat().st_size)
    capsys.readouterr()
    assert "another hash" in refused(capsys)
    assert main(["pull", NAME]) == OK
    assert inspect(find_files(NAME)).digest == inspect(folder).digest


@pytest.mark.parametrize("token", ["", "hf_of-another-account"])
def test_a_gated_repository(
    hub: ModelHub, token: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    hub.repositories[NAME].gated = True
    monkeypatch.setenv("HF_TOKEN", token)
    error = refused(capsys)
    assert f"{NAME} is gated: accept its conditions at {hub.url}/{NAME}, and set HF_TOKEN" in error
    assert TOKEN not in error
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.asked.clear()
    assert main(["pull", NAME]) == OK
    keys = {key for _, path, _, key in hub.asked if not path.startswith("/stored/")}
    assert keys == {f"Bearer {TOKEN}"}
    assert {key for _, path, _, key in hub.asked if path.startswith("/stored/")} == {""}


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_repository_that_is_not_there_or_not_shown(
    hub: ModelHub, token: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert f"{hub.url} has no repository org/none, or shows it to" in refused(
        capsys, model="org/none"
    )


def test_a_token_that_is_not_valid(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    hub.repositories[NAME].gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    assert "answered 401 (Invalid credentials in Authorization header): HF_TOKEN is" in refused(
        capsys
    )


def test_a_hub_that_fails(
    hub: ModelHub, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    hub.status = 503
    assert "answered 503 (the hub is under repair): try again later" in refused(capsys)
    assert not cache.exists()
    hub.status = 200
    hub.repositories[NAME].status = 500
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    assert "answered 500 (the store is under repair): try again later" in refused(capsys)


def test_no_network(hub: ModelHub, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    error = refused(capsys)
    assert error.count("\n") == 1
    assert "http://127.0.0.1:1 cannot be reached" in error and "refused" in error
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(capsys)


def test_without_the_package(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = refused(capsys, code=USAGE)
    assert error.count("\n") == 1 and "pip install 'mlxpool[hub]'" in error
    assert hub.asked == []


@pytest.mark.parametrize("name", ["model", "a/b/c", f"{NAME}:model.bin", f"{NAME}:../x.gguf"])
def test_names_that_are_none(hub: ModelHub, name: str, capsys: Output) -> None:
    error = refused(capsys, model=name, code=USAGE)
    assert f"{name!r} is no model of the hub: write ORG/NAME" in error
    assert hub.asked == []


def test_a_disk_without_room_is_told_before_the_download(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000, 993, 7))
    error = refused(capsys)
    assert "has room for 7 B: make room, or name another folder in HF_HUB_CACHE" in error
    assert [path for _, path, *_ in hub.asked] == [f"/api/models/{NAME}"]


def test_a_disk_that_becomes_full(hub: ModelHub, tmp_path: Path) -> None:
    """A pull fails when the disk is full, which a limit on the size of files simulates."""
    most = len(hub.repositories[NAME].files[WEIGHTS]) - 1

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    done = subprocess.run(
        [sys.executable, "-m", "mlxpool.cli.main", "pull", NAME],
        capture_output=True,
        text=True,
        preexec_fn=bounded,
    )
    assert (done.returncode, done.stdout) == (FAILED, "")
    assert f"no room is left in {tmp_path / 'hub'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_leaves_whole_files_alone(hub: ModelHub, cache: Path, capsys: Output) -> None:
    hub.held[WEIGHTS] = threading.Event()
    pull = [sys.executable, "-m", "mlxpool.cli.main", "pull", NAME]
    with subprocess.Popen(pull, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        until(lambda: hub.gets(WEIGHTS), "the weights are being downloaded")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert (process.returncode, said) == (130, b"")
    assert not list(cache.rglob("*.incomplete"))
    hub.held[WEIGHTS].set()
    assert main(["pull", NAME]) == OK
    assert len(hub.gets("config.json")) == 1


def test_two_pulls_at_once_download_once(
    hub: ModelHub, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    hub.held[WEIGHTS] = threading.Event()
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(main(["pull", NAME]))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()

    def asked() -> int:
        wanted = f"/{NAME}/resolve/{hub.repositories[NAME].commit}/{WEIGHTS}"
        return sum(path == wanted for _, path, *_ in hub.asked)

    until(lambda: asked() == 2, "both pulls ask for the weights")
    hub.held[WEIGHTS].set()
    for thread in threads:
        thread.join()
    assert codes == [OK, OK]
    assert hub.gets(WEIGHTS) == [""]
    assert inspect(find_files(NAME)).digest == inspect(folder).digest


def test_a_pool_names_the_command_and_finds_the_model_after_it(
    hub: ModelHub, tmp_path: Path
) -> None:
    def row() -> dict[str, Any]:
        return next(dict(entry) for entry in pool.ask("models")["models"] if entry["name"] == "m")

    with Pool(tmp_path, f'[models.m]\npath = "hf:{NAME}"\n') as pool:
        until(lambda: row()["error"], "the model is found to be missing")
        done = pool.cli("run", "m", "x")
        assert done.returncode == FAILED
        assert f"get it with `mlxpool pull {NAME}`" in done.stderr
        assert pool.cli("pull", NAME).returncode == OK
        model = until(lambda: (one := row())["type"] and one, "the model is seen")
        assert (model["state"], model["error"]) == ("cold", None)


def test_the_endpoint_may_end_with_a_slash(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{os.environ['HF_ENDPOINT']}/")
    assert main(["pull", NAME]) == OK
