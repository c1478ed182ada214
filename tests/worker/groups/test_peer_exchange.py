"""Tests how ranks connect their GPUs; if one rank fails, no rank uses peer memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from mlxpool.worker.groups import peer_exchange  # noqa: E402
from mlxpool.worker.groups.peer_exchange import (  # noqa: E402
    NO_HANDLE,
    NO_IDENTITY,
    connect,
)
from mlxpool.worker.groups.peer_memory import (  # noqa: E402
    HANDLE_BYTES,
    IDENTITY_BYTES,
    CudaPeerMemory,
    PeerMemoryError,
)
from mlxpool.worker.groups.peer_sums import BufferShape, Limits, PeerSums  # noqa: E402
from support import simt  # noqa: E402
from support.peer_ranks import FakePeerMemory  # noqa: E402

LIMITS = Limits(2**12, 2**14)
SHAPE = BufferShape.of(2, LIMITS, lines=False)
IDENTITY = bytes(IDENTITY_BYTES - 1) + b"2"  # the identity of rank 1's GPU


def shape_of(lines: bool) -> BufferShape:
    return BufferShape.of(2, LIMITS, lines=lines)


class Others:
    """The Agreement that rank 0 gets in a test; it simulates rank 1.

    Rank 1 has the given buffer handle and gives the given answers. `told` has what rank 0 has sent.
    """

    rank, ranks = 0, 2

    def __init__(
        self, handle: bytes, answers: Sequence[int] = (1, 1), identity: bytes = IDENTITY
    ) -> None:
        """A rank 1 with the given buffer handle, GPU identity and answers.

        Its first answer is always 1 (NVLink connects the GPUs). `answers` are the following
        answers. All later answers are 1 (yes).
        """
        self._handle, self.answers, self._identity = handle, [1, *answers], identity
        self.told: list[bytes | int] = []
        self.memory: FakePeerMemory | None = None  # the memory of rank 0
        self.held: list[tuple[int, int]] = []  # rank 0's allocated and mapped buffers, by question

    def gathered(self, own: bytes) -> list[bytes]:
        """Returns the bytes of both ranks: `own` and rank 1's identity or handle."""
        self.told.append(own)
        return [own, self._identity if len(own) == IDENTITY_BYTES else self._handle]

    def least(self, number: int) -> int:
        """Returns the lesser of rank 0's number and rank 1's next answer."""
        self.told.append(number)
        if self.memory is not None:
            self.held.append((len(self.memory.allocated), len(self.memory.opened)))
        return min(number, self.answers.pop(0) if self.answers else 1)


def right(sums: PeerSums) -> bool:
    """A trial of the sums that always succeeds."""
    return True


@pytest.fixture
def other() -> bytes:
    """The handle of rank 1."""
    return (2**40).to_bytes(HANDLE_BYTES, "little")


def test_every_rank_maps_the_buffers_of_the_others(other: bytes) -> None:
    memory, others = FakePeerMemory(), Others(other)
    sums = connect(others, lambda: memory, shape_of, right)
    (own,) = memory.allocated
    assert others.told == [memory.identity(), 0, own.to_bytes(HANDLE_BYTES, "little"), 1, 1]
    assert not sums.shape.lines
    assert memory.opened == [2**40]
    assert (sums.rank, sums.lost) == (0, None)
    assert memory.allocated[own].nbytes >= SHAPE.size


@pytest.mark.parametrize(
    ("own", "told_there", "there", "lines"),
    [(True, 1, IDENTITY, True), (True, 0, IDENTITY, False), (False, 1, IDENTITY, False),
     (True, 1, NO_IDENTITY, False)],
    ids=["everywhere", "not there", "not here", "unknown"],
)  # fmt: skip
def test_lines_are_written_where_nvlink_connects_all(
    other: bytes, own: bool, told_there: int, there: bytes, lines: bool
) -> None:
    others, memory = Others(other, identity=there), FakePeerMemory(nvlink=own)
    others.answers[0] = told_there
    assert connect(others, lambda: memory, shape_of, right).shape.lines == lines
    assert others.told[1] == int(own and there != NO_IDENTITY)


def _no_driver() -> Any:
    raise PeerMemoryError("NVIDIA's driver is not installed")


