"""Mixtures of experts: each token goes through the few of many linear layers chosen for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from mlxpool.worker.layers.interface import Activation
from mlxpool.worker.layers.quantised_weight import QuantisedWeight

SORT_CHOICES = 64  # choices from which it pays to put those of one expert side by side

Weight: TypeAlias = "mx.array | QuantisedWeight"


@dataclass(frozen=True, slots=True)
class SwitchLinear:
    """Linear layers with weight [E, out, in] and bias [E, out] or None."""

    weight: Weight
    bias: mx.array | None

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """x [T, in] or [T, k, in] with the experts [T, k] of each token -> [T, k, out]."""
        lines = x[:, None, None] if x.ndim == 2 else x[:, :, None]
        return self.lines(lines, experts, ordered=False).squeeze(-2)

    def lines(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """x [..., 1, in] with the expert [...] of each -> [..., 1, out].

        `ordered`: the experts are sorted.
        """
        if isinstance(self.weight, QuantisedWeight):
            out = self.weight.gathered(x, experts, ordered)
        else:
            weight = self.weight.swapaxes(-1, -2)
            out = mx.gather_mm(x, weight, rhs_indices=experts, sorted_indices=ordered)
        return out if self.bias is None else out + self.bias[experts][..., None, :]


@dataclass(frozen=True, slots=True)
class SwitchGLU:
    """down(activation(gate(x), up(x))) of the experts chosen.

    `gate_up` gives both side by side where there is one, else `gate` and `up` do. `exact`: never
    sorted, so that each line is a product of its own whatever its company.
    """

    gate_up: tuple[SwitchLinear, ...]  # one of both, or gate and up
    down: SwitchLinear
    activation: Activation
    exact: bool = False

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """x [T, in] with the experts [T, k] of each token -> [T, k, in]."""
        if self.exact or experts.size < SORT_CHOICES:
            return self._lines(x[:, None, None], experts, ordered=False).squeeze(-2)
        flat = experts.flatten()
        order = mx.argsort(flat)
        # A line's axis is put in before lines are taken: of one put in afterwards MLX 0.32 takes
        # the stride for that of a line, and multiplies others, on a GPU (its issue 4253).
        lines = x[:, None][order // experts.shape[1]]
        out = self._lines(lines, flat[order], ordered=True)
        return out.squeeze(-2)[mx.argsort(order)].reshape(*experts.shape, -1)

    def _lines(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        parts = [part.lines(x, experts, ordered=ordered) for part in self.gate_up]
        gate, up = parts if len(parts) == 2 else mx.split(parts[0], 2, axis=-1)
        return self.down.lines(self.activation(gate, up), experts, ordered=ordered)
