"""Train the head of the demo model that predicts further tokens (MTP), for speculation.

The head reads the demo model's last hidden state and the token that follows. It predicts the next
token, and a state from which it continues by itself. The head learns to predict the demo model's
choices. The demo model itself writes most of the training text: at several temperatures it
continues beginnings of functions and other parts of its own training text. The demo model's states
and choices are computed once.

    python examples/train_demo_head.py --seconds 130

A GPU is needed in practice. The learning rate follows the clock, so that training ends after
`--seconds` on any machine. The source has to be the demo model's source, see `--source`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

from demo_head_texts import (
    WINDOW,
    Texts,
    corpus_tokens,
    prompts_of,
    training_texts,
    written,
)
from train_demo_model import (
    DEMO,
    Linear,
    Norm,
    Shape,
    compute_type,
    load,
    read_corpus,
    say,
    write_json,
)

FILE = "mtp.safetensors"
INDEX = "model.safetensors.index.json"  # the file of each tensor
PREFIX = "mtp."  # prefix of the names of the head's tensors
TOKENS = f"{PREFIX}draft_tokens"
DEPTH = 4  # number of successive drafts in the loss
WEIGHTS = (1.0, 0.8, 0.6, 0.5)  # weights of the losses of these drafts
WARM_UP = 100  # steps
SAVED = 30.0  # seconds between two savings


class HeadLayer(nn.Module):
    """A layer without attention: a norm and a gated feed-forward, added to the layer's input."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.post_attention_layernorm = Norm(shape)
        self.mlp = FeedForward(shape.hidden, width)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.mlp(self.post_attention_layernorm(x))


class FeedForward(nn.Module):
    """A SwiGLU feed-forward layer of any width."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden, 0.1)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that the head drafts: the demo model's most frequent choices.

    `tokens` [N]; `places` [vocabulary]: the index of each token in `tokens`, -1 for other tokens;
    `table` [vocabulary, hidden]: the embeddings of all tokens; `columns` [hidden, N]: the
    embeddings of `tokens`.
    """

    tokens: mx.array
    places: mx.array
    table: mx.array
    columns: mx.array

    @classmethod
    def of(cls, choices: mx.array, table: mx.array, count: int) -> Self:
        """Makes a vocabulary of the `count` most frequent choices."""
        often = np.bincount(np.array(choices).reshape(-1), minlength=table.shape[0])
        tokens = np.sort(np.argsort(-often, kind="stable")[:count]).astype(np.int32)
        places = np.full(table.shape[0], -1, dtype=np.int32)
        places[tokens] = np.arange(count)
        for size in (512, 1024, 2048):
            say(f"{size} tokens are {np.sort(often)[::-1][:size].sum() / often.sum():.4f} of all")
        columns = mx.contiguous(table[mx.array(tokens)].T)
        return cls(mx.array(tokens), mx.array(places), table, columns)


