"""Compiles our kernels to disk, into the folder in which MLX looks for compiled kernels.

MLX compiles the kernels of mx.fast.cuda_kernel anew in each process. This takes more than a second
for each of some 40 kernels, mostly for headers that our kernels do not need. But MLX first looks
into its cache folder. So our kernels are compiled here, without these headers, and stored under
MLX's file names: a restarted worker compiles nothing. If this fails, MLX compiles as usual.

MLX hashes a kernel's source at each launch. In a profile of an 8B model in 4 bits with 128 rows,
this took 0.3 ms of a step of 6.8 ms with 232 launches. So MLX gets a short source that includes
files in the cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.worker.kernels import nvrtc
from mlxpool.worker.system.compile_locks import compile_lock
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.versions import version_of

log = logging.getLogger("mlxpool.worker")

MLX_SERIES = "0.32."  # versions of MLX whose file names and kernel parameters are known
CUDA_FOLDER = Path(__file__).parent / "cuda"
TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
}
# The code that MLX puts around a kernel, and replacements of the headers that this code includes,
# with only the parts that our kernels use. A shape of any length is passed as ten numbers.
MLX_PREAMBLE = (
    '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
)
NAMESPACE_START = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
NAMESPACE_END = "\n}\n\n} // namespace mlx::core::cu\n"
NAMESPACE = "mlx::core::cu::"
HEADERS = {
    "mlx/backend/cuda/device/utils.cuh": """#pragma once
using int8_t = signed char; using int16_t = short; using int32_t = int; using int64_t = long;
using uint8_t = unsigned char; using uint16_t = unsigned short; using uint32_t = unsigned;
using uint64_t = unsigned long;
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace mlx::core::cu {
template <typename T> struct Ten {
  T at[10];
  __device__ T operator[](int i) const { return at[i]; }
};
using Shape = Ten<int32_t>;
using Strides = Ten<int64_t>;
}
""",
    "cooperative_groups.h": "#pragma once\nnamespace cooperative_groups {}\n",
}

# Types of an input's additional parameters; a kernel gets only the parameters that its source
# names.
PARAMETERS = {"shape": "Shape", "strides": "Strides", "ndim": "int"}
OUR_PREFIX = "custom_kernel_mlxpool_"  # prefix of the names of our files in MLX's folder

InputKind = tuple[mx.Dtype, bool]  # dtype, and whether the input has dimensions


class KernelText(Struct, frozen=True):
    """The arguments of mx.fast.cuda_kernel."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    source: str


class KernelJob(Struct, frozen=True):
    """A kernel to compile for inputs and outputs of these dtypes."""

    text: KernelText
    inputs: tuple[InputKind, ...]
    outputs: tuple[mx.Dtype, ...]


_collected: list[KernelJob] | None = None  # None: kernels are compiled before their first call
_rehearsed = False  # whether collected kernels return zeros


@contextmanager
def collecting() -> Iterator[list[KernelJob]]:
    """A context in which called kernels are listed, not compiled; nothing may be evaluated in it.

    Yields the list, for `compile_together`.
    """
    global _collected
    jobs: list[KernelJob] = []
    before, _collected = _collected, jobs
    try:
        yield jobs
    finally:
        _collected = before


def is_collecting() -> bool:
    """Returns whether kernel calls are only listed now."""
    return _collected is not None


@contextmanager
def rehearsing() -> Iterator[list[KernelJob]]:
    """A context like `collecting`, in which listed kernels return zeros.

    The zeros may be evaluated. Trials run in the context only to list the kernels that they call;
    the caller ignores the results of the trials.
    """
    global _rehearsed
    before, _rehearsed = _rehearsed, True
    try:
        with collecting() as jobs:
            yield jobs
    finally:
        _rehearsed = before


def is_rehearsing() -> bool:
    """Returns whether kernel calls return zeros now."""
    return _rehearsed


