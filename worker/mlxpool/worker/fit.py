"""Do the tensors of a checkpoint make the weights that its config asks for? No MLX."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.headers import Tensor
from mlxpool.worker.models.base import Plan, Shape
from mlxpool.worker.models.derived import Derived, Spec
from mlxpool.worker.quant import FLOATS, MODES, Quant, Quantisation

_SHOWN = 3  # names in an error that could list thousands
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model's weights are made of a checkpoint's tensors."""

    weights: Mapping[str, Spec]  # what the model is built of, in the order of use
    tensors: Mapping[str, Tensor]  # what is read for that, in the same order
    derived: tuple[Derived, ...]
    layouts: Mapping[str, Quant]  # of the modules whose weight is quantised


def fit(plan: Plan, found: Mapping[str, Tensor], known: Quantisation) -> Fit:
    """Raises ModelLoadFailed naming the tensor that is missing, surplus or of another kind."""
    _refuse_unquantised(found, known)
    stored = {name: Spec(tensor.dtype, tensor.shape) for name, tensor in found.items()}
    derived = tuple(plan.derived(stored))
    _require(plan, stored, [name for one in derived for name in one.sources if name not in found])
    used = {name for one in derived for name in one.sources}
    have = {name: spec for name, spec in stored.items() if name not in used}
    origin = {name: name for name in have}
    for one in derived:
        have.update(one.makes)
        origin.update(dict.fromkeys(one.makes, one.sources[0]))
    layouts = dict(_layouts(plan, have, known, origin))
    wanted = dict(_wanted(plan, have, layouts))
    _require(plan, stored, [name for name in wanted if name not in have])
    _refuse_surplus(plan, have, wanted, found, origin)
    for name, (shape, dtypes) in wanted.items():
        _compare(found[origin[name]], name, have[name], shape, dtypes, layouts)
    return Fit(
        weights={name: have[name] for name in wanted},
        tensors={name: found[name] for name in _read(wanted, derived)},
        derived=derived,
        layouts=layouts,
    )


def _refuse_unquantised(found: Iterable[str], known: Quantisation) -> None:
    if known.default is not None and not any(name.endswith("scales") for name in found):
        raise ModelLoadFailed(
            f"config.json says that the weights are quantised ({known.default}), but none of them "
            "has scales: take `quantization` out, or name the folder of the quantised model"
        )


def _layouts(
    plan: Plan, have: Mapping[str, Spec], known: Quantisation, origin: Mapping[str, str]
) -> Iterator[tuple[str, Quant]]:
    """The modules that config.json names, and those that have scales."""
    for name, shape in plan.shapes.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) < 2:
            continue
        scaled = f"{module}.scales" in have
        layout = known.named.get(module)
        if scaled and module not in known.named:
            layout = known.named.get(origin[name].removesuffix(".weight"), known.default)
        if layout is None and scaled:
            raise ModelLoadFailed(
                f"the weights have {module + '.scales'!r}, but config.json does not say that "
                f"{module!r} is quantised: it needs `quantization` with its bits and group_size"
            )
        if layout is not None:
            _require_whole(module, shape, layout)
            yield module, layout


def _require_whole(module: str, shape: Shape, layout: Quant) -> None:
    if not layout.divides(shape[-1]):
        raise ModelLoadFailed(
            f"config.json quantises {module!r} ({layout}), whose rows of {shape[-1]} are no "
            f"multiple of {layout.group}"
        )


def _wanted(
    plan: Plan, have: Mapping[str, Spec], layouts: Mapping[str, Quant]
) -> Iterator[tuple[str, tuple[Shape, tuple[str, ...]]]]:
    """Every tensor that the model is built of -> its shape and the dtypes it may have."""
    for name, shape in plan.shapes.items():
        module, _, kind = name.rpartition(".")
        layout = layouts.get(module) if kind == "weight" else None
        if layout is None:
            yield name, (shape, FLOATS)
            continue
        scales = MODES[layout.mode].scales
        for part, packed in layout.tensors(shape):
            yield f"{module}.{part}", (packed, ("U32",) if part == "weight" else scales)
        factor = f"{module}.global_scale"
        if layout.mode == "nvfp4" and factor in have:
            size = math.prod(shape[:-2])
            fits = math.prod(have[factor].shape) == size
            yield factor, (have[factor].shape if fits else (size,), FLOATS)


def _require(plan: Plan, stored: Mapping[str, Spec], missing: list[str]) -> None:
    if missing:
        raise ModelLoadFailed(
            f"the weights lack {_listed(missing)}, which config.json asks for"
            f"{_layer_counts(plan, stored)}"
        )


def _refuse_surplus(
    plan: Plan,
    have: Mapping[str, Spec],
    wanted: Iterable[str],
    found: Mapping[str, Tensor],
    origin: Mapping[str, str],
) -> None:
    asked = set(wanted)
    surplus = [name for name in have if name not in asked and not plan.ignored(name)]
    if surplus:
        raise ModelLoadFailed(
            f"{found[origin[surplus[0]]].file} has {_listed(surplus)}, unknown to the model that "
            f"config.json describes{_layer_counts(plan, have)}"
        )


def _layer_counts(plan: Plan, stored: Mapping[str, Spec]) -> str:
    """Said only where the number of layers is what differs."""
    asked = _layers(plan.shapes)
    there = _layers(name for name in stored if not plan.ignored(name))
    return "" if asked == there else f": it describes {asked} layers, the weights have {there}"


def _layers(names: Iterable[str]) -> int:
    numbers = (int(match[1]) for name in names if (match := _LAYER.search(name)))
    return max(numbers, default=-1) + 1


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _compare(
    tensor: Tensor,
    name: str,
    spec: Spec,
    shape: Shape,
    dtypes: tuple[str, ...],
    layouts: Mapping[str, Quant],
) -> None:
    layout = layouts.get(name.rpartition(".")[0])
    if layout is not None and name.endswith(".bias"):
        layout = None
    of = f" quantised ({layout})" if layout else ""
    if spec.shape != shape:
        raise ModelLoadFailed(
            f"{tensor.file}: tensor {name!r} has shape {list(spec.shape)}, "
            f"config.json asks for {list(shape)}{of}"
        )
    if spec.dtype not in dtypes:
        raise ModelLoadFailed(
            f"{tensor.file}: tensor {name!r} has dtype {spec.dtype}, "
            f"must be {'one of ' if len(dtypes) > 1 else ''}{', '.join(dtypes)}{of}"
        )


def _read(wanted: Iterable[str], derived: Iterable[Derived]) -> Iterator[str]:
    """The stored tensors that the wanted ones need, each once."""
    made = {name: one for one in derived for name in one.makes}
    done: set[int] = set()
    for name in wanted:
        one = made.get(name)
        if one is None:
            yield name
        elif id(one) not in done:
            done.add(id(one))
            yield from one.sources