class Head(nn.Module):
    """Maps embeddings of tokens, and the states before the tokens, to states; all [..., hidden]."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Norm(shape)
        self.pre_fc_norm_hidden = Norm(shape)
        self.fc = Linear(2 * shape.hidden, shape.hidden, 0.3)
        self.layers = [HeadLayer(shape, width)]
        self.norm = Norm(shape)
        half = mx.zeros((shape.hidden, shape.hidden))
        self.fc.weight = self.fc.weight + mx.concatenate([half, mx.eye(shape.hidden)], axis=1)

    def __call__(self, embedded: mx.array, states: mx.array) -> mx.array:
        halves = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)]
        return self.norm(self.layers[0](self.fc(mx.concatenate(halves, axis=-1))))


# ---------------------------------------------------------------------------------- the training


def drafts_of(head: Head, words: Vocabulary, ids: mx.array, states: mx.array) -> Iterator[mx.array]:
    """Yields the logits [R, WINDOW - DEPTH, N] of each depth, given the correct earlier tokens.

    `ids` [R, WINDOW] and `states` [R, WINDOW, hidden]: see Texts.
    """
    count = WINDOW - DEPTH
    states = states[:, :count]
    for depth in range(1, DEPTH + 1):
        states = head(words.table[ids[:, depth : depth + count]], states)
        yield states @ words.columns


def loss_of(
    head: Head, words: Vocabulary, ids: mx.array, choices: mx.array, states: mx.array
) -> mx.array:
    """Returns the weighted mean loss of all depths.

    Positions whose right token the head cannot draft do not count.
    """
    total = mx.array(0.0)
    count = WINDOW - DEPTH
    depths = zip(WEIGHTS, drafts_of(head, words, ids, states), strict=True)
    for depth, (weight, logits) in enumerate(depths, start=1):
        targets = words.places[choices[:, depth : depth + count]]
        known = targets >= 0
        losses = nn.losses.cross_entropy(logits.astype(mx.float32), mx.maximum(targets, 0))
        total = total + weight / sum(WEIGHTS) * (losses * known).sum() / known.sum()
    return total


def right_shares(head: Head, words: Vocabulary, texts: Texts) -> list[float]:
    """Returns the fraction of right drafts at each depth, if all earlier drafts are right."""
    count, shares = WINDOW - DEPTH, []
    right, before = [0] * DEPTH, [0] * DEPTH
    for first in range(0, len(texts), 32):
        part = slice(first, first + 32)
        alive: Any = 1
        for depth, logits in enumerate(drafts_of(head, words, texts.ids[part], texts.states[part])):
            place = slice(depth + 1, depth + 1 + count)
            same = words.tokens[mx.argmax(logits, axis=-1)] == texts.choices[part][:, place]
            hit = same * alive
            before[depth] += same.size if depth == 0 else int(alive.sum().item())
            right[depth] += int(hit.sum().item())
            alive = hit
    shares = [share / max(1, other) for share, other in zip(right, before, strict=True)]
    return [round(share, 4) for share in shares]


def train(
    head: Head, words: Vocabulary, texts: Texts, held_out: Texts, args: argparse.Namespace
) -> int:
    """Trains for `args.seconds` and saves the head at intervals. Returns the number of steps."""
    draw = np.random.default_rng(args.seed)
    optimizer = optim.AdamW(args.peak, betas=[0.9, 0.95], weight_decay=0.02)
    optimizer.init(head.trainable_parameters())
    state = [head.state, optimizer.state]
    slope_of = nn.value_and_grad(head, lambda *tensors: loss_of(head, words, *tensors))

    @partial(mx.compile, inputs=state, outputs=state)
    def step(*tensors: mx.array) -> mx.array:
        cost: mx.array
        cost, slope = slope_of(*tensors)
        slope, _ = optim.clip_grad_norm(slope, 1.0)
        optimizer.update(head, slope)
        return cost

    began, count, shown, mean = time.monotonic(), 0, 0.0, 0.0
    while (passed := time.monotonic() - began) < args.seconds:
        share = 0.01 + 0.99 * (1 + math.cos(math.pi * passed / args.seconds)) / 2
        optimizer.learning_rate = mx.array(args.peak * share * min(1.0, (count + 1) / WARM_UP))
        rows = mx.array(draw.integers(0, len(texts), args.batch))
        cost = step(texts.ids[rows], texts.choices[rows], texts.states[rows])
        mx.eval(cost, state)
        count += 1
        mean += (float(cost) - mean) * max(0.02, 1 / count)
        if passed - shown > SAVED:
            shown = passed
            shares = right_shares(head, words, held_out)
            say(f"{passed:7.1f} s, step {count}, loss {mean:.4f}, held out {shares}")
            save(args.out, head, words)
    return count


# --------------------------------------------------------------------------------------- the run


def save(folder: Path, head: Head, words: Vocabulary) -> None:
    """Writes the head's file, and the index of the tensors in this file and the demo model's file.

    The token ids that the head can draft are stored as a float32 tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flat = tree_flatten(head.parameters())
    weights = {f"{PREFIX}{name}": w.astype(mx.bfloat16) for name, w in flat}
    weights[TOKENS] = words.tokens.astype(mx.float32)
    mx.save_safetensors(str(folder / FILE), weights, metadata={"format": "pt"})
    model = mx.load(str(DEMO / "model.safetensors"))
    assert isinstance(model, dict)
    files = dict.fromkeys(model, "model.safetensors") | dict.fromkeys(weights, FILE)
    size = sum(tensor.nbytes for tensor in (*model.values(), *weights.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    write_json(folder / INDEX, index)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    library = Path(sysconfig.get_path("stdlib"))
    parser = argparse.ArgumentParser(description="Train the demo model's head (MTP).")
    parser.add_argument("--source", type=Path, default=library, help="folder of Python source")
    parser.add_argument(
        "--python", default=platform.python_version(), help="the version that --source is of"
    )
    parser.add_argument("--out", type=Path, default=DEMO, help="folder of the head")
    parser.add_argument("--seconds", type=float, default=130, help="of training")
    parser.add_argument("--width", type=int, default=384, help="of the feed-forward")
    parser.add_argument("--drafted", type=int, default=1024, help="tokens that it drafts")
    parser.add_argument("--rows", type=int, default=4096, help="texts that are written together")
    parser.add_argument("--batches", type=int, default=24, help="of such texts at most")
    parser.add_argument("--write-seconds", type=float, default=60, help="then no more are written")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="of the training text")
    parser.add_argument("--held-out", type=int, default=256, help="held-out functions")
    parser.add_argument("--batch", type=int, default=256, help="texts of a step")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Trains the head, evaluates it, and writes the report beside it."""
    args = arguments()
    began = time.monotonic()
    corpus = read_corpus(args.source)
    shape = Shape()
    model, tokenizer = load(DEMO, shape)
    model._dtype = compute_type()
    mx.random.seed(args.seed)
    prompts, held_prompts = (
        prompts_of(tokenizer, texts) for texts in (corpus.train, corpus.held_out)
    )
    tokens = corpus_tokens(tokenizer, corpus.train, args.tokens, args.seed)
    say(f"{time.monotonic() - began:.1f} s: {len(prompts)} functions, {len(tokens)} tokens")
    held_prompts = held_prompts[: args.held_out]
    held_out = written(model, held_prompts, 24, mx.zeros((len(held_prompts), 1)))
    texts = training_texts(model, prompts, tokens, args)
    say(f"{time.monotonic() - began:.1f} s: {texts.ids.size} tokens with states")
    table = model.model.embed_tokens.weight.astype(model._dtype)
    head = Head(shape, args.width)
    words = Vocabulary.of(texts.choices, table, args.drafted)
    steps = train(head, words, texts, held_out, args)
    save(args.out, head, words)
    rounded = Head(shape, args.width)
    stored = mx.load(str(args.out / FILE))
    assert isinstance(stored, dict)
    del stored[TOKENS]
    rounded.load_weights(
        [(name.removeprefix(PREFIX), tensor.astype(mx.float32)) for name, tensor in stored.items()]
    )
    flat = tree_flatten(head.parameters())
    report = {
        "parameters": sum(tensor.size for _, tensor in flat),
        "texts": len(texts),
        "tokens": int(texts.ids.size),
        "steps": steps,
        "texts_per_step": args.batch,
        "peak_learning_rate": args.peak,
        "seed": args.seed,
        "seconds": args.seconds,
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "mlx": version("mlx"),
        "python": args.python,
        "source_sha256": corpus.sha256(),
        "draft_tokens": args.drafted,
        "held_out_right_by_depth": right_shares(rounded, words, held_out),
    }
    write_json(args.out / "mtp_training.json", report)
    say(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