@contextmanager
def compiling() -> Iterator[None]:
    """A context for trials in which called kernels are compiled, also inside of `collecting`."""
    global _collected
    before, _collected = _collected, None
    try:
        yield
    finally:
        _collected = before


def compile_together(jobs: Iterable[KernelJob], on_progress: Callable[[], None]) -> None:
    """Compiles kernels to disk in as many processes as there are cores; NVRTC uses one core.

    If another worker or rank is compiling a kernel, leaves the kernel to that process, and waits
    for the process at the end. Calls `on_progress` after each kernel. A kernel that fails here is
    compiled again before its first call.
    """
    compiler = compiler_here()
    if compiler is None:
        return
    missing = _missing(jobs)
    LOAD.count("compiled_kernels", len(missing))
    with ThreadPoolExecutor(max(1, min(len(missing), os.cpu_count() or 1))) as pool:

        def compiled(paths: Sequence[Path], *, wait: bool) -> Iterator[bool]:
            compile_one = partial(_compile_in_process, compiler, wait=wait)
            for done in pool.map(compile_one, paths, [missing[path] for path in paths]):
                on_progress()
                yield done

        paths = list(missing)
        done = compiled(paths, wait=False)
        left = [path for path, here in zip(paths, done, strict=True) if not here]
        for _ in compiled(left, wait=True):
            pass


def _missing(jobs: Iterable[KernelJob]) -> dict[Path, tuple[str, str]]:
    """Returns the missing files of these kernels, each with the kernel's name and code.

    Passes call a kernel in each layer, but its code is made and hashed once.
    """
    missing: dict[Path, tuple[str, str]] = {}
    for job in dict.fromkeys(jobs):
        with contextlib.suppress(OSError, KeyError):
            file, code = module_of(job)
            path = cache_folder() / file
            if not is_intact(path):
                missing[path] = NAMESPACE + kernel_name(job.text), code
    return missing


def _compile_in_process(
    compiler: nvrtc.Compiler, path: Path, names: tuple[str, str], *, wait: bool
) -> bool:
    """Compiles one kernel to `path`, unless another process has compiled it meanwhile.

    If another process is compiling the kernel, waits; without `wait`, returns False instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with compile_lock(path, wait=wait) as held:
            if not (held or wait):
                return False
            if not is_intact(path):
                module = nvrtc.in_process(compiler, *names)
                if _texts() in build_key():  # else another version was installed meanwhile
                    write_entry(path, *module)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.info("a kernel is compiled when it is needed: %s", error)
    return True


@functools.cache
def module_of(job: KernelJob) -> tuple[str, str]:
    """Returns the name of a kernel's file and its code. Raises KeyError for a dtype not in TYPES.

    The result is cached, because it takes 0.1 ms and is needed when a kernel is listed and when it
    is called.
    """
    short = kernel_code(shortened(job.text), job.inputs, job.outputs)
    return f"{module_name(job.text, short)}.ptx", kernel_code(job.text, job.inputs, job.outputs)


def shortened(text: KernelText) -> KernelText:
    """Returns a KernelText that includes header and source from files in the cache folder.

    Writes the files. Returns `text` itself if MLX has to compile it or a file cannot be written.
    """
    if compiler_here() is None:
        return text
    try:
        folder = cache_folder() / "mlxpool_sources"
        folder.mkdir(parents=True, exist_ok=True)
        header, source = (_source_file(folder, code) for code in (text.header, text.source))
    except OSError as error:
        log.info("the text of kernel %s is not shortened: %s", text.name, error)
        return text
    # MLX passes a parameter, such as a shape, to a kernel whose source has the parameter's name.
    words = (f"{name}_{kind}" for name in text.inputs for kind in PARAMETERS)
    used = " ".join(word for word in words if word in text.source)
    return replace(
        text, header=f'#include "{header}"\n', source=f'// {used}\n#include "{source}"\n'
    )


def _source_file(folder: Path, code: str) -> Path:
    """Returns the file with this code, named by the code's hash; writes a missing file."""
    path = folder / f"{hashlib.sha256(code.encode()).hexdigest()[:32]}.cuh"
    if not path.exists():
        _write_file(path, code.encode())
    return path


