"""What a new request must pass: the pool and the model admit, queue and quotas have room. Pure."""

from __future__ import annotations

from mlxpool.broker.core.state import QUEUE_RETRY_MS, State
from mlxpool.broker.models.model import Model
from mlxpool.broker.requests.fair_queue import prompt_tokens
from mlxpool.broker.requests.quotas import milliseconds
from mlxpool.common.errors import Draining, OverQuota, QueueFull
from mlxpool.common.protocol.to_broker import Generate

RESUME_FACTOR = 4  # times the bounds hold for streams that another broker had accepted


def check_admits(state: State, model: Model, name: str) -> None:
    """Raises Draining if the pool or the model takes nothing new."""
    if not state.admits:
        raise Draining("the broker is going down; send the request again later")
    if not model.admits:
        raise Draining(f"model {name!r} is drained; `mlxpool load {name}` opens it again")


def bound_factor(message: Generate) -> int:
    """How much larger the bounds are for a message: what was accepted once is refused late."""
    return RESUME_FACTOR if message.resume_ids else 1


def check_queue(state: State, model: Model, message: Generate) -> None:
    """Raises QueueFull if the model's queue is full by count or bytes."""
    factor, queue = bound_factor(message), model.queue
    limit, most = factor * state.config.queue_limit, factor * state.config.queue_bytes
    if len(queue) >= limit or queue.bytes + message.size > most:
        raise QueueFull(
            f"{len(queue)} requests with {queue.bytes} bytes of prompt wait for"
            f" model {message.model!r}, at most {limit} and {most}; retry later",
            retry_after_ms=QUEUE_RETRY_MS,
        )


def check_live_requests(state: State, owner: str, message: Generate) -> None:
    """Raises OverQuota if the owner has as many live requests as it may."""
    live, most = state.owned[owner], bound_factor(message) * state.config.quota_requests
    if 0 < most <= live:
        raise OverQuota(
            f"{owner} has {live} live requests, at most {most} (quota_requests); wait until one"
            " ends",
            details={"owner": owner, "value": live, "bound": most},
            retry_after_ms=QUEUE_RETRY_MS,
        )


def check_waiting_tokens(state: State, owner: str, message: Generate) -> None:
    """Raises OverQuota if too many of the owner's prompt tokens would wait."""
    most = bound_factor(message) * state.config.quota_tokens
    if not most:
        return
    waiting = sum(
        prompt_tokens(request.message)
        for model in state.registry.models.values()
        for request in model.queue
        if request.owner == owner
    )
    if waiting + prompt_tokens(message) > most:
        raise OverQuota(
            f"{owner} has about {waiting} tokens of prompt waiting, with this request more than"
            f" {most} (quota_tokens); wait until some are read",
            details={"owner": owner, "value": waiting, "bound": most},
            retry_after_ms=QUEUE_RETRY_MS,
        )


def check_cancels(state: State, owner: str, now: float) -> None:
    """Raises OverQuota if the owner cancels too many requests a second."""
    bound = state.config.quota_cancels
    wait = state.cancel_rates.wait(owner, bound, now)
    if wait:
        raise OverQuota(
            f"{owner} cancels more than {bound} requests a second"
            " (quota_cancels); cancel less, or wait",
            details={"owner": owner, "bound": bound},
            retry_after_ms=milliseconds(wait),
        )
