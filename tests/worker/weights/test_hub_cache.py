"""Models in the Hugging Face cache by repository name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.worker.weights import hub_cache
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.locate import find_files
from support.gguf_files import write_gguf
from support.worker_checkpoints import config, random_weights, refusal, write_checkpoint
from support.worker_stores import REVISION, put_in_hub

NAME = "some-org/Some.Model-4bit"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "folder")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_name_means_the_snapshot_of_main(folder: Path, cache: Path) -> None:
    snapshot = put_in_hub(folder, cache, NAME)
    (cache / "models--some-org--Some.Model-4bit" / "snapshots" / "fedcba9876543210").mkdir()
    model_folder = inspect(find_files(NAME))
    assert model_folder.path == snapshot
    assert model_folder.digest == inspect(folder).digest


def test_the_only_snapshot_is_used_without_main(folder: Path, cache: Path) -> None:
    snapshot = put_in_hub(folder, cache, NAME)
    (snapshot.parents[1] / "refs" / "main").unlink()
    assert inspect(find_files(NAME)).path == snapshot
    (snapshot.parent / "fedcba9876543210").mkdir()
    assert "has no refs/main and 2 snapshots: the download is not complete" in refusal(NAME)


def test_a_folder_of_that_name_takes_precedence(folder: Path, cache: Path, tmp_path: Path) -> None:
    put_in_hub(folder, cache, NAME)
    local = write_checkpoint(tmp_path / NAME)
    assert find_files(NAME).where == local.relative_to(tmp_path)


def test_a_model_that_is_not_downloaded(cache: Path) -> None:
    place = cache / "models--some-org--Some.Model-4bit"
    assert f"is not in the Hugging Face cache (looked for {place})" in refusal(NAME)
    assert f"get it with `mlxpool pull {NAME}`" in refusal(NAME)
    assert "some-org/a/b does not exist" in refusal("some-org/a/b")


def test_references_with_a_prefix_mean_the_cache_alone(
    folder: Path, cache: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / NAME)  # a folder with the same name, which hf: ignores
    assert f"get it with `mlxpool pull {NAME}`" in refusal(f"hf:{NAME}")
    snapshot = put_in_hub(folder, cache, NAME)
    assert find_files(f"hf:{NAME}").where == snapshot


@pytest.mark.parametrize(
    "text",
    ["name", "a/b/c", "org/name:", "org/name:model.bin", "org/name:../x.gguf", "org/name:/x.gguf",
     "../name", "org/..", ""],
)  # fmt: skip
def test_texts_that_name_no_model_of_the_hub(text: str, cache: Path) -> None:
    assert "is no model of the hub: write ORG/NAME" in refusal(f"hf:{text}")


def test_a_gguf_file_of_several(tmp_path: Path, cache: Path) -> None:
    several = tmp_path / "several"
    several.mkdir()
    settings = config(hidden_size=64, intermediate_size=96)
    for name in ("a.gguf", "b.gguf"):
        write_gguf(several / name, random_weights(settings), settings)
    snapshot = put_in_hub(several, cache, NAME)
    assert find_files(f"hf:{NAME}:b.gguf").where == snapshot / "b.gguf"
    assert "has 2 models (a.gguf, b.gguf): name one of the files" in refusal(f"hf:{NAME}")
    words = f"without the file c.gguf: get it with `mlxpool pull {NAME}:c.gguf`"
    assert words in refusal(f"hf:{NAME}:c.gguf")


def test_a_download_without_weights_yet(folder: Path, cache: Path) -> None:
    (put_in_hub(folder, cache, NAME) / "model.safetensors").unlink()
    words = f"has no weights: the download is not complete, repeat `mlxpool pull {NAME}"
    assert words in refusal(NAME)


def test_blobs_that_the_repositories_of_a_cache_share(folder: Path, cache: Path) -> None:
    """If the repositories of a cache share blobs, a blob is a link into a common folder."""
    snapshot = put_in_hub(folder, cache, NAME)
    blob = (snapshot / "model.safetensors").resolve()
    shared = cache / "blobs" / "ab" / "abcd"
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to("../../blobs/ab/abcd")
    assert inspect(find_files(NAME)).digest == inspect(folder).digest
    shared.unlink()
    assert f"is a link to {shared}, which is missing" in refusal(NAME)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/huggingface/hub"),
    ],
)
def test_environment_variables_set_the_cache(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache.cache_folder() == Path(expected)


def test_an_incomplete_download(folder: Path, cache: Path) -> None:
    snapshot = put_in_hub(folder, cache, NAME)
    blob = (snapshot / "model.safetensors").resolve()
    blob.unlink()
    assert f"is a link to {blob}, which is missing" in refusal(NAME)
    assert f"repeat `mlxpool pull {NAME}`" in refusal(NAME)
    (snapshot.parents[1] / "refs" / "main").write_text("../../elsewhere")
    assert "refs/main holds '../../elsewhere', must be a revision" in refusal(NAME)
    (snapshot.parents[1] / "refs" / "main").write_text(REVISION[::-1])
    assert f"{REVISION[::-1]} does not exist: the download is not complete" in refusal(NAME)


def test_a_link_that_leads_out_of_the_repository(folder: Path, cache: Path) -> None:
    snapshot = put_in_hub(folder, cache, NAME)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(folder / "config.json")
    words = f"config.json is a link to {folder / 'config.json'}, which is not of '{NAME}': refused"
    assert words in refusal(NAME)
