"""The longer cases of the reference suite for samplers, log-probabilities and text.

conformance.md beside this file lists all cases and their tests.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.common.protocol.resume import Facts  # noqa: E402
from mlxpool.worker.compute.generations import Generation  # noqa: E402
from mlxpool.worker.prompt.detokenizer import Detokenizer  # noqa: E402
from mlxpool.worker.sampling.batch import SampleRequest  # noqa: E402
from mlxpool.worker.sampling.sampler import sample  # noqa: E402
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence, TokenLogprob  # noqa: E402

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.7, "repeat_penalty": 1.3, "repeat_last_n": 3}

BATCHES: dict[str, list[dict[str, Any]]] = {
    "uniform": [dict(OFF)] * 4,
    "mixed options": [
        {"temperature": 0.0},
        {**OFF, "top_k": 3},
        {**OFF, "top_p": 0.6, **PENALTIES},
        {**OFF, "min_p": 0.2, "logit_bias": {4: 3.0}},
    ],
    "partly filled windows": [{**OFF, **PENALTIES}] * 4,
}


def rows_of(options: list[dict[str, Any]]) -> list[SampleRequest]:
    """Returns a sampling request for each of `options`, with a penalty window of 3 tokens.

    Request n has a history of n tokens, n from 0 to 3.
    """
    return [
        SampleRequest(Options(**each), 7 + n, n, (4, 1, 4)[:n]) for n, each in enumerate(options)
    ]


def logits_of(rows: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((rows, 12)).astype(np.float32)


def tokens(logits: np.ndarray, rows: list[SampleRequest]) -> list[int]:
    return np.array(sample(mx.array(logits), rows).tokens).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_samples_the_tokens_of_single_rows(name: str) -> None:
    rows = rows_of(BATCHES[name])
    logits = logits_of(len(rows))
    alone = [tokens(logits[n : n + 1], [row])[0] for n, row in enumerate(rows)]
    assert tokens(logits, rows) == alone
    subset = [2, 0, 3]
    assert tokens(logits[subset], [rows[n] for n in subset]) == [alone[n] for n in subset]


def test_a_row_that_left_does_not_change_other_rows() -> None:
    rows = rows_of(BATCHES["partly filled windows"])
    logits = logits_of(len(rows))
    first = tokens(logits, rows)
    assert tokens(logits[1:], rows[1:]) == first[1:]
    newcomer = SampleRequest(Options(**OFF, **PENALTIES), 7, 0)
    assert tokens(logits[:1], [newcomer]) == tokens(logits, [newcomer, *rows[1:]])[:1]


def test_the_penalty_window_is_the_end_of_prompt_and_completion() -> None:
    """The window covers the last 4 tokens of the joined prompt and completion."""
    history: list[int] = []
    for newest in ([10, 11, 12], [20, 21, 22], [30, 31, 32, 33, 34]):
        history += newest
        options = Options(temperature=0.0, presence_penalty=50.0, repeat_last_n=4)
        for token in range(9, 36):
            logits = np.zeros((1, 40), np.float32)
            logits[0, token] = 10.0
            drawn = tokens(logits, [SampleRequest(options, 0, 0, history)])[0]
            assert (drawn != token) == (token in history[-4:]), (token, history)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_and_softmax(temperature: float) -> None:
    logits = np.array([1.0, -2.0, 3.0, 0.0])
    probs = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    count = 4000
    asked = Options(**{**OFF, "temperature": temperature})
    rows = [SampleRequest(asked, 3, position) for position in range(count)]
    drawn = tokens(np.tile(logits.astype(np.float32), (count, 1)), rows)
    seen, expected = np.bincount(drawn, minlength=4), probs * count
    likely = expected > 1
    assert seen[~likely].sum() <= 5
    parts = (seen[likely] - expected[likely]) ** 2 / expected[likely]
    assert parts.sum() < 16.3  # chi square, at most 3 degrees, p = 0.001


def test_logprobs_of_each_row_in_a_batch() -> None:
    asked = Options(temperature=0.0, logprobs=True, top_logprobs=5)
    logits = np.array([[1000, 999, 998, 0, 0], [2, 5, 1, 4, 3], [7, 7, 7, 7, 7]], np.float32)
    result = sample(mx.array(logits), [SampleRequest(asked, 0, 0)] * 3)
    assert result.top_ids is not None and result.top_logprobs is not None
    values = np.array(result.top_logprobs, np.float64)
    assert np.isfinite(values).all()
    assert np.exp(values).sum(axis=1) == pytest.approx([1, 1, 1], abs=1e-5)
    order = np.argsort(-values[1])
    assert np.array(result.top_ids)[1][order].tolist() == [1, 3, 4, 0, 2]
    assert values[2].tolist() == pytest.approx([math.log(1 / 5)] * 5)
    for line in range(3):
        alone = sample(mx.array(logits[line : line + 1]), [SampleRequest(asked, 0, 0)])
        mine = np.sort(np.array(alone.top_logprobs)[0])
        assert mine.tolist() == pytest.approx(np.sort(values[line]).tolist())


@pytest.mark.parametrize(
    ("pieces", "stop", "sent", "text"),
    [
        (["one", " two"], "none", 2, "one two"),
        (["hello", "wor", "ld"], "or", 2, "hellow"),
        (["Hello", " the", "re!", "x"], "there!", 3, "Hello "),
        (["STOP", "x"], "STOP", 1, ""),
        (["a", "b", "c", "d"], "bcd", 4, "a"),
    ],
    ids=["no stop", "inside a token", "over two tokens", "at once", "over three tokens"],
)
def test_logprobs_with_stop(pieces: list[str], stop: str, sent: int, text: str) -> None:
    """The step that samples an id sends the id's log-probability, even if its text is held back."""
    options = Options(logprobs=True, stop=(stop,))
    sequence = Sequence(bytes(16), 1, (1,), options, 0, max_tokens=len(pieces))

    def piece(token: int) -> bytes:
        return pieces[token].encode()

    generation = Generation(
        sequence, Facts(), Detokenizer(piece, options.stop), received=0.0, piece=piece
    )
    seen, ids = "", 0
    for token in range(len(pieces)):
        delta = generation.commit(
            SampledToken(sequence, token, TokenLogprob(-1.0 - token)), frozenset(), now=1.0
        )
        assert delta.logprobs is not None and len(delta.logprobs) == delta.n == 1
        assert delta.logprobs[0]["id"] == token
        assert delta.logprobs[0]["logprob"] == -1.0 - token
        seen, ids = seen + delta.text, ids + delta.n
        if delta.end is not None:
            seen += delta.end["text"]
            break
    assert (seen, ids) == (text, sent)
