"""Train the draft model of the demo model: it proposes the tokens that the demo model draws.

A much smaller Llama with the same tokenizer learns from the same text, the standard library of the
Python that runs this script, so no download is needed.

    python examples/train_demo_draft.py --seconds 1500

Its first embeddings are the largest principal components of those of the demo model. The loss of a
step is over a part of the vocabulary: the tokens that its batch has, and others drawn at random;
each logit is lowered by the logarithm of the probability that its token is in the part, so that the
sum has the mean of that over the whole vocabulary. That takes a quarter of the time. One core is
enough: the learning rate follows the clock, so that training ends after `--seconds` on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from train_demo_model import (
    DEMO,
    Corpus,
    Llama,
    Shape,
    configuration,
    named_weights,
    read_corpus,
    say,
    write_json,
)

OUT = DEMO.with_name("demo_draft")
CONTEXT = 256  # tokens of a training window, and of the draft model
CANDIDATES = 1024  # tokens of the vocabulary in the loss of a step
WARM_UP = 30  # steps
EVALUATED = 16  # windows of each held-out module at most

Tokens = npt.NDArray[np.int32]


def draft_shape(arguments: argparse.Namespace) -> Shape:
    """The sizes of the draft model; heads of 64, as those of the demo model."""
    return Shape(
        hidden=arguments.hidden,
        layers=arguments.layers,
        heads=arguments.hidden // 64,
        kv_heads=1,
        feed_forward=arguments.feed_forward,
        context=CONTEXT,
    )


# ------------------------------------------------------------------------------------- the data


def encoded(tokenizer: Tokenizer, texts: list[str], most: int) -> Tokens:
    """Returns the first `most` tokens of texts, END before each."""
    found: list[int] = []
    for text in texts:
        if len(found) >= most:
            break
        found += tokenizer.encode(text).ids
    return np.array(found[:most], dtype=np.int32)


def training_tokens(tokenizer: Tokenizer, corpus: Corpus, most: int, seed: int) -> Tokens:
    """Returns tokens of modules in a random order."""
    texts = list(corpus.train.values())
    random.Random(seed).shuffle(texts)
    return encoded(tokenizer, texts, most)


def batches(tokens: Tokens, rows: int, draw: np.random.Generator) -> Iterator[Tokens]:
    """Yields [rows, CONTEXT + 1] without end; each epoch divides the text at other places."""
    while True:
        first = int(draw.integers(0, CONTEXT))
        starts = draw.permutation(np.arange(first, len(tokens) - CONTEXT - 1, CONTEXT))
        for at in range(0, len(starts) - rows + 1, rows):
            yield tokens[starts[at : at + rows, None] + np.arange(CONTEXT + 1)]


class Candidates:
    """Chooses the part of the vocabulary over which the loss of a batch is."""

    def __init__(self, tokens: Tokens, vocab: int, drawn: int) -> None:
        """`drawn`: tokens that a batch predicts."""
        share = np.bincount(tokens, minlength=vocab) / len(tokens)
        in_batch = 1 - (1 - share) ** drawn  # the probability that a batch has a token
        filled = (CANDIDATES - in_batch.sum()) / (1 - in_batch).sum()
        self._logs = np.log(in_batch + (1 - in_batch) * filled).astype(np.float32)
        self._vocab = vocab

    def of(self, targets: Tokens, draw: np.random.Generator) -> tuple[Tokens, Tokens, Any]:
        """Returns the candidates, the places of `targets` among them, and their logarithms."""
        present = np.unique(targets)
        others = np.setdiff1d(np.arange(self._vocab), present)
        drawn = draw.choice(others, CANDIDATES - len(present), replace=False)
        part = np.concatenate([present, drawn]).astype(np.int32)
        places = np.searchsorted(present, targets).astype(np.int32)
        return part, places, self._logs[part]


# --------------------------------------------------------------------------------- the training


def first_model(shape: Shape) -> Llama:
    """Returns a draft model whose embeddings are principal components of the demo model's."""
    weights = mx.load(str(DEMO / "model.safetensors"))
    assert isinstance(weights, dict)
    table = weights["model.embed_tokens.weight"].astype(mx.float32)
    table *= weights["model.norm.weight"].astype(mx.float32)
    numbers = np.array(table)
    numbers -= numbers.mean(axis=0)
    _, _, directions = np.linalg.svd(numbers, full_matrices=False)
    parts = numbers @ directions[: shape.hidden].T
    parts *= 1 / (math.sqrt(shape.hidden) * parts.std())
    model = Llama(shape)
    model.model.embed_tokens.weight = mx.array(parts)
    return model


def loaded(folder: Path, shape: Shape) -> Llama:
    """Returns the draft model that was saved in a folder, in float32."""
    model, weights = Llama(shape), mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    model.load_weights([(name, w.astype(mx.float32)) for name, w in weights.items()])
    return model


def states(model: Llama, ids: mx.array) -> mx.array:
    """The states [rows, time, hidden] behind the last norm."""
    x = model.model.embed_tokens(ids, mx.float32)
    for layer in model.model.layers:
        x = layer(x)
    return model.model.norm(x)


