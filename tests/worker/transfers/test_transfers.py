"""Tests transfers of arrays between host and device: complete, in order, in reused memory."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from mlxpool.worker.transfers import downloads  # noqa: E402
from mlxpool.worker.transfers.downloads import Download, Downloads  # noqa: E402
from mlxpool.worker.transfers.shared_array import SETS, SharedArray  # noqa: E402
from mlxpool.worker.transfers.uploads import (  # noqa: E402
    SharedTable,
    Uploads,
    upload_copy,
    upload_table,
)

NUMBERS = [
    np.arange(7, dtype=np.int32) - 3,
    np.array([[1.5, -0.0], [np.inf, 3e-40]], dtype=np.float32),
    np.array([2**32 - 1, 0], dtype=np.uint32),
    np.zeros((0,), dtype=np.int32),
]


@pytest.mark.usefixtures("machine")
def test_it_works() -> None:
    assert downloads.works()


@pytest.mark.parametrize("size", [1, 4096])
def test_uploads_have_the_numbers_of_the_host(size: int) -> None:
    """Uploaded arrays equal the host's arrays, even if they are larger than the reused memory."""
    uploads = Uploads(size)
    for _ in range(2 * SETS):
        uploads.begin()
        for given in NUMBERS:
            array, plain = uploads(given), upload_copy(given)
            assert (array.dtype, array.shape) == (plain.dtype, plain.shape)
            if given.size:
                assert np.array_equal(np.array(array), given)


@pytest.mark.parametrize("way", ["copied", "uploaded", "shared", "shared, but a long head"])
def test_a_table_goes_behind_its_head(way: str) -> None:
    head = np.array([-1, 1] * (500 if "long" in way else 1), dtype=np.int32)
    uploads, shared = Uploads(4), SharedTable(4, 3)
    uploads.begin()
    for number in range(3):
        lines = shared.lines if "shared" in way else np.empty((4, 3), dtype=np.int32)
        lines[:] = np.arange(12, dtype=np.int32).reshape(4, 3) - 10 * number
        upload = upload_copy if way == "copied" else uploads
        table = upload_table(upload, head, lines[:2], shared if "shared" in way else None)
        assert table.dtype == mx.int32 and table[: head.size].tolist() == head.tolist()
        assert table[head.size :].tolist() == [n - 10 * number for n in range(6)]


def test_a_pass_in_flight_keeps_its_numbers() -> None:
    uploads = Uploads(8)
    passes = []
    for number in range(SETS - 1):
        uploads.begin()
        passes.append([uploads(np.full((5,), 10 * number + n, dtype=np.int32)) for n in range(4)])
    for number, arrays in enumerate(passes):
        for n, array in enumerate(arrays):
            assert array.tolist() == [10 * number + n] * 5


def test_taken_numbers_are_written_before_the_array_is_computed() -> None:
    uploads = Uploads(64)
    uploads.begin()
    numbers, array = uploads.take(5)
    result = array + 1
    numbers[:] = range(5)
    assert result.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("size", [1, 4096])
def test_downloads_have_the_numbers_of_the_device(size: int) -> None:
    owner = Downloads(size)
    for salt in range(3):
        given = [mx.arange(5) + salt, mx.ones((3, 2)) * salt, mx.array([2**31], dtype=mx.uint32)]
        flying = [owner.begin(given), owner.begin(given[::-1])]
        for download, arrays in zip(flying, (given, given[::-1]), strict=True):
            mx.eval(download.done)
            for array, numbers in zip(arrays, download.read(), strict=True):
                assert array.tolist() == numbers.tolist()


@pytest.mark.usefixtures("machine")
def test_what_was_read_stays_when_the_memory_is_used_again() -> None:
    owner = Downloads(8)
    arrays = []
    for number in range(2 * SETS):
        download = owner.begin([mx.full((4,), number, dtype=mx.int32)])
        mx.eval(download.done)
        arrays += download.read()
    assert [array.tolist() for array in arrays] == [[n] * 4 for n in range(2 * SETS)]


@pytest.mark.usefixtures("machine")
def test_numbers_are_there_when_the_device_has_written_them() -> None:
    owner, memories = Downloads(), [SharedArray(1000) for _ in range(SETS)]
    for number in range(2 * SETS):
        tokens, into = mx.full((3,), number, dtype=mx.int32), memories[number % SETS]
        download = Download(owner, into, [tokens, tokens + 1])
        mx.eval(download.done)
        into.numbers[1] = downloads.NOT_THERE
        assert download.arrived() is None, "one of them is on its way"
        into.numbers[1] = number
        numbers = download.arrived()
        assert numbers is not None and numbers.tolist() == [number] * 3
        assert [array.tolist() for array in download.read()] == [[number] * 3, [number + 1] * 3]


def test_memory_that_is_freed_is_not_kept_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory is freed, the driver's advice to keep this memory on the host is withdrawn.

    MLX reuses the memory for operations, which would otherwise read it over the bus.
    """
    advised: list[tuple[int, int, int]] = []

    class Driver:
        @staticmethod
        def cuMemAdvise(address: Any, size: Any, advice: int, device: int) -> None:
            advised.append((address.value, size.value, advice))

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver)
    shared = SharedArray(4096)
    place = shared.numbers.ctypes.data, shared.numbers.nbytes
    assert advised == [(*place, 3), (*place, 5)]
    del shared
    gc.collect()
    assert advised[2:] == [(*place, 4), (*place, 6)]
