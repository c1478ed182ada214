"""Model folders whose weights are one block of random numbers, again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.bench import checkpoint, large_checkpoint  # noqa: E402
from mlxpool.bench.our_engine import OurEngine  # noqa: E402


def weights(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("model-*.safetensors"))
    return {name: one for file in files for name, one in mx.load(str(file)).items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(large_checkpoint, "BLOCK", 4097)
    return large_checkpoint.write(tmp_path / "large", "tiny", max_shard_bytes=40_000, threads=3)


def test_it_has_the_tensors_and_the_scales_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """But for the numbers themselves."""
    drawn = weights(checkpoint.write(tmp_path / "drawn", "tiny"))
    found = weights(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    assert {name: one.shape for name, one in found.items()} == {
        name: one.shape for name, one in drawn.items()
    }
    for name, one in found.items():
        ours, theirs = (x.astype(mx.float32) for x in (one, drawn[name]))
        assert one.dtype == mx.bfloat16
        if one.ndim > 1:
            assert abs(ours.std().item() / theirs.std().item() - 1) < 0.1, name
        assert abs(ours.mean().item() - theirs.mean().item()) < 0.02, name


def test_no_two_rows_of_a_tensor_are_alike(folder: Path) -> None:
    for name, one in weights(folder).items():
        rows = {tuple(row) for row in one.tolist()} if one.ndim > 1 else {name}
        assert len(rows) == (len(one) if one.ndim > 1 else 1), name


def test_it_is_loaded_and_computed_as_any_other(folder: Path) -> None:
    OurEngine(folder).steps([5, 9])()
