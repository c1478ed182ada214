"""Matches the tensors of a checkpoint with the weights that the model's plan needs. No MLX."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.derived_weights import MODULE_TENSORS, DerivedWeights, TensorSpec
from mlxpool.worker.layers.layer_types import Shape
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.quantisation import (
    FLOAT_DTYPES,
    GLOBAL_SCALES,
    MODES,
    QuantConfig,
    QuantLayout,
    layout_from_shapes,
)
from mlxpool.worker.weights.files import listing
from mlxpool.worker.weights.safetensors_header import Tensor

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class WeightMatch(Struct, frozen=True):
    """The tensors of a checkpoint from which the weights of a model are made."""

    weights: Mapping[str, TensorSpec]  # weights of the built model, in the order of use
    tensors: Mapping[str, Tensor]  # the stored tensors to read, in the same order
    derived: tuple[DerivedWeights, ...]
    layouts: Mapping[str, QuantLayout]  # layouts of the modules with quantised weights


def match_weights(plan: ModelPlan, found: Mapping[str, Tensor], known: QuantConfig) -> WeightMatch:
    """Returns the tensors of a checkpoint from which the plan's weights are made.

    Raises ModelLoadFailed with the tensors that are missing, surplus or not as planned.
    """
    matching = _Matching(plan, found, known)
    for mismatch in matching.mismatches():
        raise ModelLoadFailed(mismatch)
    return matching.result()


def mismatches(plan: ModelPlan, found: Mapping[str, Tensor], known: QuantConfig) -> Iterator[str]:
    """Yields all errors of the tensors; `match_weights` raises only the first."""
    return _Matching(plan, found, known).mismatches()


class _Matching:
    """One comparison of a checkpoint's tensors with a model's plan.

    A tensor with an error is omitted from later checks.
    """

    def __init__(self, plan: ModelPlan, tensors: Mapping[str, Tensor], known: QuantConfig) -> None:
        self._plan, self._found, self._known = plan, tensors, known
        self._available = {
            name: TensorSpec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()
        }
        self._origin = {name: name for name in tensors}  # available name -> name of a stored source
        self._derived: list[DerivedWeights] = []
        self._layouts: dict[str, QuantLayout] = {}
        self._wanted: dict[str, tuple[Shape, tuple[str, ...]]] = {}

    def result(self) -> WeightMatch:
        """Returns the match; valid only if `mismatches` has yielded no error."""
        return WeightMatch(
            weights={name: self._available[name] for name in self._wanted},
            tensors={name: self._found[name] for name in _read(self._wanted, self._derived)},
            derived=tuple(self._derived),
            layouts=self._layouts,
        )

    def mismatches(self) -> Iterator[str]:
        """Runs all checks and yields their errors."""
        yield from self._unquantised()
        stored = dict(self._available)
        lost = yield from self._derive()
        for name, shape in self._plan.shapes.items():
            if name in lost:
                continue
            try:
                self._want(name, shape)
            except ModelLoadFailed as error:
                lost |= {f"{name.removesuffix('.weight')}.{kind}" for kind in MODULE_TENSORS}
                yield error.message
        missing = [name for name in self._wanted if name not in self._available]
        yield from self._missing(stored, missing)
        yield from self._surplus(lost)
        for name, (shape, dtypes) in self._wanted.items():
            if name in self._available:
                yield from self._differing(name, shape, dtypes)

    def _unquantised(self) -> Iterator[str]:
        default = self._known.default
        if default is not None and not any(name.endswith("scales") for name in self._found):
            yield (
                f"config.json says that the weights are quantised ({default}), but none of them "
                "has scales: take `quantization` out, or name the folder of the quantised model"
            )

    def _derive(self) -> Generator[str, None, set[str]]:
        """Replaces stored tensors by the weights derived from them.

        Yields errors. Returns the names of the weights that cannot be derived.
        """
        stored, lost = dict(self._available), set[str]()
        try:
            derived = tuple(self._plan.derived(stored))
        except ModelLoadFailed as error:
            yield error.message
            return set(self._plan.shapes) | set(stored)
        lacking = [name for weights in derived for name in weights.sources if name not in stored]
        yield from self._missing(stored, lacking)
        for weights in derived:
            for name in weights.sources:
                self._available.pop(name, None)
        for weights in derived:
            if not set(weights.sources) <= set(stored):
                lost |= set(weights.outputs)
                continue
            self._derived.append(weights)
            self._available.update(weights.outputs)
            self._origin.update(dict.fromkeys(weights.outputs, weights.sources[0]))
        return lost

    def _want(self, name: str, shape: Shape) -> None:
        """Adds the tensors that one weight of the plan needs, with their allowed dtypes."""
        module, _, kind = name.rpartition(".")
        layout = self._layout(module, shape) if kind == "weight" and len(shape) > 1 else None
        if layout is None:
            self._wanted[name] = (shape, FLOAT_DTYPES)
            return
        self._layouts[module] = layout
        scales = MODES[layout.mode].scale_dtypes
        for part, packed in layout.tensors(shape):
            self._wanted[f"{module}.{part}"] = (packed, ("U32",) if part == "weight" else scales)
        factors = [key for kind in GLOBAL_SCALES if (key := f"{module}.{kind}") in self._available]
        for factor in factors if layout.mode == "nvfp4" else ():
            size, actual = math.prod(shape[:-2]), self._available[factor].shape
            self._wanted[factor] = (actual if math.prod(actual) == size else (size,), FLOAT_DTYPES)

    def _layout(self, module: str, shape: Shape) -> QuantLayout | None:
        """Returns the quantisation layout of a weight; None for a dense weight.

        Raises ModelLoadFailed if the layout is not known or does not divide the rows.
        """
        known, scaled = self._known, f"{module}.scales" in self._available
        layout = known.named.get(module)
        if scaled and module not in known.named:
            origin = self._origin.get(f"{module}.weight", "").removesuffix(".weight")
            layout = known.named.get(origin, known.default)
        if scaled and layout is None:
            layout = self._inferred(module, shape)
        if layout is not None and not layout.divides(shape[-1]):
            raise ModelLoadFailed(
                f"config.json quantises {module!r} ({layout}), whose rows of {shape[-1]} are no "
                f"multiple of {layout.group_size}"
            )
        return layout

    def _inferred(self, module: str, shape: Shape) -> QuantLayout:
        available = self._available
        weight, scales = available.get(f"{module}.weight"), available[f"{module}.scales"]
        if not self._known.infer or weight is None:
            raise ModelLoadFailed(
                f"the weights have {module + '.scales'!r}, but config.json does not say that "
                f"{module!r} is quantised: it needs `quantization` with its bits and group_size"
            )
        return layout_from_shapes(module, shape[-1], weight.shape, scales.shape, scales.dtype)

    def _missing(self, stored: Iterable[str], missing: list[str]) -> Iterator[str]:
        if missing:
            names = listing("tensor", missing)
            yield f"the weights lack {names}, which config.json asks for{self._counts(stored)}"

    def _surplus(self, lost: set[str]) -> Iterator[str]:
        ignored = self._plan.ignored
        known = {*self._wanted, *lost}
        surplus = [name for name in self._available if name not in known and not ignored(name)]
        if surplus:
            yield (
                f"{self._found[self._origin[surplus[0]]].file} has {listing('tensor', surplus)}, "
                f"unknown to the model that config.json describes{self._counts(self._available)}"
            )

    def _counts(self, stored: Iterable[str]) -> str:
        """Returns part of an error if plan and weights have unequal numbers of layers, else ""."""
        planned = _layers(self._plan.shapes)
        stored_layers = _layers(name for name in stored if not self._plan.ignored(name))
        if planned == stored_layers:
            return ""
        return f": it describes {planned} layers, the weights have {stored_layers}"

    def _differing(self, name: str, shape: Shape, dtypes: tuple[str, ...]) -> Iterator[str]:
        spec = self._available[name]
        module, _, kind = name.rpartition(".")
        layout = self._layouts.get(module) if kind != "bias" else None
        of = f" quantised ({layout})" if layout else ""
        where = f"{self._found[self._origin[name]].file}: tensor {name!r}"
        if spec.shape != shape:
            shown = f"config.json asks for {list(shape)}{of}"
            yield f"{where} has shape {list(spec.shape)}, {shown}"
        if spec.dtype not in dtypes:
            one_of = "one of " if len(dtypes) > 1 else ""
            yield f"{where} has dtype {spec.dtype}, must be {one_of}{', '.join(dtypes)}{of}"


def _layers(names: Iterable[str]) -> int:
    numbers = (int(match[1]) for name in names if (match := _LAYER.search(name)))
    return max(numbers, default=-1) + 1


def _read(names: Iterable[str], derived: Iterable[DerivedWeights]) -> Iterator[str]:
    """Returns the stored tensors from which the weights `names` are made, each tensor once."""
    makers = {name: weights for weights in derived for name in weights.outputs}
    done: set[int] = set()
    for name in names:
        weights = makers.get(name)
        if weights is None:
            yield name
        elif id(weights) not in done:
            done.add(id(weights))
            yield from weights.sources
