"""Weights that a checkpoint keeps under other names or in another layout than a model file uses.

A model file's Plan names what the model is built of. Where a checkpoint differs, `Plan.derived` is
given what the headers say and yields a Derived for each weight that has to be made of others:
renamed, stacked, split, transposed, shifted. They are made while loading, one after the other, so
that only one of them is in memory twice. Nothing here imports MLX before a weight is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers import quantisation

if TYPE_CHECKING:
    import mlx.core as mx

# What may be stored of one module, `bias` being a layer's own and `biases` those of its groups.
MODULE_TENSORS = ("weight", "scales", "biases", *quantisation.GLOBAL_SCALES, "bias")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a header says of a tensor; `dtype` as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]


StoredTensors: TypeAlias = Mapping[str, TensorSpec]
Transform: TypeAlias = "Callable[[Sequence[mx.array]], Sequence[mx.array]]"


@dataclass(frozen=True, slots=True)
class DerivedWeights:
    """Weights made of stored tensors, which are then used up.

    `make` gets the arrays of `sources` and returns those of `makes`, each in its order. A source
    that the checkpoint lacks is an error that names it. One of `makes` may have a source's name.
    """

    sources: tuple[str, ...]
    makes: Mapping[str, TensorSpec]
    make: Transform


def no_derived_weights(found: StoredTensors) -> Iterable[DerivedWeights]:
    """For a Plan whose names are those of its checkpoints."""
    return ()


def renamed(found: StoredTensors, module: str, source: str) -> Iterator[DerivedWeights]:
    """`module`, quantised or not, is stored as `source`."""
    for kind in _stored(found, source):
        name = f"{source}.{kind}"
        yield DerivedWeights((name,), {f"{module}.{kind}": found[name]}, tuple)


def stacked(found: StoredTensors, module: str, sources: Sequence[str]) -> Iterator[DerivedWeights]:
    """`module` is the modules `sources` on a new first axis; quantised ones stay so."""
    for kind in _stored(found, sources[0]):
        names = tuple(f"{source}.{kind}" for source in sources)
        first = found[names[0]]
        _require_equal(found, names)
        spec = replace(first, shape=(len(names), *first.shape))
        yield DerivedWeights(names, {f"{module}.{kind}": spec}, _stack)


def stacked_experts(found: StoredTensors, module: str, count: int) -> Iterator[DerivedWeights]:
    """The stacked experts `….switch_mlp.X`, where `….experts.E.X` or `….experts.X` is stored."""
    one_by_one = [module.replace(".switch_mlp.", f".experts.{expert}.") for expert in range(count)]
    at_once = module.replace(".switch_mlp.", ".experts.")
    if f"{one_by_one[0]}.weight" in found:
        yield from stacked(found, module, one_by_one)
    elif f"{at_once}.weight" in found:
        yield from renamed(found, module, at_once)


def reordered(found: StoredTensors, module: str, rows: Sequence[int]) -> Iterator[DerivedWeights]:
    """`module` with its rows, the first axis of what is stored of it, in another order."""

    def make(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        import mlx.core as mx

        return [arrays[0][mx.array(list(rows))]]

    for kind in _stored(found, module):
        if kind != "global_scale":
            name = f"{module}.{kind}"
            yield DerivedWeights((name,), {name: found[name]}, make)


def mapped(
    found: StoredTensors, name: str, function: Callable[[mx.array], mx.array]
) -> DerivedWeights:
    """The tensor `name` with other values of the same shape."""
    return DerivedWeights((name,), {name: found[name]}, lambda arrays: [function(arrays[0])])


def from_dequantised(
    found: StoredTensors,
    module: str,
    columns: int,
    makes: Mapping[str, tuple[int, ...]],
    function: Callable[[mx.array], Sequence[mx.array]],
) -> DerivedWeights:
    """Weights `makes` (name -> shape) of the values of `module`'s weight [..., columns].

    Where it is quantised, `function` gets the values that it stands for, and what it makes is not.
    Raises ModelLoadFailed where it is quantised in no known layout.
    """
    names = tuple(f"{module}.{kind}" for kind in _stored(found, module) if kind != "bias")
    weight = found[f"{module}.weight"]
    layout, dtype = None, weight.dtype
    if f"{module}.scales" in found:
        scales = found[f"{module}.scales"]
        layout = quantisation.layout_from_shapes(
            module, columns, weight.shape, scales.shape, scales.dtype
        )
        dtype = scales.dtype if layout.mode == "affine" else "BF16"

    def make(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        if layout is None:
            return function(arrays[0])
        from mlxpool.worker.layers.quantised_weight import QuantisedWeight

        by_name = dict(zip(names, arrays, strict=True))
        return function(QuantisedWeight.of(by_name, module, layout).dense())

    return DerivedWeights(
        names, {name: TensorSpec(dtype, shape) for name, shape in makes.items()}, make
    )


def from_mxfp4_blocks(
    found: StoredTensors, source: str, modules: Sequence[str]
) -> Iterator[DerivedWeights]:
    """Experts released in mxfp4, as bytes: `source`_blocks [E, rows, groups, 16], `source`_scales
    [E, rows, groups] and `source`_bias [E, rows]; the rows of several `modules` take turns in them.
    """
    blocks = found[f"{source}_blocks"].shape
    if len(blocks) != 4 or blocks[1] % len(modules):
        raise ModelLoadFailed(
            f"tensor '{source}_blocks' has shape {list(blocks)}, must be [experts, rows, groups, "
            f"16] with rows for {len(modules)} modules"
        )
    stacked_experts, rows, groups, size = blocks
    lead = (stacked_experts, rows // len(modules))
    kinds = {"blocks": ("weight", (groups * size // 4,)), "scales": ("scales", (groups,))}
    for stored, (kind, last) in {**kinds, "bias": ("bias", ())}.items():
        name = f"{source}_{stored}"
        if name in found:
            spec = TensorSpec("U32" if kind == "weight" else found[name].dtype, (*lead, *last))
            makes = {f"{module}.{kind}": spec for module in modules}
            yield DerivedWeights((name,), makes, partial(_in_turns, count=len(modules)))


def _in_turns(arrays: Sequence[mx.array], *, count: int) -> Sequence[mx.array]:
    """The rows of each module; numbers come as words."""
    import mlx.core as mx

    array = arrays[0]
    if array.ndim == 4:
        array = array.view(mx.uint32).flatten(-2)
    return [mx.contiguous(array[:, turn::count]) for turn in range(count)]


def _stored(found: StoredTensors, module: str) -> Iterator[str]:
    return (kind for kind in MODULE_TENSORS if f"{module}.{kind}" in found)


def _require_equal(found: StoredTensors, names: Sequence[str]) -> None:
    first = found[names[0]]
    for name in names:
        other = found.get(name, first)
        if other != first:
            raise ModelLoadFailed(
                f"tensor {name!r} is {other.dtype} {list(other.shape)}, {names[0]!r} is "
                f"{first.dtype} {list(first.shape)}: they must be alike to be stacked"
            )


def _stack(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
    import mlx.core as mx

    return [mx.stack(list(arrays))]
