"""How tokens choose experts. No MLX."""

from __future__ import annotations

from msgspec import Struct


class RoutingParams(Struct, frozen=True):
    """Each token chooses the `chosen` best of `count` experts.

    Their weights are a softmax of all experts' logits, or sigmoids of them. An array [E] may be
    added: to the logits of a softmax, or to sigmoids to choose by, but not to weights.
    Where sigmoids are in `groups`, those of all but the `chosen_groups` best groups, by their two
    best experts, count as 0.
    """

    count: int
    chosen: int
    sigmoid: bool
    normed: bool  # whether the weights of a token's experts are scaled to add up to `factor`
    factor: float = 1.0  # of all weights
    groups: int = 1
    chosen_groups: int = 1
