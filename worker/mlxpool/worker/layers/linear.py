"""Layers over named weights in MLX, quantised or not: a model file does not see which."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.kernels import cpu_exp, matmul_small, rms_norm
from mlxpool.worker.kernels.matmul_small import Around
from mlxpool.worker.layers.columns import by_columns
from mlxpool.worker.layers.derived_weights import STORED
from mlxpool.worker.layers.experts import ExpertMLP, Experts
from mlxpool.worker.layers.interface import Activation, Asked, Normed
from mlxpool.worker.layers.interface import Linear as AnyLinear
from mlxpool.worker.layers.quantisation import FACTORS, Quant
from mlxpool.worker.layers.quantised import Packed, side_by_side

TILE = 8  # tokens of each product where results may not depend on how many there are


class Fusing:
    """A linear layer whose product may norm its lines first, and add to them at the end."""

    __slots__ = ()

    def __call__(self, x: Asked) -> mx.array:
        if not isinstance(x, Normed):
            return self.plain(x)
        return self.fused(x.x, _around(x)) if self.fuses(x.x) else self.plain(x())

    def gated(self, x: Asked) -> mx.array | None:
        """Of a weight whose first half are gates silu(gate) * other, if a kernel does it in one."""
        if not isinstance(x, Normed):
            return self.plain_gated(x)
        if self.fuses(x.x):
            return self.fused(x.x, _around(x, gated=True))
        return self.plain_gated(x())

    def onto(self, x: mx.array, beside: mx.array) -> mx.array | None:
        """See base.Linear."""
        if beside.dtype == x.dtype and self.fuses(x):
            return self.fused(x, Around(beside=beside))
        return None

    def plain(self, x: mx.array) -> mx.array:
        """x [T, in] -> [T, out]."""
        raise NotImplementedError

    def plain_gated(self, x: mx.array) -> mx.array | None:
        """See `gated`."""
        raise NotImplementedError

    def fuses(self, x: mx.array) -> bool:
        """Whether a kernel takes these lines and what is Around their product."""
        raise NotImplementedError

    def fused(self, x: mx.array, around: Around) -> mx.array:
        """The product of lines for which that is so."""
        raise NotImplementedError


def _around(x: Normed, *, gated: bool = False) -> Around:
    assert isinstance(x.norm, Norm)
    return Around(gated=gated, gain=x.norm.weight, eps=x.norm.eps)


@dataclass(frozen=True, slots=True)
class Linear(Fusing):
    """x [T, in] -> [T, out] with weight [out, in] and bias [out] or None."""

    weight: mx.array
    bias: mx.array | None
    exact: bool = False

    def plain(self, x: mx.array) -> mx.array:
        """See Fusing."""
        if self.exact:
            out = tiled(x, self.weight)
            return out if self.bias is None else out + self.bias
        if self.bias is None:
            return matmul_small.times(x, self.weight)
        return mx.addmm(self.bias, x, self.weight.T)

    def plain_gated(self, x: mx.array) -> mx.array | None:
        """See Fusing."""
        if self.bias is None and not self.exact and matmul_small.reads(x, self.weight):
            return matmul_small.gated(x, self.weight)
        return None

    def fuses(self, x: mx.array) -> bool:
        """See Fusing."""
        return self.bias is None and not self.exact and matmul_small.fuses(x, self.weight)

    def fused(self, x: mx.array, around: Around) -> mx.array:
        """See Fusing."""
        return matmul_small.product(x, self.weight, around)


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """x [T, in] -> activation(gate, up) [T, width] of the two that `gate_up` gives side by side."""

    gate_up: AnyLinear
    width: int
    activation: Activation
    swiglu: bool

    def __call__(self, x: Asked) -> mx.array:
        layer = self.gate_up
        if self.swiglu and isinstance(layer, Fusing):
            found = layer.gated(x)
            if found is not None:
                return found
        both = layer(x)
        return self.activation(both[:, : self.width], both[:, self.width :])


@dataclass(frozen=True, slots=True)
class QuantisedLinear(Fusing):
    """x [T, in] -> [T, out] with a quantised weight [out, in] and bias [out] or None."""

    weight: Packed
    bias: mx.array | None

    def plain(self, x: mx.array) -> mx.array:
        """See Fusing."""
        out = self.weight(x)
        return out if self.bias is None else out + self.bias

    def plain_gated(self, x: mx.array) -> mx.array | None:
        """See Fusing."""
        return self.weight.gated(x) if self.bias is None else None

    def fuses(self, x: mx.array) -> bool:
        """See Fusing."""
        return self.bias is None and self.weight.fuses(x)

    def fused(self, x: mx.array, around: Around) -> mx.array:
        """See Fusing."""
        return self.weight.as_it_lies(x, around)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """x [T, in] -> the outputs of several layers, one behind the other [T, sum of out]."""

    layers: tuple[AnyLinear, ...]

    def __call__(self, x: Asked) -> mx.array:
        x = x() if isinstance(x, Normed) else x
        return mx.concatenate([layer(x) for layer in self.layers], axis=-1)

    def onto(self, x: mx.array, beside: mx.array) -> None:
        """See base.Linear."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm over the last axis."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)

    def after(self, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        """x + y, and its norm."""
        if self.weight.dtype == x.dtype == y.dtype and rms_norm.serves(x.shape[-1], x.dtype):
            return rms_norm.add_norm(x, y, self.weight, self.eps)
        x = x + y
        return x, self(x)

    def late(self, x: mx.array) -> Asked:
        """See base.Norm."""
        return Normed(x, self) if matmul_small.norms(x, self.weight) else self(x)


@dataclass(frozen=True, slots=True)
class Embedding:
    """tokens [T] -> [T, d], and x [T, d] -> logits [T, vocabulary], with weight [vocabulary, d]."""

    weight: mx.array
    exact: bool = False

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight[tokens]

    def as_linear(self, x: Asked) -> mx.array:
        return Linear(self.weight, None, self.exact)(x)


@dataclass(frozen=True, slots=True)
class QuantisedEmbedding:
    """As Embedding, with a quantised weight; its rows come in `dtype`."""

    weight: Packed
    dtype: mx.Dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight.rows(tokens, self.dtype)

    def as_linear(self, x: Asked) -> mx.array:
        return QuantisedLinear(self.weight, None)(x)


@dataclass(frozen=True, slots=True)
class Heads:
    """A linear layer for each head, with weight [H, out, in]."""

    weight: mx.array | Packed
    exact: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        """x [H, T, in] -> [H, T, out]."""
        if isinstance(self.weight, Packed):
            return self.weight(x)
        return self._product(x, self.weight.swapaxes(-1, -2))

    def back(self, x: mx.array) -> mx.array:
        """x [H, T, out] -> [H, T, in], with the same weight the other way round."""
        if isinstance(self.weight, Packed):
            return self.weight(x, transpose=False)
        return self._product(x, self.weight)

    def _product(self, x: mx.array, weight: mx.array) -> mx.array:
        if not self.exact:
            return x @ weight
        heads, tokens, size = x.shape
        tiles = padded(x.swapaxes(0, 1), TILE).swapaxes(0, 1).reshape(heads, -1, TILE, size)
        columns = weight.shape[-1]
        shape = (heads, tiles.shape[1], size, columns)
        out = tiles @ mx.broadcast_to(weight[:, None], shape)
        return out.reshape(heads, -1, columns)[:, :tokens]


def padded(x: mx.array, multiple: int) -> mx.array:
    """x [T, ...] with zeros behind it up to a multiple of tokens."""
    missing = -x.shape[0] % multiple
    return mx.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def tiled(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] @ weight.T in products of TILE lines, all of one shape: a line's bits do not depend
    on T. (A product of another shape may take another kernel, which rounds otherwise.)
    """
    tokens, size = x.shape
    tiles = padded(x, TILE).reshape(-1, TILE, size)
    weights = mx.broadcast_to(weight.T, (tiles.shape[0], size, weight.shape[0]))
    return (tiles @ weights).reshape(-1, weight.shape[0])[:tokens]


class Parts:
    """The parts of a model whose weights are these, computed in `dtype`.

    `layouts` says which modules have a quantised weight, and how; `opened`: these are turned into
    numbers once, here. `exact`: see `tiled`; they are opened then, too, for their own products come
    in no tiles. Each part takes its weights out, so that they are not there twice.
    """

    def __init__(
        self,
        weights: MutableMapping[str, mx.array],
        layouts: Mapping[str, Quant],
        dtype: mx.Dtype,
        *,
        exact: bool = False,
        opened: bool = False,
    ) -> None:
        self._weights = weights
        self._layouts = layouts
        self._dtype = dtype
        self._exact = exact
        self._opened = opened or exact

    def linear(self, name: str) -> AnyLinear:
        return self.joined([name])

    def joined(self, names: Sequence[str]) -> AnyLinear:
        """Linear layers of one input as one, outputs side by side: fewer and larger products.

        Quantised ones may stay apart within, see `_joined_weight`.
        """
        if self._are_numbers(names):
            weight = _laid_out([self._dense(name) for name in names])
            return Linear(weight, self._joined_bias(names), self._exact)
        packed = self._joined_weight(names)
        if packed is None:
            return SideBySide(tuple(self.linear(name) for name in names))
        assert isinstance(packed, Packed)
        return QuantisedLinear(packed, self._joined_bias(names))

    def gated(
        self, names: Sequence[str], width: int, activation: Activation | None = None
    ) -> GatedLinear:
        """Layers `names` for gates and what they gate, [width, in] each; else swiglu."""
        joined = self.joined(names)
        return GatedLinear(joined, width, activation or self.swiglu, activation is None)

    def norm(self, name: str, eps: float) -> Norm:
        return Norm(self.array(f"{name}.weight"), eps)

    def embedding(self, name: str) -> Embedding | QuantisedEmbedding:
        weight = self._weight(name)
        if isinstance(weight, Packed):
            return QuantisedEmbedding(weight, self._dtype)
        return Embedding(weight, self._exact)

    def array(self, name: str) -> mx.array:
        """A tensor by its whole name, for what is no layer."""
        return self._weights.pop(name)

    def heads(self, name: str) -> Heads:
        """A linear layer for each head, weight [H, out, in]."""
        return Heads(self._weight(name), self._exact)

    def experts(self, name: str) -> Experts:
        """Linear layers stacked, weight [E, out, in], called with the experts chosen."""
        return Experts(self._weight(name), self._joined_bias([name]))

    def expert_mlp(self, name: str, activation: Activation | None = None) -> ExpertMLP:
        """The experts `name`.gate_proj, .up_proj and .down_proj; without `activation` swiglu."""
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        weight = self._joined_weight(names)
        if weight is None:
            gate_up = tuple(self.experts(one) for one in names)
        else:
            gate_up = (Experts(weight, self._joined_bias(names)),)
        down = self.experts(f"{name}.down_proj")
        return ExpertMLP(gate_up, down, activation or self.swiglu, self._exact)

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        if _on_gpu():
            return _fused_swiglu(gate, up)
        if self._exact or not cpu_exp.serves(gate):
            return _swiglu(gate, up)
        return cpu_exp.swiglu(gate, up)

    def _weight(self, name: str) -> mx.array | Packed:
        weight = self._joined_weight([name])
        assert weight is not None, "one weight has one layout"
        return weight

    def _are_numbers(self, names: Sequence[str]) -> bool:
        """Whether the weights are computed with as plain numbers."""
        return self._opened or not any(self._layouts.get(name) for name in names)

    def _joined_weight(self, names: Sequence[str]) -> mx.array | Packed | None:
        """The weights [..., out, in] as one along `out`; None where they stay apart.

        So do quantised ones of different layouts, and all on the CPU: there the copy at load costs
        more than larger products gain.
        """
        layouts = {self._layouts.get(name) for name in names}
        if self._are_numbers(names):
            return _concatenated([self._dense(name) for name in names], axis=-2)
        factors = [f"{name}.{kind}" for name in names for kind in FACTORS]
        scaled = any(factor in self._weights for factor in factors)
        if len(names) > 1 and (len(layouts) > 1 or scaled or not _on_gpu()):
            return None
        return side_by_side([self._packed(name, self._layouts[name]) for name in names])

    def _joined_bias(self, names: Sequence[str]) -> mx.array | None:
        if f"{names[0]}.bias" not in self._weights:
            return None
        return _concatenated([self._weights.pop(f"{name}.bias") for name in names], axis=-1)

    def _dense(self, name: str) -> mx.array:
        layout = self._layouts.get(name)
        if layout is None:
            return self._weights.pop(f"{name}.weight")
        weight = self._packed(name, layout).dense(self._dtype)
        mx.eval(weight)
        return weight

    def _packed(self, name: str, layout: Quant) -> Packed:
        names = [one for kind in STORED if (one := f"{name}.{kind}") in self._weights]
        arrays = {one: self._weights.pop(one) for one in names if not one.endswith(".bias")}
        return Packed.of(arrays, name, layout)


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


_fused_swiglu = mx.compile(_swiglu, shapeless=True)  # one kernel; a CPU might have no compiler


def _concatenated(parts: Sequence[mx.array], axis: int) -> mx.array:
    if len(parts) == 1:
        return parts[0]
    whole = mx.concatenate(list(parts), axis=axis)
    mx.eval(whole)
    return whole


def _laid_out(parts: Sequence[mx.array]) -> mx.array:
    """The weights [out, in] as one; on the CPU by columns, which small products read faster."""
    return _concatenated(parts, axis=0) if _on_gpu() else by_columns(parts)


def _on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu
