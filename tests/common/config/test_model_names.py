"""Names of models, and the models in a models folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxpool.common.config.model_names import MAX_NAME, fault_of_name, outside_target, scan


@pytest.mark.parametrize(
    "name",
    ["demo", "org/name", "llama3:8b", "registry.example/owner/model:tag", "Ünï cödé", "a..b", "7"],
)
def test_what_may_be_a_name(name: str) -> None:
    assert fault_of_name(name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("/etc/passwd", "slash"),
        ("a/", "slash"),
        ("a//b", "slash"),
        ("..", "not be a path"),
        ("../x", "not be a path"),
        ("a/../../b", "not be a path"),
        (".hidden", "not be a path"),
        ("a\\b", "not be a path"),
        ("a\0b", "printable"),
        ("a\nb", "printable"),
        ("\udcff", "printable"),
        ("\u202edemo", "printable"),
        ("x" * (MAX_NAME + 1), "201 bytes"),
        ("ü" * 101, "202 bytes"),
        ("a/b/c/d/e", "5 parts"),
        ("org/7", "slots"),
    ],
)
def test_what_may_not(name: str, words: str) -> None:
    assert words in (fault_of_name(name) or "")


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_folders_one_and_two_levels_deep(tmp_path: Path) -> None:
    for name in ("b", "a", "org/one", "org/two", "org/deep/er", ".hidden", ".cache/x", "org/.git"):
        model(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text("{}")
    assert list(scan(tmp_path)) == ["a", "b", "org/one", "org/two"]
    assert scan(tmp_path)["org/one"] == tmp_path / "org" / "one"


def test_a_models_own_folders_are_no_models(tmp_path: Path) -> None:
    model(tmp_path / "a")
    model(tmp_path / "a" / "original")
    assert list(scan(tmp_path)) == ["a"]


def test_what_cannot_be_a_name_hides_nothing_else(tmp_path: Path) -> None:
    """A folder whose name cannot be a model's is skipped, so the list has the other models."""
    model(tmp_path / "good")
    for name in (b"bad\xff", b"bad\n", b"bad\\"):
        model(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)))
    assert list(scan(tmp_path)) == ["good"]


def test_a_list_that_fits_into_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.common.config.model_names.MAX_SCANNED", 2)
    for name in "cab":
        model(tmp_path / name)
    assert list(scan(tmp_path)) == ["a", "b"]


def test_links_that_lead_nowhere_hide_nothing_else(tmp_path: Path) -> None:
    model(tmp_path / "good")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    assert list(scan(tmp_path)) == ["good"]


def test_a_link_inside_the_border(tmp_path: Path) -> None:
    model(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a" / "loop")
    assert list(scan(tmp_path)) == ["a", "b"]
    assert outside_target(tmp_path / "a", tmp_path) is None
    assert outside_target(tmp_path / "b", tmp_path) is None


def test_a_link_out_of_the_border(tmp_path: Path) -> None:
    outside = model(tmp_path / "outside")
    inside = tmp_path / "models"
    model(inside / "a")
    (inside / "b").symlink_to(outside)
    assert outside_target(inside / "b", inside) == outside.resolve()
    (inside / "a" / "model.safetensors").symlink_to(tmp_path / "weights")
    assert outside_target(inside / "a", inside) == (tmp_path / "weights").resolve()


def test_a_border_that_is_reached_by_a_link(tmp_path: Path) -> None:
    model(tmp_path / "real" / "a")
    (tmp_path / "models").symlink_to(tmp_path / "real")
    assert outside_target(tmp_path / "models" / "a", tmp_path / "models") is None


def test_a_folder_with_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "org" / "two", tmp_path / "none"):
        folder.mkdir(parents=True)
    (tmp_path / "one" / "q4.gguf").write_bytes(b"")
    (tmp_path / "org" / "two" / "q4.gguf").write_bytes(b"")
    assert list(scan(tmp_path)) == ["one", "org/two"]
