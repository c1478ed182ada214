"""Tests that compiled kernels are stored in MLX's cache folder, under MLX's names."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import kernel_builder, kernel_cache, nvrtc, row_ops  # noqa: E402
from mlxpool.worker.kernels.kernel_cache import KernelText  # noqa: E402
from mlxpool.worker.system.compile_locks import compile_lock  # noqa: E402
from mlxpool.worker.system.load_clock import LoadClock  # noqa: E402
from support import simt  # noqa: E402

ON_GPU = mx.cuda.is_available()
TEXT = KernelText(
    "mlxpool_add", ("x", "slots", "one"), ("out", "count"), "// head\n", "// slots_shape\n{}"
)
KINDS = ((mx.bfloat16, True), (mx.int32, True), (mx.float32, False))
OUTPUTS = (mx.float16, mx.uint32)
SHAPES = [(2, 3), (1,)]
CODE = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

// head
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_mlxpool_add(
    const __nv_bfloat16* x,
    const int32_t* slots,
    const __grid_constant__ Shape slots_shape,
    const float* one,
    __half* out,
    uint32_t* count) {
// slots_shape
{}
}

} // namespace mlx::core::cu
"""
HASH = """#include <functional>
#include <string>
extern "C" unsigned long hash(const char* text, unsigned long size) {
  return std::hash<std::string>{}(std::string(text, size));
}
"""


class Compiled:
    """A fake of NVIDIA's compiler that records its calls."""

    version, architecture = "13.0", "sm_90a"

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.error = error

    def machine_code(self, kernel: str, code: str) -> tuple[bytes, str, str]:
        self.asked.append(code)
        if self.error is not None:
            raise self.error
        return b"machine code", kernel, "_Zmangled"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Compiled], None]]:
    """Yields a function that stores TEXT, compiled by a given compiler, in the folder `cache`."""
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "cache"))
    kernel_cache.build_key.cache_clear()

    def done(compiler: Compiled) -> None:
        monkeypatch.setattr(kernel_cache, "compiler_here", lambda: compiler)
        kernel_cache.compile_to_disk.cache_clear()
        call = kernel_cache.with_disk_cache(TEXT, lambda _: lambda **given: given)
        x, slots, scale = mx.zeros((2,), mx.bfloat16), mx.zeros((3,), mx.int32), mx.array(1.0)
        for _ in range(2):
            given = call(
                inputs=[x, slots, scale],
                output_shapes=SHAPES,
                output_dtypes=[*OUTPUTS],
                grid=(1, 1, 1),
            )
            assert set(given) == {"inputs", "output_shapes", "output_dtypes", "grid"}

    yield done
    kernel_cache.compile_to_disk.cache_clear()
    kernel_cache.build_key.cache_clear()


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Yields a list that gets the name and code of each kernel compiled in this process."""
    kernels: list[tuple[str, str]] = []

    def in_process(compiler: Any, kernel: str, code: str) -> tuple[bytes, str, str]:
        kernels.append((kernel, code))
        return b"machine code", kernel, "_Zmangled"

    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "compiler_here", Compiled)
    monkeypatch.setattr(nvrtc, "in_process", in_process)
    caches = (kernel_cache.module_of, kernel_cache.compile_to_disk, kernel_cache.build_key)
    for cache in caches:
        cache.cache_clear()
    yield kernels
    for cache in caches:
        cache.cache_clear()


def inputs() -> list[Any]:
    """Returns arrays of zeros, one for each kernel argument in KINDS."""
    return [mx.zeros((2,) if dimensions else (), dtype=dtype) for dtype, dimensions in KINDS]


def stored(folder: Path) -> dict[str, bytes]:
    """Returns the compiled kernels in the cache of `folder`, by file name."""
    files = (path for path in (folder / "cache").iterdir() if path.is_file())
    return {path.name: path.read_bytes() for path in files}


def test_mlx_is_given_a_short_text_with_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX gets a short text, which includes the kernel's header and source from files.

    It has the same parameters as the whole text and, if MLX compiles it, gives the same machine
    code.
    """
    text = replace(
        TEXT,
        header="// a header\n" * 1000,
        source="// slots_shape one_ndim\n" + "// a source\n" * 1000 + "out[0] = slots_shape[1];",
    )
    assert kernel_cache.shortened(text) is text, "without a compiler MLX gets the code itself"
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "compiler_here", Compiled)
    short = kernel_cache.shortened(text)
    assert kernel_cache.shortened(text) == short, "in each process the same"
    code = kernel_cache.kernel_code(short, KINDS, OUTPUTS)
    assert len(code) < 1000
    for parameter in ("slots_shape", "x_shape", "x_ndim", "one_ndim"):
        parameters = code[: code.index(") {")]
        whole = kernel_cache.kernel_code(text, KINDS, OUTPUTS)
        assert (parameter in parameters) == (parameter in whole[: whole.index(") {")])
    if simt.nvidia() is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed, which compiles kernels on Linux")
    assert simt.machine_code(short, KINDS, OUTPUTS) == simt.machine_code(text, KINDS, OUTPUTS)


