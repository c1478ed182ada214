"""Two ranks give the tokens and the log-probabilities of one device, whatever the architecture."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.engine.engine import Engine  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.groups.messages import Again, Message, Pass  # noqa: E402
from mlxpool.worker.groups.pipes import Orders  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from support.engine_steps import decode, drain, enter  # noqa: E402
from support.rank_pair import RankPair, single  # noqa: E402
from support.worker_checkpoints import GLM, config, random_weights, write_checkpoint  # noqa: E402

pytestmark = pytest.mark.skipif(
    device.on_gpu(), reason="two ranks need two GPUs; the CPU's ring is what is tested"
)

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 2,  # one layer of each kind
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
}
QUANTISED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "quantization": {"group_size": 32, "bits": 4},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with tied embeddings": {"tie_word_embeddings": True},
    "llama, 4 bits": QUANTISED,
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, expert by expert": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "glm4_moe_lite": GLM,
    "llama, a pass ahead": {},
    "llama, rows of several blocks": {"max_position_embeddings": 1024},
    "llama, int8 keys and values": {},
    "gpt_oss, int8 keys and values": GPT_OSS,
}


def weights_of(name: str, changes: dict[str, Any]) -> dict[str, np.ndarray]:
    weights = random_weights(config(**changes))
    if "expert by expert" in name:
        weights = dict(_single_experts(weights))
    if "quantization" in changes:
        weights = dict(_quantised(weights, changes["quantization"]))
    return weights


def _single_experts(weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights in the form of released checkpoints, with a tensor for each expert."""
    for name, array in weights.items():
        if ".switch_mlp." not in name:
            yield name, array
            continue
        for number, expert in enumerate(array):
            yield name.replace(".switch_mlp.", f".experts.{number}."), expert


def _quantised(
    weights: dict[str, np.ndarray], setting: dict[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
    for name, array in weights.items():
        if array.ndim < 2:
            yield name, array
            continue
        module = name.removesuffix(".weight")
        parts = mx.quantize(mx.array(array), **setting)
        for kind, part in zip(("weight", "scales", "biases"), parts, strict=True):
            yield f"{module}.{kind}", np.array(part)


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPair]:
    with RankPair() as ranks:
        yield ranks


@pytest.fixture(scope="module", params=MODELS)
def engines(
    request: pytest.FixtureRequest, pair: RankPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelEngine, ModelEngine]]:
    changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, weights=weights_of(request.param, changes), **changes)
    ahead = "a pass ahead" in request.param
    kv = "int8" if "int8" in request.param else "auto"
    context = 512 if "several blocks" in request.param else 128
    with pair.engine(folder, lookahead=ahead, kv=kv, context=context) as group:
        if ahead:  # as on a GPU: a pass begins before rank 0 has read the previous pass's tokens
            group.warm_up()
        whole = single(folder, kv=kv, context=context)
        yield group, whole
        whole.close()


def test_a_rank_that_has_joined_leaves_no_variables_to_processes_it_starts(pair: RankPair) -> None:
    """A child process does not inherit the variables of a rank.

    With them a child that uses MLX would join the group and wait for other ranks.
    """
    assert pair.collectives.ranks == 2
    assert not {"MLX_RANK", "MLX_WORLD_SIZE", "MLX_HOSTFILE", "NCCL_PORT"} & os.environ.keys()


def sequence(number: int, size: int, **options: Any) -> Sequence:
    prompt = tuple((7 * number + 11 * n) % 250 for n in range(size))
    wanted = Options.parse({"ignore_eos": True, **options})
    return Sequence(bytes([number]), 0, prompt, wanted, number, 40)


def tokens(engine: Engine) -> list[list[int]]:
    """Returns greedy and sampled tokens of three rows; one row leaves before the others."""
    rows = [
        sequence(1, 40, temperature=0.0),
        sequence(2, 21, temperature=0.8),
        sequence(3, 5, temperature=1.0, repeat_penalty=1.2),
    ]
    for row in rows:
        enter(engine, row)
    decode(engine, rows, 4)
    engine.release(rows[0])
    decode(engine, rows[1:], 6)
    for row in rows[1:]:
        engine.release(row)
    drain(engine)
    return [list(row.ids) for row in rows]


def test_it_draws_the_tokens_of_one_device(engines: tuple[ModelEngine, ModelEngine]) -> None:
    group, whole = engines
    answers = tokens(group)
    assert [len(ids) for ids in answers] == [4, 10, 10]
    assert answers == tokens(whole)


def test_rows_that_only_decode_are_sent_once(
    engines: tuple[ModelEngine, ModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later passes send only the changes: new ids, and the blocks that rows begin."""
    sent, long = _sent(monkeypatch), engines[0].context > KV_BLOCK_TOKENS
    answers = []
    for engine in engines:
        sizes = (240, 250) if long else (12, 30)
        rows = [sequence(number, size, temperature=0.0) for number, size in enumerate(sizes)]
        for row in rows:
            enter(engine, row)
        decode(engine, rows, 36)
        for row in rows:
            engine.release(row)
        drain(engine)
        answers.append([row.ids for row in rows])
    assert answers[0] == answers[1]
    passes = [message for message in sent if isinstance(message, Pass | Again)]
    again = [message for message in passes if isinstance(message, Again)]
    assert 30 <= len(again) < len(passes)
    assert sum(bool(message.tables) for message in again) == (2 if long else 0)


def _sent(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Returns a list that gets every message which rank 0 sends from now on."""
    sent: list[Message] = []
    send = Orders.send

    def kept(orders: Orders, message: Message) -> None:
        sent.append(message)
        send(orders, message)

    monkeypatch.setattr(Orders, "send", kept)
    return sent


def test_a_prompt_is_found_in_the_prefix_cache(engines: tuple[ModelEngine, ModelEngine]) -> None:
    """A second request with the same prompt reuses the prompt's blocks on every rank.

    A block is copied before the request's row writes to it.
    """
    answers = []
    for engine in engines:
        first, again = sequence(9, 45, temperature=0.0), sequence(9, 45, temperature=0.9)
        enter(engine, first)
        decode(engine, [first], 5)
        engine.release(first)
        enter(engine, again)
        # The other engine may keep only windows.
        assert again.cached == 44 or engine is not engines[0]
        decode(engine, [again], 8)
        engine.release(again)
        drain(engine)
        answers.append([list(first.ids), list(again.ids)])
    assert answers[0] == answers[1]


def test_log_probabilities_of_a_prompt_agree(engines: tuple[ModelEngine, ModelEngine]) -> None:
    """The logits of prompt tokens are computed outside of the pass, on each rank."""
    logprobs = []
    for engine in engines:
        row = sequence(4, 30, temperature=0.0, prompt_logprobs=2)
        row.reported = 1
        engine.admit(row)
        given = []
        while row.submitted < len(row.prompt) - 1:
            span = Span(row, row.submitted, engine.clip(row, 29), draws=0, hidden=True)
            engine.submit([span])
            given += [entry.logprob for entry in engine.collect().prompts[0].logprobs]
        engine.release(row)
        logprobs.append(given)
    assert len(logprobs[0]) == 29
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=2e-4)


def test_a_rank_has_its_part_of_weights_and_cache(
    engines: tuple[ModelEngine, ModelEngine],
) -> None:
    """The memory figures of a group are the sums over all its ranks."""
    group, whole = engines
    mine, all_of_it = group.memory().weights / 2, whole.memory().weights
    assert 0.49 < mine / all_of_it < 0.6
    assert re.fullmatch("pool(, int8)?", group.layout) and re.match("slabs|rows", whole.layout)
