"""Loads the weights of a checked model and builds the model.

Only the functions import MLX, not the module. `load` has to run in the thread that uses the model,
because MLX's streams belong to threads.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.derived_weights import DerivedWeights
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.layers.quantisation import FLOAT_DTYPES, GLOBAL_SCALES
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.weights.cuts import Cut
from mlxpool.worker.weights.inspect import ModelFolder, dequantised_growth
from mlxpool.worker.weights.safetensors_header import Tensor

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxpool.worker.layers.builder import WeightLayerBuilder

log = logging.getLogger("mlxpool.worker")

HASH_THREADS = 4  # threads that verify digests
OnProgress = Callable[[int, int], None]  # called with loaded tensors and loaded bytes (as stored)
NO_CUTS: Mapping[str, Cut] = {}


class LoadedModel(Struct, frozen=True):
    """A model with its weights in memory."""

    folder: ModelFolder
    model: Model
    dtype: mx.Dtype  # the dtype of the model's computations
    weight_bytes: int  # bytes in memory
    deterministic: bool = False  # whether results are independent of other rows in the batch


def load(
    folder: ModelFolder,
    on_progress: OnProgress = lambda tensors, size: None,
    *,
    deterministic: bool = False,
    dequantise: bool = False,
    dtype: mx.Dtype | None = None,
    cuts: Mapping[str, Cut] = NO_CUTS,
    make_builder: Callable[..., WeightLayerBuilder] | None = None,
) -> LoadedModel:
    """Reads the weights layer by layer, calls `on_progress` after each layer, and builds the model.

    The model computes in `dtype`; if it is None, in the dtype from `device_dtype`. `dequantise`
    turns quantised weights into dense weights now, see
    scheduling.memory_estimate.dequantises_at_load; `deterministic` does this, too. `cuts` has the
    parts of weights to load; `folder.match.weights` has the shapes of these parts. `make_builder`:
    makes the builder of the layers, with the parameters of WeightLayerBuilder; if it is None, a
    WeightLayerBuilder builds them.

    Raises ModelLoadFailed if the files changed since `inspect`, cannot be read, or do not match
    their digests in a store.
    """
    from mlxpool.worker.layers.builder import WeightLayerBuilder

    LOAD.enter("weights")
    dtype = dtype or device_dtype(folder)
    weights: dict[str, mx.array] = {}
    for layer, tensors, size in _read_layers(folder, dtype, cuts):
        weights.update(layer)
        on_progress(tensors, size)
    _log_weights(folder)
    weight_bytes = sum(array.nbytes for array in weights.values())  # before the build removes them
    weight_bytes += folder.plan.built * dtype.size
    if dequantise or deterministic:
        weight_bytes += dequantised_growth(folder, dtype.size, deterministic=deterministic)
    LOAD.enter("build")
    builder = (make_builder or WeightLayerBuilder)(
        weights, folder.match.layouts, dtype, batch_invariant=deterministic, dequantise=dequantise
    )
    return LoadedModel(
        folder=folder,
        model=folder.plan.build(builder),
        dtype=dtype,
        weight_bytes=weight_bytes,
        deterministic=deterministic,
    )


def _log_weights(folder: ModelFolder) -> None:
    """Logs the size of the weights, and the tensors whose stored names differ from MLX's."""
    tensors = folder.tensors.values()
    renamed = {tensor.stored: tensor.name for tensor in tensors if tensor.stored != tensor.name}
    fields = {"tensors": len(tensors), "bytes": folder.weight_bytes, "renamed": len(renamed)}
    log.info("weights read", extra=fields)
    for stored, name in renamed.items():
        log.debug("tensor renamed", extra={"stored": stored, "tensor": name})


def device_dtype(folder: ModelFolder) -> mx.Dtype:
    """Returns float32 on a CPU (16-bit floats are slower), else the dtype of most float bytes."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return mx.float32
    sizes: Counter[str] = Counter({"BF16": 0})
    for tensor in folder.tensors.values():
        if tensor.dtype in FLOAT_DTYPES:
            sizes[tensor.dtype] += tensor.nbytes
    known = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    return known[sizes.most_common(1)[0][0]]


def _read_layers(
    folder: ModelFolder, dtype: mx.Dtype, cuts: Mapping[str, Cut]
) -> Iterator[tuple[dict[str, mx.array], int, int]]:
    """Yields the weights of each layer, with the numbers of tensors and bytes read so far."""
    with _opener(folder) as (open_file, open_parts):
        reader = _Reader(folder, open_file, open_parts, cuts)
        for names in _layers(folder):
            reader.verify(names)
            layer: dict[str, mx.array] = {}
            for arrays in reader.weights_of(names):
                layer.update(_evaluated(folder, arrays, dtype))
            yield layer, reader.tensors, reader.size


@contextmanager
def _opener(
    folder: ModelFolder,
) -> Iterator[tuple[Callable[[Path], _Tensors], Callable[[Path], _Parts]]]:
    """Yields two functions that open a weight file: for whole tensors, and for parts.

    A format such as GGUF has its own functions. Safetensors files are read by device_reads.py on a
    CUDA GPU, otherwise by MLX and numpy.
    """
    from mlxpool.worker.weights import device_reads
    from mlxpool.worker.weights.cut_reads import CutReads

    if folder.files.format.open is not None:
        yield folder.files.format.open, folder.files.format.open
        return
    tensors = folder.tensors.values()
    if not device_reads.supported({tensor.dtype for tensor in tensors}):
        yield _open, CutReads
        return
    with device_reads.DeviceReads(max(tensor.nbytes for tensor in tensors)) as reads:
        yield reads.open, reads.open_parts


class _Tensors(Protocol):
    """The tensors of a file, possibly lazy; taking a tensor removes it."""

    def pop(self, name: str, default: None, /) -> mx.array | None: ...


class _Parts(Protocol):
    """A reader of parts of a file's tensors."""

    def read(self, name: str, shape: tuple[int, ...], cut: Cut, /) -> mx.array | None: ...