def test_without_a_folder_mlx_is_given_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(kernel_cache, "compiler_here", Compiled)
    assert kernel_cache.shortened(TEXT) is TEXT


def test_the_kernel_code_equals_that_of_mlx() -> None:
    assert kernel_cache.kernel_code(TEXT, KINDS, OUTPUTS) == CODE


def test_the_hash_equals_std_hash_of_libstdcxx(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("a C++ compiler is not installed, whose std::hash this is compared with")
    (tmp_path / "hash.cpp").write_text(HASH)
    library = tmp_path / "hash.so"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "hash.cpp")]
    subprocess.run(command, check=True)
    theirs = ctypes.CDLL(str(library)).hash
    theirs.restype, theirs.argtypes = ctypes.c_ulong, [ctypes.c_char_p, ctypes.c_ulong]
    for size in (*range(40), 4095, 4096, 4099):
        text = bytes((size + 31 * at) % 256 for at in range(size))
        assert kernel_cache.string_hash(text) == theirs(text, size)


def test_machine_code_is_stored_once(store: Callable[[Compiled], None], tmp_path: Path) -> None:
    compiler = Compiled()
    store(compiler)
    store(compiler)  # as another process does
    assert compiler.asked == [CODE]
    given = kernel_cache.kernel_code(kernel_cache.shortened(TEXT), KINDS, OUTPUTS)
    name = f"custom_kernel_mlxpool_add_{kernel_cache.string_hash(given.encode()):x}"
    kernels = b"mlx::core::cu::custom_kernel_mlxpool_add\t_Zmangled\n"
    mark = hashlib.sha256(b"machine code").hexdigest()
    listed = kernels + f"# {mark}\n".encode()  # MLX reads only lines with a tab
    assert stored(tmp_path) == {f"{name}.ptx": b"machine code", f"{name}.txt": listed}


@pytest.mark.parametrize("damage", ["txt gone", "ptx gone", "ptx empty", "txt of another"])
def test_a_damaged_file_is_stored_again(
    store: Callable[[Compiled], None], tmp_path: Path, damage: str
) -> None:
    store(Compiled())
    kind, how = damage.split(" ", 1)
    (path,) = (tmp_path / "cache").glob(f"*.{kind}")
    whole = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(b"" if how == "empty" else b"# 0\n")
    compiler = Compiled()
    store(compiler)
    assert compiler.asked == [CODE] and path.read_bytes() == whole


def test_after_an_upgrade_in_place_nothing_is_stored_under_the_old_name(
    store: Callable[[Compiled], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_cache.build_key()
    monkeypatch.setattr(kernel_cache, "_texts", lambda: "other texts")
    compiler = Compiled()
    store(compiler)
    assert compiler.asked == [CODE] and stored(tmp_path) == {}


def test_without_write_access_nothing_is_compiled(
    store: Callable[[Compiled], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    compiler = Compiled()
    store(compiler)
    assert compiler.asked == []


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"MLX_PTX_CACHE_DIR": "/a", "TMPDIR": "/b"}, "/a"),
        ({"TMP": "/c", "TEMP": "/d"}, "/c/mlx/VERSION/ptx"),
        ({}, "/tmp/mlx/VERSION/ptx"),
    ],
)
def test_the_folder_is_that_of_mlx(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], where: str
) -> None:
    for name in ("MLX_PTX_CACHE_DIR", "TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert kernel_cache.cache_folder() == Path(where.replace("VERSION", version("mlx")))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")
    with pytest.raises(OSError, match="MLX_PTX_CACHE_DIR is empty"):
        kernel_cache.cache_folder()


