"""The line of figures about finished completions, for `run` and `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxpool.client import Choices, Result


def figures(result: Result, seconds: float, streamed: float) -> str:
    """One line about a finished completion; times are seconds, `streamed` since the first token.

    A worker reports the decode time of its own tokens only, which is too short after a failover.
    """
    generated = result.usage.get("completion_tokens", 0)
    decode = max(streamed, result.timings_ms.get("decode", 0.0) / 1000)
    rate = f"{generated / decode:.0f} tokens/s, " if decode and generated > 1 else ""
    prompt = result.usage.get("prompt_tokens", 0)
    cached = result.usage.get("cached_tokens", 0)
    return (
        f"[{generated} tokens, {rate}prompt {prompt} ({cached} cached), {seconds:.2f} s,"
        f" ended: {result.reason}, seed {result.seed}]"
    )


def figures_of(choices: Choices, seconds: float, streamed: float) -> str:
    """As `figures`, about all choices of a prompt; about a single one the same."""
    if len(choices) == 1:
        return figures(choices[0], seconds, streamed)
    usage = choices.usage
    prompt, cached = usage["prompt_tokens"], usage["cached_tokens"]
    return (
        f"[{len(choices)} choices, {usage['completion_tokens']} tokens, prompt {prompt}"
        f" ({cached} cached), {seconds:.2f} s, seeds from {choices.seed}]"
    )
