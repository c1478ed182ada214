"""Locations, sizes and fingerprints of model files that were not read."""

from __future__ import annotations

from pathlib import Path

from mlxpool.broker.catalogue.scanner import fingerprints, location, weights_bytes
from mlxpool.common.config.schema import ModelConfig
from support.model_inspection import model_folder


def test_fingerprints_change_with_files_and_skip_broken_links(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    first = fingerprints(model)
    assert [name for name, _, _ in first] == ["config.json"]
    (model / "config.json").write_text("{ }")
    assert fingerprints(model) != first
    (model / "gone").symlink_to(tmp_path / "nothing")
    assert [name for name, _, _ in fingerprints(model)] == ["config.json"]
    assert fingerprints(tmp_path / "nothing") == ()
    assert [name for name, _, _ in fingerprints(model / "config.json")] == ["config.json"]


def test_locations_follow_links_and_broken_links_weigh_nothing(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    (tmp_path / "link").symlink_to(model)
    (model / "gone.safetensors").symlink_to(tmp_path / "nothing")
    for path in (model, tmp_path / "link"):
        assert location(ModelConfig(path=str(path))) == str(model.resolve())
    assert location(ModelConfig(path="org/name")) == "org/name"
    assert location(ModelConfig(path="builtin:demo")) == "builtin:demo"
    assert location(ModelConfig(path="builtin:counting")) == ""
    assert weights_bytes(ModelConfig(path=str(model))) == 0


def test_gguf_weighs_what_its_files_do(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(bytes(100))
    assert weights_bytes(ModelConfig(path=str(tmp_path / "m.gguf"))) == 100
    assert weights_bytes(ModelConfig(path=str(tmp_path))) == 100
    (tmp_path / "model.safetensors").write_bytes(bytes(7))  # which the folder means
    assert weights_bytes(ModelConfig(path=str(tmp_path))) == 7


def test_a_worker_needs_the_weights_of_its_draft_model_as_well(tmp_path: Path) -> None:
    model, draft = model_folder(tmp_path / "m"), model_folder(tmp_path / "d")
    (model / "model.safetensors").write_bytes(bytes(100))
    (draft / "model.safetensors").write_bytes(bytes(7))
    paths = {str(draft): 107, "": 100, "builtin:demo": 100, str(tmp_path / "none"): 100}
    for path, size in paths.items():
        found = ModelConfig(path=str(model), draft=path, speculation="auto")
        assert weights_bytes(found) == size
    assert weights_bytes(ModelConfig(path="org/name", draft=str(draft))) == 0  # read later


def test_copies_and_adapters_beside_the_weights_need_no_memory(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    for name in ("consolidated", "adapters", "._model-1", "model-1", "model-2"):
        (model / f"{name}.safetensors").write_bytes(bytes(100))
    assert weights_bytes(ModelConfig(path=str(model))) == 200
    (model / "model.safetensors").write_bytes(bytes(150))
    assert weights_bytes(ModelConfig(path=str(model))) == 150


def test_a_model_that_a_link_takes_from_elsewhere_has_its_own_location(tmp_path: Path) -> None:
    """Else a name that is refused would be served by the workers of one that is allowed."""
    border, outside = tmp_path / "models", model_folder(tmp_path / "outside")
    inside = model_folder(border / "inside")
    (border / "linked").symlink_to(outside)
    (border / "again").symlink_to(inside)
    (model_folder(border / "part") / "model.safetensors").symlink_to(outside / "config.json")
    names = ("linked", "part", "inside", "again")
    found = [location(ModelConfig(str(border / name), within=str(border))) for name in names]
    assert found == ["", "", str(inside.resolve()), str(inside.resolve())]