def partial_loss(
    model: Llama, ids: mx.array, part: mx.array, places: mx.array, logs: mx.array
) -> mx.array:
    """The mean loss of a batch over the candidates `part`."""
    found = states(model, ids).reshape(-1, model.model.embed_tokens.weight.shape[1])
    logits = found @ model.model.embed_tokens.weight[part].T - logs
    return nn.losses.cross_entropy(logits, places).mean()


def train(model: Llama, tokens: Tokens, args: argparse.Namespace, out: Path) -> int:
    """Trains for so many seconds and returns the steps; the model so far is saved meanwhile."""
    draw = np.random.default_rng(args.seed)
    optimizer = optim.AdamW(args.peak, betas=[0.9, 0.95], weight_decay=0.02)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]
    slope_of = nn.value_and_grad(model, lambda *given: partial_loss(model, *given))

    @partial(mx.compile, inputs=state, outputs=state)
    def step(*given: mx.array) -> mx.array:
        cost: mx.array
        cost, slope = slope_of(*given)
        slope, _ = optim.clip_grad_norm(slope, 1.0)
        optimizer.update(model, slope)
        return cost

    candidates = Candidates(tokens, args.vocab, args.rows * CONTEXT)
    source = batches(tokens, args.rows, draw)
    began, count, shown, mean = time.monotonic(), 0, 0.0, 0.0
    while (passed := time.monotonic() - began) < args.seconds:
        share = 0.02 + 0.98 * (1 + math.cos(math.pi * passed / args.seconds)) / 2
        optimizer.learning_rate = mx.array(args.peak * share * min(1.0, (count + 1) / WARM_UP))
        ids = next(source)
        part, places, logs = candidates.of(ids[:, 1:].reshape(-1), draw)
        cost = step(mx.array(ids[:, :-1]), mx.array(part), mx.array(places), mx.array(logs))
        mx.eval(cost, state)
        count += 1
        mean += (float(cost) - mean) * max(0.03, 1 / count)
        if passed - shown > 60:
            shown = passed
            say(f"{passed:7.1f} s, {time.process_time():.1f} s of a core, step {count}, {mean:.3f}")
            save(out, draft_shape(args), model)
    return count


def right_share(model: Llama, tokenizer: Tokenizer, corpus: Corpus) -> float:
    """How often the likeliest token is the next one of held-out modules, in windows of them."""
    right = count = 0
    for text in corpus.held_out.values():
        ids = encoded(tokenizer, [text], EVALUATED * CONTEXT + 1)
        rows = (len(ids) - 1) // CONTEXT
        windows = ids[np.arange(rows)[:, None] * CONTEXT + np.arange(CONTEXT + 1)]
        likeliest = mx.argmax(model(mx.array(windows[:, :-1])), axis=-1)
        right += int((np.array(likeliest) == windows[:, 1:]).sum())
        count += windows[:, 1:].size
    return right / count


# -------------------------------------------------------------------------------------- the run


def save(folder: Path, shape: Shape, model: Llama) -> None:
    """Writes the model in the Hugging Face layout; the tokenizer is the demo model's."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.astype(mx.bfloat16) for name, w in named_weights(model)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    write_json(folder / "config.json", configuration(shape))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    library = Path(sysconfig.get_path("stdlib"))
    parser = argparse.ArgumentParser(description="Train the draft model of the demo model.")
    parser.add_argument("--source", type=Path, default=library, help="folder of Python source")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the draft model")
    parser.add_argument("--seconds", type=float, default=1500, help="of training")
    parser.add_argument("--start", type=Path, help="folder of a model to go on from")
    parser.add_argument("--tokens", type=int, default=3_000_000, help="of the training text")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--feed-forward", type=int, default=384, help="width inside a layer")
    parser.add_argument("--rows", type=int, default=8, help="windows in a step")
    parser.add_argument("--peak", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Trains the model, evaluates it, and writes the report beside it."""
    args = arguments()
    corpus = read_corpus(args.source)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokens = training_tokens(tokenizer, corpus, args.tokens, args.seed)
    shape = draft_shape(args)
    args.vocab = shape.vocab
    mx.random.seed(args.seed)
    model = loaded(args.start, shape) if args.start else first_model(shape)
    say(f"{tokens.size} tokens, {shape}")
    before = time.process_time()
    steps = train(model, tokens, args, args.out)
    took = time.process_time() - before
    save(args.out, shape, model)
    rounded = loaded(args.out, shape)
    report: dict[str, Any] = {
        "parameters": sum(w.size for _, w in named_weights(model)),
        "training_tokens": int(tokens.size),
        "source_sha256": corpus.sha256(),
        "steps": steps,
        "tokens_per_step": args.rows * CONTEXT,
        "peak_learning_rate": args.peak,
        "seed": args.seed,
        "seconds": args.seconds,
        "processor_seconds": round(took, 1),
        "mlx": version("mlx"),
        "python": platform.python_version(),
        "held_out_tokens_right": round(right_share(rounded, tokenizer, corpus), 4),
    }
    write_json(args.out / "training.json", report)
    say(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