@pytest.mark.parametrize(
    ("memory", "handle", "answers", "told", "why"),
    [
        (None, None, (), (), "not installed"),
        (FakePeerMemory(identity=0), None, (), (), "cuDeviceGetUuid"),
        (FakePeerMemory(exports=False), None, (), (), "cuIpcGetMemHandle"),
        (FakePeerMemory(), NO_HANDLE, (), (), "rank 1 cannot share"),
        (FakePeerMemory(opens=False), None, (1,), (0,), "cuIpcOpenMemHandle"),
        (FakePeerMemory(), None, (0,), (1,), "another rank cannot map"),
        (FakePeerMemory(), None, (1, 0), (1, 1), "another rank cannot add up"),
    ],
    ids=[
        "no driver",
        "no identity",
        "no export",
        "none there",
        "no map",
        "no map there",
        "no sums there",
    ],
)
def test_what_fails_on_one_rank_fails_on_all(
    other: bytes,
    memory: FakePeerMemory | None,
    handle: bytes | None,
    answers: Sequence[int],
    told: Sequence[int],
    why: str,
) -> None:
    """If one rank fails, both take part in the exchange up to that point, then free their memory.

    Before a rank frees its memory, it waits for one more answer of the other rank, which has then
    unmapped the memory.
    """
    others = Others(other if handle is None else handle, answers)
    others.memory = memory
    with pytest.raises(PeerMemoryError, match=why):
        connect(others, _no_driver if memory is None else lambda: memory, shape_of, right)
    assert others.told[1] == 0 and others.told[3:] == [*told, 1], "the other rank waits for no more"
    known = memory is not None and memory.number > 0
    assert (others.told[0] != NO_IDENTITY) == known
    exports = known and memory is not None and memory.exports
    assert (others.told[2] != NO_HANDLE) == exports
    if memory is not None:
        assert others.held[-1] == (int(known), 0), (
            "unmapped, and not freed before the others have unmapped"
        )
        assert memory.allocated == {} and memory.opened == []


def _without_compiler(sums: PeerSums) -> bool:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        (lambda sums: False, "wrong numbers"),
        (_without_compiler, "do not work here: no compiler"),
    ],
)
def test_sums_that_fail_here_are_used_nowhere(other: bytes, trial: Any, why: str) -> None:
    others = Others(other)
    with pytest.raises(PeerMemoryError, match=why):
        connect(others, FakePeerMemory, shape_of, trial)
    assert others.told[3:] == [1, 0, 1]