@pytest.mark.parametrize(
    "error", [RuntimeError("no such type"), AttributeError("nvrtcGetCUBIN"), OSError("gone")]
)
def test_mlx_compiles_where_we_cannot(
    store: Callable[[Compiled], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    with caplog.at_level(logging.INFO):
        store(Compiled(error))
    assert stored(tmp_path) == {}
    assert f"MLX compiles our kernel mlxpool_add by itself: {error}" in caplog.text
    assert len(caplog.records) == 1


def test_a_file_is_complete_or_absent(
    store: Callable[[Compiled], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    store(Compiled())
    assert stored(tmp_path) == {}


def test_a_folder_that_cannot_be_made_raises_nothing(
    store: Callable[[Compiled], None], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    store(Compiled())


def test_the_build_key_changes_with_kernels_and_mlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernel_cache.build_key()
    for path in kernel_cache.CUDA_FOLDER.glob("*.cu*"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(kernel_cache, "CUDA_FOLDER", tmp_path)
    kernel_cache.build_key.cache_clear()
    assert kernel_cache.build_key() == before
    (tmp_path / "rms_norm.cu").write_text((tmp_path / "rms_norm.cu").read_text() + "// changed\n")
    kernel_cache.build_key.cache_clear()
    assert kernel_cache.build_key() != before
    monkeypatch.undo()
    monkeypatch.setattr(kernel_cache, "version_of", lambda _: "0.33.0")
    kernel_cache.build_key.cache_clear()
    assert kernel_cache.build_key() != before
    kernel_cache.build_key.cache_clear()


def test_collected_kernels_are_compiled_together(
    compiled: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Each kernel is compiled once, or never if it is on disk.

    Kernels of trials are compiled immediately.
    """
    moves: list[int] = []
    given = inputs()
    for _ in range(2):  # the second time the kernel is on disk
        with kernel_cache.collecting() as jobs:
            for _ in range(3):
                call = kernel_cache.with_disk_cache(TEXT, lambda _: lambda **given: given)
                arguments = call(inputs=given, output_shapes=SHAPES, output_dtypes=OUTPUTS)
                assert arguments["inputs"] is given
            with kernel_cache.compiling():
                assert not kernel_cache.is_collecting()
        assert not kernel_cache.is_collecting() and len(jobs) == 3
        kernel_cache.compile_together(jobs, lambda: moves.append(1))
        assert [code for _, code in compiled] == [CODE]
    assert moves == [1]
    assert len(list(tmp_path.glob("*.ptx"))) == 1


def test_trials_are_rehearsed_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal lists the kernels of a trial without calling them; an error in it is ignored."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    call = kernel_cache.with_disk_cache(
        TEXT, lambda _: lambda **given: pytest.fail("it was called")
    )

    def trial() -> bool:
        out, count = call(inputs=inputs(), output_shapes=SHAPES, output_dtypes=OUTPUTS)
        assert (out.shape, out.dtype, count.dtype) == ((2, 3), *OUTPUTS)
        assert out.sum().item() == 0
        raise IndexError("zeros are not what it expects")

    with kernel_cache.rehearsing() as jobs:
        assert kernel_builder.kernel_works("adding", trial) is True
    assert jobs == [kernel_cache.KernelJob(TEXT, KINDS, OUTPUTS)]
    assert not kernel_cache.is_rehearsing() and not kernel_cache.is_collecting()


def test_a_kernel_that_many_layers_call_is_hashed_once(
    compiled: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[bytes] = []
    read: list[Path] = []
    hash_of, intact = kernel_cache.string_hash, kernel_cache.is_intact

    def counted_hash(text: bytes) -> int:
        hashed.append(text)
        return hash_of(text)

    def counted_read(path: Path) -> bool:
        read.append(path)
        return intact(path)

    monkeypatch.setattr(kernel_cache, "string_hash", counted_hash)
    monkeypatch.setattr(kernel_cache, "is_intact", counted_read)
    texts = [replace(TEXT, name=name) for name in ("mlxpool_add", "mlxpool_other")]
    calls = [kernel_cache.with_disk_cache(text, lambda _: lambda **given: given) for text in texts]
    with kernel_cache.collecting() as jobs:
        for _ in range(100):  # layers
            for call in calls:
                call(inputs=inputs(), output_shapes=SHAPES, output_dtypes=OUTPUTS)
    kernel_cache.compile_together(jobs, lambda: None)
    assert len(hashed) == len(set(hashed)) == len(compiled) == 2
    assert len(read) == 4  # for the list of missing kernels, and before each compilation
    for call in calls:
        call(inputs=inputs(), output_shapes=SHAPES, output_dtypes=OUTPUTS)
    assert len(hashed) == 2 and len(compiled) == 2


@pytest.mark.usefixtures("compiled")
def test_a_kernel_that_does_not_compile_is_left_to_its_first_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def in_process(compiler: Any, kernel: str, code: str) -> tuple[bytes, str, str]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(nvrtc, "in_process", in_process)
    with caplog.at_level("INFO"):
        job = kernel_cache.KernelJob(TEXT, KINDS, OUTPUTS)
        kernel_cache.compile_together([job], lambda: None)
    assert "a kernel is compiled when it is needed: no memory" in caplog.text
    assert not list(tmp_path.glob("*.ptx"))


def test_what_another_process_compiles_is_awaited_and_not_compiled_again(
    compiled: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Another process holds the lock of the first kernel until this process has skipped it.

    This process compiles the second kernel, and then finds the first one in the cache.
    """
    job = kernel_cache.KernelJob(TEXT, KINDS, OUTPUTS)
    other = kernel_cache.KernelJob(replace(TEXT, name="mlxpool_other"), KINDS, OUTPUTS)
    path = tmp_path / kernel_cache.module_of(job)[0]
    with ExitStack() as theirs:
        assert theirs.enter_context(compile_lock(path, wait=False))
        moves: list[int] = []

        def moved() -> None:
            moves.append(1)
            if len(moves) == 2:  # both kernels were looked at
                kernel_cache.write_entry(path, b"theirs", "kernel", "_Zmangled")
                theirs.close()

        kernel_cache.compile_together([job, other], moved)
    assert len(moves) == 3
    assert [kernel for kernel, _ in compiled] == ["mlx::core::cu::custom_kernel_mlxpool_other"]
    assert path.read_bytes() == b"theirs"
    assert not list(tmp_path.glob("*.lock"))


def test_nvidias_compiler_compiles_a_kernel_and_reports_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if simt.nvidia() is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed, which compiles kernels on Linux")
    texts: list[KernelText] = []

    def kept(text: KernelText, make: Any) -> Any:
        texts.append(text)
        return make(text)

    monkeypatch.setattr(kernel_builder, "with_disk_cache", kept)
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: lambda **_: None)
    kernel = row_ops._norm_kernel.__wrapped__(2048, 256, 1e-5, mx.bfloat16)
    kernel(inputs=[mx.zeros(1)] * 3, output_shapes=[], output_dtypes=[])
    kinds = tuple((mx.bfloat16, True) for _ in range(3))
    assert simt.compiled(texts[0], kinds, (mx.bfloat16, mx.bfloat16)) > 1000
    wrong = KernelText("mlxpool_wrong", ("x",), ("out",), "", "out[0] = nothing;")
    with pytest.raises(RuntimeError, match=r'NVRTC_ERROR_COMPILATION.*"nothing" is undefined'):
        simt.compiled(wrong, kinds[:1], (mx.float32,))


def test_without_a_gpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        assert kernel_cache.compiler_here() is not None
    else:
        monkeypatch.setattr(mx.cuda, "is_available", lambda: True)  # as in a simulation
        assert kernel_cache.compiler_here.__wrapped__() is None


def test_kernels_of_mlx_are_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the kernels compiled during this load only MLX's own are logged, not ours."""
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    for name, age in (("gather", 5), ("scatter", 3), ("old", 90), ("custom_kernel_mlxpool_add", 4)):
        (tmp_path / f"{name}.ptx").touch()
        os.utime(tmp_path / f"{name}.ptx", (time.time() - age,) * 2)
    monkeypatch.setattr(kernel_cache, "LOAD", clock := LoadClock())
    clock.begin(0.0)
    with caplog.at_level(logging.INFO):
        kernel_cache.log_mlx_kernels(60.0)
    (record,) = caplog.records
    assert vars(record)["seconds_ago"] == ["gather 5.0", "scatter 3.0"]
    assert clock.counts == {"mlx_kernels": 2}


def test_an_unknown_version_of_mlx_compiles_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_cache, "architecture", lambda: "sm_90a")
    monkeypatch.setattr(kernel_cache, "version_of", lambda _: "1.2.0")
    with caplog.at_level(logging.INFO):
        assert kernel_cache.compiler_here.__wrapped__() is None
    assert "compiled by MLX in each process: MLX 1.2.0 is not 0.32.*" in caplog.text

    monkeypatch.setattr(kernel_cache, "version_of", lambda _: "")
    assert kernel_cache.compiler_here.__wrapped__() is None


def test_headers_are_found_beside_mlx_or_in_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "include" / "cuda_fp16.h").touch()
    assert tmp_path / "include" in nvrtc.includes()
    monkeypatch.setattr(Path, "exists", lambda _: False)
    with pytest.raises(OSError, match=f"headers are in none of .*{tmp_path}"):
        nvrtc.includes()


@pytest.mark.skipif(not ON_GPU, reason="MLX has no CUDA GPU here")
def test_mlx_reads_the_stored_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX fails on a file with invalid machine code, which proves that it reads these files."""
    x = mx.ones((1, 96), mx.bfloat16)
    stored: list[Path] = []
    write = kernel_cache.write_entry

    def spoiled(path: Path, code: bytes, *names: str) -> None:
        write(path, b"nonsense", *names)
        stored.append(path)

    monkeypatch.setattr(kernel_cache, "write_entry", spoiled)
    with pytest.raises(
        RuntimeError, match="Failed to load compiled custom_kernel_mlxpool_rms_norm"
    ):
        mx.eval(row_ops.add_norm(x, x, x[0], 0.0009765625))
    for path in stored:
        path.unlink()
    assert stored
