"""Simulates CUDA on a CPU: compiles kernels as C++ with simt.h and runs them.

It is slow. It checks the logic of a kernel's source, that is the work of each thread and the
synchronisation of threads, but not speed. If NVIDIA's compiler is installed, it must accept each
source.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpool.worker.kernels import device, kernel_cache, nvrtc, token_grid
from mlxpool.worker.kernels.kernel_cache import KernelText

HERE = Path(__file__).parent
# The C++ standard of NVIDIA's compiler; with a later standard g++ reads twice as much of the
# library.
FLAGS = (
    "-std=c++17", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing"
)  # fmt: skip
COMPILER = shutil.which("c++") or shutil.which("g++")
HOPPER = "sm_90a"
TYPES = {
    mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.int32: "int",
    mx.uint32: "unsigned", mx.uint8: "unsigned char", mx.int8: "signed char", mx.int64: "long",
}  # fmt: skip
REPLACED = ("machine.cuh",)  # files that simt.h replaces
WHY = {
    2: "threads wait for others that never come",
    3: "a copy is not aligned",
    4: "the kernel has ended the program",
}
TOGETHER = "GridBarrier"  # in the source of kernels whose thread blocks wait for each other
KEPT_DAYS = 14  # days that an unused library is kept, see `_remove_old`
resident = True  # True: all thread blocks of a TOGETHER kernel are resident at once


@contextmanager
def simulated() -> Iterator[set[str]]:
    """Replaces CUDA kernels by simulated kernels; MLX reports a CUDA GPU.

    Yields the names of the kernels that ran.
    """
    if COMPILER is None:
        pytest.skip("a C++ compiler is not installed, which builds a simulated GPU")
    with pytest.MonkeyPatch.context() as patch:
        called: set[str] = set()
        patch.setattr(mx.fast, "cuda_kernel", functools.partial(kernel, called))
        patch.setattr(mx.cuda, "is_available", lambda: True)
        patch.setattr(kernel_cache, "shortened", lambda text: text)
        forget_kernels()
        mx.disable_compile()
        try:
            yield called
        finally:
            mx.enable_compile()
            forget_kernels()


@contextmanager
def token_grid_machine() -> Iterator[set[str]]:
    """Provides a GPU: the real one, or a simulated one with three multiprocessors.

    The simulated GPU also runs the kernels for one token. Yields the names of the simulated kernels
    that ran.
    """
    if mx.cuda.is_available():
        yield set()
        return
    with pytest.MonkeyPatch.context() as patch, simulated() as called:
        patch.setattr(device, "multiprocessors", lambda: 3)
        patch.setattr(token_grid, "MIN_MULTIPROCESSORS", 2)
        yield called


def forget_kernels() -> None:
    """Clears the caches of compiled kernels and of their trials."""
    from mlxpool.worker import kernels
    from mlxpool.worker.attention.in_pool import block_tables, kernel_trials
    from mlxpool.worker.decode_pass import addresses, trial
    from mlxpool.worker.decode_pass import kernel as pass_kernel
    from mlxpool.worker.groups import peer_sums
    from mlxpool.worker.kernels.recurrent import gated_delta
    from mlxpool.worker.layers import delta_rule
    from mlxpool.worker.transfers import downloads

    modules = [value for value in vars(kernels).values() if hasattr(value, "__file__")]
    others = [gated_delta, delta_rule, kernel_trials, block_tables, peer_sums, downloads]
    others += [addresses, pass_kernel, trial]
    for module in [*modules, *others]:
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def kernel(
    called: set[str],
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
) -> Callable[..., list[Any]]:
    """Replaces mx.fast.cuda_kernel: a call computes immediately and adds the name to `called`."""
    text = KernelText(name, tuple(input_names), tuple(output_names), header, source)

    def call(
        *,
        inputs: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[Any],
    ) -> list[Any]:
        called.add(name.removeprefix("mlxpool_"))
        if ensure_row_contiguous:
            inputs = [mx.contiguous(array) for array in inputs]
        mx.eval(inputs)
        for array, its_name in zip(inputs, input_names, strict=True):
            if f"{its_name}_strides" not in source and not _whole(array):
                raise RuntimeError(
                    f"{name}: {its_name} is not contiguous, but the kernel reads it as contiguous"
                )
        outs = [
            mx.full(shape, math.nan, dtype=dtype) if mx.issubdtype(dtype, mx.floating)
            else mx.full(shape, 7 if mx.issubdtype(dtype, mx.unsignedinteger) else -7, dtype=dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]  # fmt: skip
        arrays = [*inputs, *outs]
        mx.eval(arrays)
        views = [_view(array) for array in arrays]
        rank = _together.rank if _together is not None else 0
        run = _built(text, tuple(array.dtype for array in arrays), rank)
        compiled(text, tuple((x.dtype, x.ndim > 0) for x in inputs), tuple(output_dtypes))
        blocks = [-(-all_ // size) for all_, size in zip(grid, threadgroup, strict=True)]
        arguments = (
            (ctypes.c_void_p * len(views))(*(view.data for view in views)),
            (ctypes.c_void_p * len(views))(*(ctypes.addressof(view.shape) for view in views)),
            (ctypes.c_void_p * len(views))(*(ctypes.addressof(view.strides) for view in views)),
            (ctypes.c_uint * 3)(*blocks),
            ctypes.c_uint(threadgroup[0]),
            ctypes.c_long(shared_memory),
            ctypes.c_bool(resident and _is_together(text)),
        )

        def launch() -> None:
            why = run(*arguments)
            del views[:]  # the memory is no longer needed
            if why:
                raise RuntimeError(f"{name}: {WHY.get(why, why)}")

        if _together is None:
            launch()
        else:
            _together.launches[rank].append(launch)
        return outs

    return call


class Ranks:
    """The kernel launches of several GPUs that wait for each other, see `together`."""

    def __init__(self, count: int) -> None:
        self.rank = 0
        self.launches: list[list[Callable[[], None]]] = [[] for _ in range(count)]

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """Kernels that are called in the `with` block run on the simulated GPU `rank`."""
        self.rank = rank
        yield
        self.rank = 0

    def run(self) -> None:
        """Runs the launches of each GPU in order, and all GPUs at the same time."""
        with ThreadPoolExecutor(len(self.launches)) as threads:
            for done in [threads.submit(_in_order, launches) for launches in self.launches]:
                done.result()


def _in_order(launches: Sequence[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


_together: Ranks | None = None


@contextmanager
def together(count: int) -> Iterator[Ranks]:
    """Collects the kernels that the block calls; at its end launches them on `count` GPUs together.

    The results of a call are not computed before the block's end; until then only kernels may use
    them.
    """
    global _together
    _together = Ranks(count)
    try:
        yield _together
        _together.run()
    finally:
        _together = None


@functools.cache
def nvidia(*, optimises: bool = True) -> nvrtc.Compiler | None:
    """Returns NVIDIA's compiler, if it is installed as a package.

    It compiles the same sources to machine code. With `optimises` False it takes a third of the
    time.
    """
    packages = Path(sysconfig.get_path("platlib")) / "nvidia" / "cu13"
    for library in sorted((packages / "lib").glob("libnvrtc.so.*")):
        compiler = nvrtc.Compiler(
            ctypes.CDLL(str(library)), HOPPER, [packages / "include"], kernel_cache.HEADERS
        )
        if not optimises:
            compiler.options.append(b"--Ofast-compile=max")
        return compiler
    return None


@functools.cache
def compiled(
    text: KernelText, inputs: tuple[kernel_cache.InputKind, ...], outputs: tuple[Any, ...]
) -> int:
    """Compiles a kernel with NVIDIA's compiler, if it is installed.

    Returns the size of the machine code in bytes, 0 without the compiler. Raises RuntimeError with
    the compiler's message.
    """
    if nvidia() is None:
        return 0
    return len(machine_code(text, inputs, outputs, optimises=False))


def machine_code(
    text: KernelText,
    inputs: Sequence[kernel_cache.InputKind],
    outputs: Sequence[Any],
    *,
    optimises: bool = True,
) -> bytes:
    """Returns the machine code of a kernel from NVIDIA's compiler, which must be installed.

    Raises RuntimeError with the compiler's message.
    """
    compiler = nvidia(optimises=optimises)
    assert compiler is not None, "NVIDIA's compiler is not installed"
    code = kernel_cache.kernel_code(text, inputs, outputs)
    name = kernel_cache.NAMESPACE + kernel_cache.kernel_name(text)
    return compiler.machine_code(name, code)[0]


@functools.cache
def _built(text: KernelText, dtypes: tuple[Any, ...], rank: int) -> Any:
    """Returns the `run` of a kernel's library.

    Each GPU has its own library, since threads and blocks are static variables of a library.
    """
    code = _code(text, dtypes)
    library = _folder() / f"{hashlib.sha256(code.encode()).hexdigest()[:20]}.so"
    if library.exists():  # another process or an earlier run has built it
        library.touch()
    else:
        source = library.with_suffix(f".{os.getpid()}.cpp")
        source.write_text(code)
        _compile("-shared", f"-I{_folder()}", str(source), to=library, what=text.name)
    if rank:
        copy = library.with_suffix(f".{rank}.so")
        if not copy.exists():
            shutil.copyfile(library, part := copy.with_suffix(f".{os.getpid()}.so"))
            part.replace(copy)
        library = copy
    return ctypes.CDLL(str(library)).run


def _compile(*arguments: str, to: Path, what: str) -> None:
    """Compiles to the file `to`, which other processes see only when it is complete.

    Raises RuntimeError.
    """
    part = to.with_suffix(f".{os.getpid()}{to.suffix}")
    done = subprocess.run(
        [str(COMPILER), *FLAGS, *arguments, "-o", str(part)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{what} is not C++:\n{done.stderr[-3000:]}")
    part.replace(to)


@functools.cache
def _folder() -> Path:
    """Returns the folder of compiled libraries, with simt.h precompiled.

    It is in the user's cache folder, for all later runs. Its name is a hash of the compiler, the
    flags and the text of simt.h; a library's name is a hash of the kernel's text. A cache folder
    that others may write to, or that cannot be made, is not used. Then this process has its own
    folder, and removes it at its end.
    """
    folder = _kept_folder() or _own_folder()
    header = folder / "simt.h"
    if not header.exists():
        shutil.copyfile(HERE / "simt.h", part := folder / f"simt.{os.getpid()}.h")
        part.replace(header)
    precompiled = folder / "simt.h.gch"
    if not precompiled.exists():
        _compile("-x", "c++-header", str(header), to=precompiled, what="simt.h")
    return folder


def _own_folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="mlxpool-simt-")
    _own_folder.kept = folder  # type: ignore[attr-defined]  # until the process ends
    return Path(folder.name)


def _kept_folder() -> Path | None:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home folder
        return None
    kept = home / "mlxpool-tests" / "simulated-kernels"
    folder = kept / _compiler_key()
    try:
        for parent in (kept.parent, kept, folder):
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = parent.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
    except OSError:
        return None
    _remove_old(kept)
    return folder


def _compiler_key() -> str:
    version = subprocess.run([str(COMPILER), "--version"], capture_output=True, check=True).stdout
    parts = (version, " ".join(FLAGS).encode(), (HERE / "simt.h").read_bytes())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _remove_old(kept: Path) -> None:
    """Removes libraries that were not used for KEPT_DAYS, and folders without libraries."""
    oldest = time.time() - KEPT_DAYS * 86400
    for folder in kept.iterdir():
        for library in folder.glob("*.so"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                if library.stat().st_mtime < oldest:
                    library.unlink()
        with contextlib.suppress(FileNotFoundError):
            if folder.stat().st_mtime < oldest and not any(folder.glob("*.so")):
                shutil.rmtree(folder, ignore_errors=True)


def _code(text: KernelText, dtypes: Sequence[Any]) -> str:
    parameters, assignments = [], []
    names = [*text.inputs, *text.outputs]
    for i, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        const = "const " if i < len(text.inputs) else ""
        parameters.append(f"static {const}{TYPES[dtype]}* {name};")
        assignments.append(f"{name} = (decltype({name}))data[{i}];")
        for kind, number in (("shape", "int"), ("strides", "long")):
            if f"{name}_{kind}" in text.source:
                parameters.append(f"static const {number}* {name}_{kind};")
                assignments.append(f"{name}_{kind} = (const {number}*){kind}[{i}];")
    source = _expanded(text.source, text.header).replace(
        "extern __shared__ uint4 space[];", "uint4* const space = (uint4*)simt::shared;"
    )
    return "\n".join(
        [
            '#include "simt.h"',
            _expanded(_without_products(text), text.header),
            *parameters,
            f"static void body() {{\n{source}\n}}",
            'extern "C" int run(void** data, void** shape, void** strides, const unsigned* grid, '
            "unsigned threads, long bytes, bool together) {",
            *assignments,
            "return simt::launch(body, grid, threads, bytes, together);",
            "}\n",
        ]
    )


@functools.cache
def _is_together(text: KernelText) -> bool:
    """Returns whether the thread blocks of a kernel wait for each other.

    Such a kernel must request its shared memory at the launch. Raises RuntimeError if the source
    declares shared memory, because all simulated thread blocks would then use the same memory.
    """
    source = _expanded(text.header + text.source, text.header)
    if TOGETHER not in source:
        return False
    if "__shared__" in source.replace("extern __shared__", ""):
        raise RuntimeError(
            f"{text.name}: a kernel whose thread blocks wait for each other must not declare static"
            " shared memory"
        )
    return True


def _without_products(text: KernelText) -> str:
    """Returns the header with simt.h's matrix products in place of Hopper's warp-group products."""
    dtype = re.search(r"using N = (\w+);", text.source)

    def ours(found: re.Match[str]) -> str:
        kind = f"{dtype[1] if dtype else 'float'}, {found[2]}"
        arguments = "a0, a1, a2, a3, b" if "a0" in found[1] else "a, b"
        kinds = {"group_mma_columns": "products_columns", "by_lines": "products_by_lines"}
        name = next((ours for part, ours in kinds.items() if part in found[1]), "products")
        return f"{found[1]} {{ {name}<{kind}>(c, {arguments}); }}\n"

    heads = r"__device__ inline (void group_mma\w*\(float \(&c\)\[(\d+)\][^)]*\)) {.*?\n}\n"
    return re.sub(heads, ours, text.header, flags=re.DOTALL)


def _expanded(text: str, header: str) -> str:
    """Returns a source in which includes of the project's files, as in `header`, are expanded.

    Includes of CUDA's files are removed.
    """
    names = dict(re.findall(r'#define (\w+) "(.*)"\n', header))

    def file(found: re.Match[str]) -> str:
        path = Path(found[1] or names[found[2]])
        if path.name in REPLACED:
            return ""
        return _expanded(path.read_text(encoding="utf-8"), header)

    text = re.sub(r'#include (?:"(.*)"|(\w+))\n', file, text)
    return re.sub(r"#include <cuda_.*>\n", "", text)


class _Managed(ctypes.Structure):
    """The fields of DLPack's DLManagedTensor that this module reads."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class View:
    """The address, shape and strides of an array; `capsule` keeps its memory."""

    data: int
    shape: Any
    strides: Any
    capsule: Any


def _whole(array: Any) -> bool:
    view, expected = _view(array), 1
    for size, stride in reversed(list(zip(view.shape, view.strides, strict=True))[: array.ndim]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _view(array: Any) -> View:
    capsule = array.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    managed = _Managed.from_address(pointer(capsule, b"dltensor"))
    count = managed.ndim
    shape = (ctypes.c_int * max(count, 1))(*managed.shape[:count])
    strides = (ctypes.c_long * max(count, 1))(*managed.strides[:count])
    return View(managed.data + managed.offset, shape, strides, capsule)