def test_a_rank_whose_arrays_have_no_room_says_so_to_the_others(
    other: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without room answers 0, so that the other ranks do not wait for it without end."""

    def fails(*given: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate 4096 bytes")

    monkeypatch.setattr(peer_exchange, "PeerSums", fails)
    others, memory = Others(other), FakePeerMemory()
    with pytest.raises(PeerMemoryError, match=r"do not work here: \[malloc\]"):
        connect(others, lambda: memory, shape_of, right)
    assert others.told[3:] == [1, 0, 1]
    assert memory.allocated == {} and memory.opened == []


def test_a_rank_that_does_not_come_to_the_trial_is_named(
    other: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_exchange, "TRIAL_BOUND", 0.01)
    memory = FakePeerMemory()
    elsewhere = memory.allocate(SHAPE.size)
    others = Others(memory.export(elsewhere))
    with simt.simulated(), pytest.raises(PeerMemoryError, match="rank 1 did not join"):
        connect(others, lambda: memory, shape_of)


# ---- the driver ----------------------------------------------------------------------------------


def value_at(reference: Any, kind: type[Any]) -> Any:
    """Returns the number to which an argument of a call refers."""
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents


class Driver:
    """Stands for the libraries libcuda and NVML: records its calls.

    The function whose name is `fails` returns an error.
    """

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls, self.named = fails, list[str](), list[str]()
        self.status = 0  # status of the link between two GPUs; 0: it exists

    def __getattr__(self, name: str) -> Any:
        if name == "cuMissing":
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuGetErrorName":
                value_at(
                    arguments[1], ctypes.c_char_p
                ).value = b"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
                return 0
            if name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
                value_at(arguments[0], ctypes.c_uint64).value = 4096
            if name == "cuDeviceGetUuid_v2":
                ctypes.memset(arguments[0], 5, IDENTITY_BYTES)
            if name == "nvmlDeviceGetHandleByUUID":
                self.named.append(arguments[0].decode())
            if name == "nvmlDeviceGetP2PStatus":
                assert arguments[2] == 2, "NVLink"
                value_at(arguments[3], ctypes.c_int).value = self.status
            if name == "cuIpcGetMemHandle":
                ctypes.memset(arguments[0], 7, HANDLE_BYTES)
            if name == "cuIpcOpenMemHandle_v2":
                assert bytes(arguments[1].bytes) == b"\7" * HANDLE_BYTES
            return int(name == self.fails)

        return call


def test_the_driver_allocates_exports_and_maps() -> None:
    driver = Driver()
    memory = CudaPeerMemory(driver)  # type: ignore[arg-type]
    address = memory.allocate(2**21)
    handle = memory.export(address)
    assert (address, handle) == (4096, b"\7" * HANDLE_BYTES)
    assert memory.open(handle) == 4096
    memory.close(4096)
    memory.free(4096)
    counts = [driver.calls.count(f"cuCtx{what}Current_v2") for what in ("Push", "Pop")]
    assert counts == [5, 5]
    assert "cuMemsetD8_v2" in driver.calls, "flags of another program would be taken for ours"


@pytest.mark.parametrize("fails", ["cuMemsetD8_v2", "cuCtxSynchronize"])
def test_memory_that_cannot_be_cleared_is_freed(fails: str) -> None:
    driver = Driver()
    memory = CudaPeerMemory(driver)  # type: ignore[arg-type]
    driver.fails = fails
    with pytest.raises(PeerMemoryError, match=fails):
        memory.allocate(2**21)
    assert driver.calls.count("cuMemFree_v2") == 1
    counts = [driver.calls.count(f"cuCtx{what}Current_v2") for what in ("Push", "Pop")]
    assert counts == [1, 1]


def test_nvml_says_whether_nvlink_connects_two_gpus() -> None:
    driver = Driver()
    memory = CudaPeerMemory(driver, driver)  # type: ignore[arg-type]
    assert memory.identity() == b"\5" * IDENTITY_BYTES
    assert memory.over_nvlink(bytes(range(16)))
    assert driver.named == [
        "GPU-05050505-0505-0505-0505-050505050505",
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
    ]
    assert driver.calls.count("nvmlInit_v2") == driver.calls.count("nvmlShutdown") == 1
    assert not memory.over_nvlink(memory.identity()), "one GPU"
    driver.status = 1
    assert not memory.over_nvlink(bytes(range(16)))


@pytest.mark.parametrize(
    "fails", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetP2PStatus"]
)
def test_what_nvml_does_not_know_is_no_nvlink(fails: str) -> None:
    driver = Driver(fails)
    memory = CudaPeerMemory(driver, driver)  # type: ignore[arg-type]
    assert not memory.over_nvlink(bytes(16))
    assert driver.calls.count("nvmlShutdown") == int(fails != "nvmlInit_v2")


def test_without_nvml_there_is_no_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CudaPeerMemory(Driver())  # type: ignore[arg-type]

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not memory.over_nvlink(bytes(16))


def test_an_error_of_the_driver_has_its_name() -> None:
    driver = Driver(fails="cuIpcOpenMemHandle_v2")
    memory = CudaPeerMemory(driver)  # type: ignore[arg-type]
    with pytest.raises(PeerMemoryError, match=r"_v2 failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
        memory.open(b"\7" * HANDLE_BYTES)
    assert driver.calls[-1] == "cuCtxPopCurrent_v2"


def test_a_machine_without_a_driver_has_no_peer_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(PeerMemoryError, match=r"not installed: libcuda\.so\.1"):
        CudaPeerMemory()


def test_a_link_that_the_driver_does_not_know_is_none() -> None:
    """A rank answers 0 if the driver fails, because the other ranks wait for its answer."""

    def fails(identity: bytes) -> bool:
        raise PeerMemoryError("cuDeviceGetUuid_v2 failed")

    identities = [bytes([rank + 1]) * IDENTITY_BYTES for rank in range(2)]
    asked: list[int] = []

    def least(number: int) -> int:
        asked.append(number)
        return number

    agreement: Any = SimpleNamespace(rank=0, ranks=2, gathered=lambda own: identities, least=least)
    memory: Any = SimpleNamespace(over_nvlink=fails)
    assert not peer_exchange._over_nvlink(agreement, memory, identities[0])
    assert asked == [0]