def with_disk_cache(text: KernelText, make: Callable[[KernelText], Any]) -> Callable[..., Any]:
    """Returns a kernel of mx.fast.cuda_kernel that is compiled to disk before its first call.

    `make` builds the kernel from a KernelText for MLX.
    """
    kernel = make(shortened(text))

    def call(
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        **more: Any,
    ) -> Any:
        kinds = tuple((x.dtype, x.ndim > 0) for x in inputs)
        job = KernelJob(text, kinds, tuple(output_dtypes))
        if _collected is None:
            compile_to_disk(job)
        else:
            _collected.append(job)
        if _rehearsed:
            return list(map(mx.zeros, output_shapes, output_dtypes))
        return kernel(
            inputs=inputs, output_shapes=output_shapes, output_dtypes=output_dtypes, **more
        )

    return call


@functools.cache
def build_key() -> str:
    """Returns a text that names everything on which machine code depends; file names contain it."""
    compiler = compiler_here()
    with_what = "" if compiler is None else f"NVRTC {compiler.version} {compiler.architecture}"
    return f"{_texts()} MLX {_mlx()} {with_what}"


def _texts() -> str:
    """Returns a hash of the current .cu and .cuh files and of HEADERS."""
    files = [path.read_bytes() for path in sorted(CUDA_FOLDER.glob("*.cu*"))]
    headers = [text.encode() for text in HEADERS.values()]
    return hashlib.sha256(b"".join([*files, *headers])).hexdigest()[:16]


def _mlx() -> str:
    return version_of("mlx")


@functools.cache
def compile_to_disk(job: KernelJob) -> None:
    compiler = compiler_here()
    if compiler is None:
        return
    try:
        file, code = module_of(job)
        path = cache_folder() / file
        if is_intact(path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} cannot be written to")
        with compile_lock(path, wait=True):
            if is_intact(path):  # another process has compiled the kernel meanwhile
                return
            LOAD.count("kernels_compiled_alone", 1)
            module = compiler.machine_code(NAMESPACE + kernel_name(job.text), code)
            # The kernel is compiled from the current files, but `path` is named after old files.
            if _texts() not in build_key():
                raise RuntimeError(
                    "another version of mlxpool was installed while this process runs"
                )
            write_entry(path, *module)
    except Exception as error:  # MLX compiles the kernel itself
        log.info("MLX compiles our kernel %s by itself: %s", job.text.name, error)


def log_mlx_kernels(seconds: float) -> None:
    """Logs the kernels that MLX has compiled in the last `seconds`, with each kernel's age.

    Logs nothing without a GPU.
    """
    now, compiled = time.time(), []
    with contextlib.suppress(OSError):
        for path in cache_folder().glob("*.ptx"):
            age = now - path.stat().st_mtime
            if age < seconds and not path.name.startswith(OUR_PREFIX):
                compiled.append((age, path.stem))
    if compiled:
        LOAD.count("mlx_kernels", len(compiled))
        names = [f"{name} {age:.1f}" for age, name in sorted(compiled, reverse=True)]
        log.info("MLX compiled kernels", extra={"seconds_ago": names})


def is_intact(path: Path) -> bool:
    """Returns whether a stored kernel matches its checksum.

    A damaged kernel would fail in every process that loads it.
    """
    try:
        return path.with_suffix(".txt").read_bytes().endswith(_checksum_line(path.read_bytes()))
    except OSError:
        return False


def _checksum_line(code: bytes) -> bytes:
    """Returns a checksum line for the list of kernels; MLX ignores it, because it has no tab."""
    return f"# {hashlib.sha256(code).hexdigest()}\n".encode()


def kernel_name(text: KernelText) -> str:
    """Returns MLX's name of the kernel."""
    return f"custom_kernel_{text.name}"


