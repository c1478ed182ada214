"""Weights that a checkpoint stores under other names or in another layout than the model uses.

A ModelPlan names the weights of the model. If a checkpoint differs, the function
`ModelPlan.derived` gets the tensors that the headers list. The function yields a DerivedWeights for
each weight that is made from stored tensors: renamed, stacked, split, transposed, shifted. Weights
are made during loading, one after the other, so that only one weight is in memory twice. MLX is
imported only when a weight is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers import quantisation

if TYPE_CHECKING:
    import mlx.core as mx

# The tensors of a module; `bias` belongs to the layer, `biases` belong to quantised groups.
MODULE_TENSORS = ("weight", "scales", "biases", *quantisation.GLOBAL_SCALES, "bias")


class TensorSpec(Struct, frozen=True):
    """The dtype and shape of a tensor in a header; `dtype` is a name of safetensors."""

    dtype: str
    shape: tuple[int, ...]


StoredTensors: TypeAlias = Mapping[str, TensorSpec]
Transform: TypeAlias = "Callable[[Sequence[mx.array]], Sequence[mx.array]]"


class DerivedWeights(Struct, frozen=True):
    """Weights that are made from stored tensors; the model does not get the stored tensors.

    `transform` maps the arrays of `sources` to the arrays of `outputs`, both in this order. The
    error for a missing source names the source. An output may have the name of a source.
    """

    sources: tuple[str, ...]
    outputs: Mapping[str, TensorSpec]
    transform: Transform


def no_derived_weights(found: StoredTensors) -> Iterable[DerivedWeights]:
    """Returns no weights, for a ModelPlan whose weights are the stored tensors."""
    return ()


def renamed(found: StoredTensors, module: str, source: str) -> Iterator[DerivedWeights]:
    """Yields `module`, quantised or not, from a checkpoint that stores it as `source`."""
    for kind in _stored(found, source):
        name = f"{source}.{kind}"
        yield DerivedWeights((name,), {f"{module}.{kind}": found[name]}, tuple)


def stacked(found: StoredTensors, module: str, sources: Sequence[str]) -> Iterator[DerivedWeights]:
    """Yields `module`: the modules `sources`, stacked on a new first axis, quantised or not.

    Raises ModelLoadFailed if the tensors of the sources have different shapes or dtypes.
    """
    for kind in _stored(found, sources[0]):
        names = tuple(f"{source}.{kind}" for source in sources)
        first = found[names[0]]
        _require_equal(found, names)
        spec = replace(first, shape=(len(names), *first.shape))
        yield DerivedWeights(names, {f"{module}.{kind}": spec}, _stack)


def stacked_experts(found: StoredTensors, module: str, count: int) -> Iterator[DerivedWeights]:
    """Yields stacked experts `….switch_mlp.X`, from stored `….experts.E.X` or `….experts.X`."""
    single = [module.replace(".switch_mlp.", f".experts.{expert}.") for expert in range(count)]
    stacked_name = module.replace(".switch_mlp.", ".experts.")
    if f"{single[0]}.weight" in found:
        yield from stacked(found, module, single)
    elif f"{stacked_name}.weight" in found:
        yield from renamed(found, module, stacked_name)


def reordered(found: StoredTensors, module: str, rows: Sequence[int]) -> Iterator[DerivedWeights]:
    """Yields `module` with the rows (the first axis) of its tensors in the order `rows`."""

    def transform(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        import mlx.core as mx

        return [arrays[0][mx.array(list(rows))]]

    for kind in _stored(found, module):
        if kind != "global_scale":
            name = f"{module}.{kind}"
            yield DerivedWeights((name,), {name: found[name]}, transform)


def mapped(
    found: StoredTensors, name: str, function: Callable[[mx.array], mx.array]
) -> DerivedWeights:
    """Returns the tensor `name` with `function` applied; `function` must keep the shape."""
    return DerivedWeights((name,), {name: found[name]}, lambda arrays: [function(arrays[0])])


def plus_one(weight: mx.array) -> mx.array:
    """Returns weight + 1 in float32, for checkpoints that store norm weights minus one."""
    import mlx.core as mx

    return weight.astype(mx.float32) + 1


def without_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Returns the name with the first matching prefix replaced.

    `prefixes` maps stored prefixes to this project's prefixes.
    """
    for stored, ours in prefixes.items():
        if name.startswith(stored):
            return ours + name.removeprefix(stored)
    return name


def from_dequantised(
    found: StoredTensors,
    module: str,
    columns: int,
    outputs: Mapping[str, tuple[int, ...]],
    function: Callable[[mx.array], Sequence[mx.array]],
) -> DerivedWeights:
    """Returns unquantised weights `outputs` (name -> shape) made from `module`'s weight.

    `function` gets the weight [..., columns], dequantised if it is stored quantised. Raises
    ModelLoadFailed if its layout is unknown.
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

    def transform(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        if layout is None:
            return function(arrays[0])
        from mlxpool.worker.layers.quantised_weight import QuantisedWeight

        by_name = dict(zip(names, arrays, strict=True))
        return function(QuantisedWeight.of(by_name, module, layout).dequantised())

    return DerivedWeights(
        names, {name: TensorSpec(dtype, shape) for name, shape in outputs.items()}, transform
    )


def from_mxfp4_blocks(
    found: StoredTensors, source: str, modules: Sequence[str]
) -> Iterator[DerivedWeights]:
    """Yields the experts' `modules` from tensors of mxfp4 bytes.

    The tensors are `source`_blocks [E, rows, groups, 16], `source`_scales [E, rows, groups] and
    `source`_bias [E, rows]. The rows of several `modules` are interleaved. Raises ModelLoadFailed
    for blocks of another shape.
    """
    blocks = found[f"{source}_blocks"].shape
    if len(blocks) != 4 or blocks[1] % len(modules):
        raise ModelLoadFailed(
            f"tensor '{source}_blocks' has shape {list(blocks)}, must be [experts, rows, groups, "
            f"16] with rows for {len(modules)} modules"
        )
    count, rows, groups, size = blocks
    lead = (count, rows // len(modules))
    kinds = {"blocks": ("weight", (groups * size // 4,)), "scales": ("scales", (groups,))}
    for stored, (kind, last) in {**kinds, "bias": ("bias", ())}.items():
        name = f"{source}_{stored}"
        if name in found:
            spec = TensorSpec("U32" if kind == "weight" else found[name].dtype, (*lead, *last))
            outputs = {f"{module}.{kind}": spec for module in modules}
            yield DerivedWeights((name,), outputs, partial(_deinterleaved, count=len(modules)))


def _deinterleaved(arrays: Sequence[mx.array], *, count: int) -> Sequence[mx.array]:
    """Divides interleaved rows among `count` modules; 4-bit blocks become packed uint32."""
    import mlx.core as mx

    array = arrays[0]
    if array.ndim == 4:
        array = array.view(mx.uint32).flatten(-2)
    return [mx.contiguous(array[:, module::count]) for module in range(count)]


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
