"""Reading tensors into the memory of a GPU; simulated without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker.weights import cut_reads, device_reads  # noqa: E402
from mlxpool.worker.weights.cuts import Cut  # noqa: E402
from mlxpool.worker.weights.device_reads import DeviceReads  # noqa: E402

pytestmark = pytest.mark.usefixtures("machine")

SMALL_PIECE = 96  # bytes, so that tensors have several pieces


@pytest.fixture
def file(tmp_path: Path) -> Path:
    mx.save_safetensors(str(tmp_path / "one.safetensors"), tensors())
    return tmp_path / "one.safetensors"


def tensors() -> dict[str, Any]:
    numbers = mx.arange(150, dtype=mx.float32).reshape(3, 50) - 70
    return {
        "halves": numbers.astype(mx.bfloat16),
        "floats": numbers / 3,
        "odd": mx.arange(5, dtype=mx.float32).astype(mx.float16),
        "bytes": mx.arange(7, dtype=mx.uint8),
        "packed": mx.arange(40, dtype=mx.uint32).reshape(4, 10),
    }


def test_tensors_are_read_in_pieces(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_reads, "PIECE_BYTES", SMALL_PIECE)
    with DeviceReads(largest=600) as reads:
        opened = reads.open(file)
        arrays = {name: opened.pop(name) for name in tensors()}
    for name, array in tensors().items():
        read = arrays[name]
        assert read is not None and (read.dtype, read.shape) == (array.dtype, array.shape)
        assert bool(mx.array_equal(read, array))


@pytest.mark.parametrize("runs", [1, 2**20], ids=["alone", "with whole rows"])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_are_read_in_pieces(
    file: Path, monkeypatch: pytest.MonkeyPatch, axis: int, runs: int
) -> None:
    """Pieces, and the parts of a piece that threads read, may begin and end inside a row."""
    monkeypatch.setattr(device_reads, "PIECE_BYTES", SMALL_PIECE)
    monkeypatch.setattr(cut_reads, "RUN_BYTES", runs)
    monkeypatch.setattr(cut_reads, "BUFFER_BYTES", 2 * 200 + 1)
    with DeviceReads(largest=600) as reads:
        opened = reads.open_parts(file)
        for name in ("halves", "floats", "packed"):
            whole = tensors()[name]
            cut = Cut(axis, 1, whole.shape[axis] - 1)
            array = opened.read(name, whole.shape, cut)
            assert array is not None and (array.dtype, array.shape) == (
                whole.dtype,
                cut.shape_of(whole.shape),
            )
            assert mx.array_equal(array, cut.of(whole))


def test_what_the_file_has_not_is_none(file: Path) -> None:
    with DeviceReads(largest=600) as reads:
        assert reads.open(file).pop("missing") is None


def test_a_file_that_became_shorter_is_refused(file: Path) -> None:
    with DeviceReads(largest=600) as reads:
        opened = reads.open(file)
        file.write_bytes(file.read_bytes()[:-30])
        with pytest.raises(ModelLoadFailed, match=r"safetensors cannot be read: the file ends"):
            for name in tensors():
                opened.pop(name)


def test_only_a_gpu_reads_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.worker.kernels.device.on_gpu", lambda: True)
    assert device_reads.supported({"BF16", "F32"})
    assert not device_reads.supported({"BF16", "F64"})
    monkeypatch.setattr("mlxpool.worker.kernels.device.on_gpu", lambda: False)
    assert not device_reads.supported({"BF16"})


def test_numbers_are_those_of_numpy(file: Path) -> None:
    with DeviceReads(largest=600) as reads:
        array = reads.open(file).pop("floats")
    assert (np.array(array) == (np.arange(150, dtype=np.float32).reshape(3, 50) - 70) / 3).all()