def module_name(text: KernelText, code: str) -> str:
    """Returns MLX's name of the compiled `code`."""
    return f"{kernel_name(text)}_{string_hash(code.encode()):x}"


def cache_folder() -> Path:
    """Returns the folder of MLX's compiled kernels. Raises OSError if MLX has no such folder."""
    named = os.environ.get("MLX_PTX_CACHE_DIR")
    if named == "":
        raise OSError("MLX_PTX_CACHE_DIR is empty")
    temporary = (os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return Path(named or Path(next(filter(None, temporary), "/tmp")) / "mlx" / _mlx() / "ptx")


def kernel_code(text: KernelText, inputs: Iterable[InputKind], outputs: Iterable[mx.Dtype]) -> str:
    """Returns exactly the code that MLX would compile. Raises KeyError for a dtype not in TYPES."""
    into = (
        f"    {TYPES[dtype]}* {name}" for name, dtype in zip(text.outputs, outputs, strict=True)
    )
    kinds = zip(text.inputs, inputs, strict=True)
    declared = (_parameter(text.source, name, *kind) for name, kind in kinds)
    parameters = "".join(declared) + ",\n".join(into)
    head = f"__global__ void {kernel_name(text)}(\n{parameters}) {{\n"
    return MLX_PREAMBLE + text.header + NAMESPACE_START + head + text.source + NAMESPACE_END


def _parameter(source: str, name: str, dtype: mx.Dtype, dimensions: bool) -> str:
    kinds = [kind for kind in PARAMETERS if dimensions and f"{name}_{kind}" in source]
    more = (f"    const __grid_constant__ {PARAMETERS[kind]} {name}_{kind},\n" for kind in kinds)
    return f"    const {TYPES[dtype]}* {name},\n" + "".join(more)


def string_hash(text: bytes) -> int:
    """Returns std::hash<std::string> of GNU's C++ library with 64 bits: MurmurHash64A."""
    mask, by = 2**64 - 1, 0xC6A4A7935BD1E995
    mixed = 0xC70F6907 ^ len(text) * by & mask
    whole = len(text) // 8 * 8
    for at in range(0, whole, 8):
        piece = int.from_bytes(text[at : at + 8], "little") * by & mask
        mixed = (mixed ^ (piece ^ piece >> 47) * by & mask) * by & mask
    if whole < len(text):
        mixed = (mixed ^ int.from_bytes(text[whole:], "little")) * by & mask
    mixed = (mixed ^ mixed >> 47) * by & mask
    return mixed ^ mixed >> 47


def write_entry(path: Path, code: bytes, kernel: str, mangled: str) -> None:
    """Writes a compiled kernel's two files atomically: its list of kernels, then its code.

    Other processes may read these files at any time.
    """
    for target, what in (
        (path.with_suffix(".txt"), f"{kernel}\t{mangled}\n".encode() + _checksum_line(code)),
        (path, code),
    ):
        _write_file(target, what)


def _write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically and durably. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".mlxpool-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@functools.cache
def compiler_here() -> nvrtc.Compiler | None:
    """Returns MLX's loaded compiler; None if it is missing, or if MLX has to compile."""
    target = architecture()
    if not target:
        return None
    try:
        if not _mlx().startswith(MLX_SERIES):
            raise RuntimeError(f"MLX {_mlx()} is not {MLX_SERIES}*")
        return nvrtc.Compiler(nvrtc.loaded(), target, nvrtc.includes(), HEADERS)
    except (OSError, RuntimeError) as error:
        log.info("our kernels are compiled by MLX in each process: %s", error)
        return None


def architecture() -> str:
    """Returns this GPU's compiler target (from 9.0 on with all features); "" without a GPU."""
    if mx.default_device().type != mx.DeviceType.gpu or not mx.cuda.is_available():
        return ""
    name = str(mx.device_info().get("architecture", ""))
    number = name.removeprefix("sm_")
    if not number.isdigit():
        return ""
    return f"{name}a" if int(number) >= 90 else name
