"""Tests leftovers of downloads and other systems in a model's folder.

Leftovers are ignored, named in a message, or refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlxpool.common.config.schema import ModelConfig
from mlxpool.worker.diagnose.check import check
from mlxpool.worker.weights.inspect import inspect
from support.worker_checkpoints import refusal_of_worker as refusal
from support.worker_checkpoints import write_checkpoint

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m")


def notes(folder: Path) -> list[str]:
    report = check("m", ModelConfig(path=str(folder)))
    assert report["problems"] == []
    lines: list[str] = report["notes"]
    return lines


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors",
        INDEX,
    ],
)
def test_files_that_are_not_what_their_name_says(folder: Path, name: str) -> None:
    for content, words in (
        (b"", "is empty: download it again"),
        (LFS, "is a pointer of Git LFS"),
        (PAGE, "is a web page"),
        (b"\n\xef\xbb\xbf <?xml version='1.0'?><Error/>"[1:], "is a web page"),
        (b"Entry not found", "holds a server's refusal, 'Entry not found'"),
        (bytes(4096), "begins with zeros"),
        (b"../../blobs/ab12", "holds the path of the file"),
        (b"/annex/objects/SHA256E-s12--ab.json\n", "holds the path of the file"),
        (b"../.git/annex/objects/a/b/c/c", "holds the path of the file"),
        (b"outs:\n- md5: " + b"a" * 32 + b"\n  path: x\n", "holds the path of the file"),
        (b'{"message": "Unauthorized"}', "holds a server's error"),
        (b"PK\x03\x04" + bytes(100), "is a ZIP archive"),
    ):
        (folder / name).write_bytes(content)
        assert f"{folder / name} {words}" in refusal(folder)


def test_a_servers_error_in_json(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"error": "Repository not found"}')
    assert "tokenizer_config.json holds a server's error" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_half_a_file(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    assert name in (message := refusal(folder)) and "download it again" in message


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", INDEX]
)
def test_a_link_without_its_target_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/4d7a")
    assert f"{folder / name} is a link to ../../blobs/4d7a, which is missing" in refusal(folder)


def test_links_into_a_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / str(number))
        file.symlink_to(Path("..", "blobs", str(number)))
    assert notes(folder) == []


def test_byte_order_marks_and_numbers_that_json_has_not(folder: Path) -> None:
    before = inspect(folder)
    for file in folder.glob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"attention_dropout": NaN, ', 1))
    assert notes(folder) == []
    assert inspect(folder).eos_ids == before.eos_ids


LEFT = (
    "._model.safetensors", "._config.json", ".DS_Store", "Thumbs.db", "desktop.ini",
    "original/consolidated.00.pth", "original/params.json", "pytorch_model.bin", "model.gguf",
    "pytorch_model.bin.index.json", ".cache/huggingface/download/config.json.metadata",
    ".gitattributes", "onnx/model.onnx", "additional_chat_templates/._x.jinja",
)  # fmt: skip


def test_what_other_systems_leave_is_ignored(folder: Path) -> None:
    digest = inspect(folder).digest
    for name in LEFT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0\5\26\7" + bytes(20))
    assert notes(folder) == []
    assert inspect(folder).digest == digest


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("consolidated.safetensors", "weights that are not read"),
        ("model (1).safetensors", "weights that are not read"),
        ("model-00001-of-00002.safetensors", "weights that are not read"),
        ("adapter_model.safetensors", "an adapter (LoRA) is not applied"),
        ("adapters.safetensors", "an adapter (LoRA) is not applied"),
        ("model.safetensors.part", "a download was not finished"),
        ("tokenizer.json.tmp", "a download was not finished"),
        (".cache/huggingface/download/x.incomplete", "a download was not finished"),
    ],
)
def test_what_a_model_is_not_made_of_is_told(folder: Path, name: str, words: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "model.safetensors", folder / name)
    digest = inspect(folder).digest
    (note,) = notes(folder)
    assert words in note and name in note
    (folder / name).unlink()
    assert inspect(folder).digest == digest


def test_a_shard_that_no_index_names_is_told(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=2)
    extra = shutil.copy(
        folder / "model-00001-of-00002.safetensors", folder / "model-00003-of-00003.safetensors"
    )
    (note,) = notes(folder)
    assert Path(extra).name in note


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    (folder / INDEX).unlink()
    assert notes(folder) == []
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = refusal(folder)
    assert "has 2 of 3 shards, the shard 'model-00002-of-00003.safetensors' missing" in message
    shutil.copy(
        folder / "model-00001-of-00003.safetensors", folder / "model-00001-of-00001.safetensors"
    )
    assert "has shards of several models, of 1 and 3 files" in refusal(folder)


def test_an_index_of_other_shards_beside_all_weights(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"x": "model-00001-of-00002.safetensors"}}')
    assert "or remove the index if model.safetensors has all weights" in refusal(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_whose_parts_are_still_coming_is_refused(folder: Path, name: str) -> None:
    (folder / f"{name}.aria2").write_bytes(b"\0\1")
    assert f"{name} is not complete: {name}.aria2 beside it" in refusal(folder)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "it has an adapter (LoRA)"),
        (["params.json", "consolidated.safetensors"], "in the form of its makers"),
        (["model.safetensors.part"], "a download was not finished"),
        (["pytorch_model.bin"], "it has PyTorch files"),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_a_folder_that_is_no_model_is_named(
    folder: Path, files: list[str], words: str, config: bool
) -> None:
    (folder / "model.safetensors").unlink()
    if not config:
        (folder / "config.json").unlink()
    for name in files:
        (folder / name).write_text("{}")
    assert words in refusal(folder)


def test_a_repository_of_the_cache_is_no_folder_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    assert "name the model as org/name" in refusal(tmp_path)
