"""Parts of tensors are read from files without reading the other parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker.weights import cut_reads  # noqa: E402
from mlxpool.worker.weights.cut_reads import CutReads, TensorPlaces  # noqa: E402
from mlxpool.worker.weights.cuts import Cut  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    numbers = mx.random.normal((6, 10, 8))
    mx.save_safetensors(
        str(path),
        {
            "f32": numbers,
            "bf16": numbers.astype(mx.bfloat16),
            "u32": (numbers * 100).astype(mx.uint32),
            "u8": (numbers * 10).astype(mx.uint8),
            "row": numbers[0, 0],
        },
    )
    return path


@pytest.mark.parametrize("runs", [1, 2**20], ids=["alone", "with whole rows"])
@pytest.mark.parametrize("name", ["f32", "bf16", "u32", "u8"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_part_is_that_of_the_tensor(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, axis: int, runs: int
) -> None:
    monkeypatch.setattr(cut_reads, "RUN_BYTES", runs)
    monkeypatch.setattr(cut_reads, "BUFFER_BYTES", 100)  # a read has several pieces
    whole = mx.load(str(file))[name]
    half = whole.shape[axis] // 2
    for cut in (Cut(axis, 0, half), Cut(axis, half, whole.shape[axis])):
        array = CutReads(file).read(name, whole.shape, cut)
        assert array is not None and array.dtype == whole.dtype
        assert array.shape == cut.shape_of(whole.shape)
        assert mx.array_equal(array, cut.of(whole))


def test_zeros_take_the_place_of_a_tensor(file: Path) -> None:
    array = CutReads(file).read("row", (8,), Cut(zeros=True))
    assert array is not None and not array.any().item() and array.shape == (8,)
    assert mx.array_equal(array, Cut(zeros=True).of(mx.ones((8,))))


def test_a_tensor_that_has_changed_is_not_read(file: Path) -> None:
    reads = CutReads(file)
    assert reads.read("f32", (6, 10, 9), Cut(0, 0, 3)) is None
    assert reads.read("other", (6, 10, 8), Cut(0, 0, 3)) is None
    assert reads.read("__metadata__", (6,), Cut(0, 0, 3)) is None


def test_a_file_that_ends_early_is_named(file: Path) -> None:
    reads, places, names = CutReads(file), TensorPlaces(file), mx.load(str(file))
    file.write_bytes(file.read_bytes()[:-100])
    last = max(names, key=lambda name: _end(places, name))
    place = places.find(last)
    assert place is not None
    with pytest.raises(ModelLoadFailed, match=r"safetensors cannot be read: the file ends at byte"):
        reads.read(last, place.shape, Cut(0, 0, place.shape[0]))


def _end(places: TensorPlaces, name: str) -> int:
    place = places.find(name)
    return 0 if place is None else place.end


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_reading_a_part_takes_the_memory_of_the_part(tmp_path: Path) -> None:
    """A process reads a quarter of the columns of a file of 256 MiB."""
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"w": mx.zeros((16384, 4096))})
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mlxpool.worker.weights.cut_reads import CutReads\n"
        "from mlxpool.worker.weights.cuts import Cut\n"
        "import mlx.core as mx\n"
        "def peak():\n"
        "    return int(next(l for l in open('/proc/self/status') if 'VmHWM' in l).split()[1])\n"
        "mx.eval(mx.zeros((4,)) + 1)\n"
        "before = peak()\n"
        "part = CutReads(Path(sys.argv[1])).read('w', (16384, 4096), Cut(1, 1024, 2048))\n"
        "mx.eval(part)\n"
        "print(peak() - before)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    kib = int(process.stdout)
    assert 60 * 1024 < kib < 170 * 1024, "the part of 64 MiB, as numpy's and as MLX's, and a buffer"


def test_numbers_are_those_of_the_file(file: Path) -> None:
    array = CutReads(file).read("f32", (6, 10, 8), Cut(2, 4, 8))
    np.testing.assert_array_equal(np.array(array), np.array(mx.load(str(file))["f32"])[..., 4:])