class _OpenedFile(Struct):
    """The readers of an open file: of whole tensors, and of parts."""

    tensors: _Tensors | None = None
    parts: _Parts | None = None


class _Reader:
    """Makes the weights of a model from its files, layer by layer.

    A file is opened for its first tensor and closed after its last tensor: a store has a file for
    each tensor, and a process cannot have all these files open.
    """

    def __init__(
        self,
        folder: ModelFolder,
        open_file: Callable[[Path], _Tensors],
        open_parts: Callable[[Path], _Parts],
        cuts: Mapping[str, Cut] = NO_CUTS,
    ) -> None:
        self._files = folder.files
        self._cuts = cuts
        self._open, self._open_parts = open_file, open_parts
        self._tensors = folder.tensors
        self._derived = {
            name: derived for derived in folder.match.derived for name in derived.outputs
        }
        self._opened: dict[Path, _OpenedFile] = {}
        self._left = Counter(tensor.file for tensor in folder.tensors.values())
        self.tensors, self.size = 0, 0  # counts of tensors and bytes read so far

    def verify(self, names: Sequence[str]) -> None:
        """Verifies the digests of the files that have these weights and are not open yet."""
        if not self._files.digests:
            return
        sources = [source for name in names for source in self._sources(name)]
        files = {self._tensors[source].file for source in sources} - set(self._opened)
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            for _ in pool.map(self._files.verify, files):
                pass

    def _sources(self, name: str) -> Sequence[str]:
        derived = self._derived.get(name)
        return (name,) if derived is None else derived.sources

    def weights_of(self, names: Sequence[str]) -> Iterator[dict[str, mx.array]]:
        """Yields these weights as lazy arrays: the stored weights, then each derived group."""
        stored = [name for name in names if name not in self._derived]
        yield {name: self._stored(self._tensors[name], self._cuts.get(name)) for name in stored}
        done: list[DerivedWeights] = []
        for name in names:
            derived = self._derived.get(name)
            if derived is not None and not any(derived is other for other in done):
                done.append(derived)
                arrays = derived.transform(
                    [self._stored(self._tensors[source]) for source in derived.sources]
                )
                outputs = dict(zip(derived.outputs, arrays, strict=True))
                cuts = self._cuts
                yield {n: cuts[n].of(array) if n in cuts else array for n, array in outputs.items()}

    def _stored(self, tensor: Tensor, cut: Cut | None = None) -> mx.array:
        """Reads a tensor, or only the part `cut` of it.

        Raises ModelLoadFailed if the file changed while it was read.
        """
        file = tensor.file
        opened = self._opened.setdefault(file, _OpenedFile())
        if cut is None:
            if opened.tensors is None:
                opened.tensors = self._open(file)
            array = opened.tensors.pop(tensor.stored, None)
            part_shape = tensor.shape
        else:
            if opened.parts is None:
                opened.parts = self._open_parts(file)
            array = opened.parts.read(tensor.stored, tensor.shape, cut)
            part_shape = cut.shape_of(tensor.shape)
        shape = None if array is None else array.shape
        if array is None or shape != part_shape:
            raise ModelLoadFailed(
                f"{file} changed while it was read: tensor {tensor.stored!r} has shape {shape}, "
                f"had {tensor.shape}; load again"
            )
        self._left[file] -= 1
        if not self._left[file]:
            del self._opened[file]
        self.tensors += 1
        self.size += tensor.nbytes
        return array


def _open(file: Path) -> dict[str, mx.array]:
    """Returns all tensors of a file, lazily: MLX reads a tensor when it is evaluated."""
    import mlx.core as mx

    try:
        tensors = mx.load(str(file), format="safetensors")
    except (RuntimeError, OSError) as error:
        raise ModelLoadFailed(f"{file} cannot be read: {error}") from error
    assert isinstance(tensors, dict)
    return tensors


def _evaluated(
    folder: ModelFolder, arrays: dict[str, mx.array], dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Returns the evaluated arrays, with most floats converted to `dtype`.

    Empties `arrays`, to free the originals. Raises ModelLoadFailed if a file cannot be read, or an
    array has another shape than planned.
    """
    import mlx.core as mx

    def cast(name: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        wide = name.rpartition(".")[2] in GLOBAL_SCALES or folder.plan.float32(name)
        return array.astype(mx.float32 if wide else dtype)

    result = {name: cast(name, arrays[name]) for name in list(arrays)}
    arrays.clear()
    try:
        mx.eval(list(result.values()))
    except (RuntimeError, OSError) as error:
        raise ModelLoadFailed(f"{folder.path}: {next(iter(result))!r} or near: {error}") from error
    for name, array in result.items():
        expected = folder.match.weights[name].shape
        if array.shape != expected:
            raise ModelLoadFailed(
                f"{folder.path}: {name!r} was made with shape {array.shape}, must have {expected}"
            )
    return result


def _layers(folder: ModelFolder) -> Iterator[list[str]]:
    """Returns the names of the weights in the order of use, grouped by layer."""
    for _, names in groupby(folder.match.weights, key=_layer_of):
        yield list(names)


def _layer_of(name: str) -> str:
    _, layers, rest = name.partition(".layers.")
    return rest.partition(".")[0] if layers else name
