"""How tokens choose experts. No MLX."""

from __future__ import annotations

from msgspec import Struct


class RoutingParams(Struct, frozen=True):
    """Each token chooses the `chosen` best of `count` experts.

    Their weights are a softmax of all experts' logits, or sigmoids of them. An array [E] may be
    added to the logits of a softmax, or to the sigmoids that experts are chosen by; it does not
    change the weights of sigmoids. If sigmoids are in `groups`, only the `chosen_groups` best
    groups, by their two best experts, count; the sigmoids of all others count as 0.
    """

    count: int
    chosen: int
    sigmoid: bool
    normed: bool  # whether the weights of a token's experts are scaled to add up to `factor`
    factor: float = 1.0  # of all weights
    groups: int = 1
    chosen_groups: int = 1
