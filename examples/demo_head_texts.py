"""Training texts for the demo model's draft head (MTP), mostly written by the demo model itself."""

from __future__ import annotations

import argparse
import ast
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from train_demo_model import Llama, Shape, say

WINDOW = 192  # tokens of a text
PROMPTS = (8, 16, 24, 32, 48)  # lengths of prompts in tokens
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # temperatures of the texts, in turn
LONGEST = max(PROMPTS)

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Texts:
    """Texts with the demo model's choices and states for each of their tokens.

    `ids` and `choices` [N, WINDOW]: the tokens, and the demo model's likeliest token after each.
    `states` [N, WINDOW, hidden]: the output of the model's last norm.
    """

    ids: mx.array
    choices: mx.array
    states: mx.array

    def __len__(self) -> int:
        return self.ids.shape[0]


def function_begins(texts: dict[str, str]) -> Iterator[str]:
    """Yields the source of every function of some modules."""
    for text in texts.values():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (SyntaxError, ValueError):  # files of tests that are invalid on purpose
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first, *others = lines[node.lineno - 1 : (node.end_lineno or node.lineno)]
                yield first[node.col_offset :] + "".join(others)


def prompts_of(tokenizer: Tokenizer, texts: dict[str, str]) -> Tokens:
    """Returns the first LONGEST token ids of N functions as prompts [N, LONGEST].

    The first id is END. Shorter functions are left out.
    """
    sources = [source[: 8 * LONGEST] for source in function_begins(texts)]
    all_ids = (encoding.ids[:LONGEST] for encoding in tokenizer.encode_batch(sources))
    return np.array([ids for ids in all_ids if len(ids) == LONGEST], dtype=np.int32)


def corpus_tokens(tokenizer: Tokenizer, texts: dict[str, str], most: int, seed: int) -> Tokens:
    """Returns up to `most` tokens of modules in a random order."""
    modules = [*texts.values()]
    random.Random(seed).shuffle(modules)
    while sum(map(len, modules)) > 5 * most:  # a token has three bytes or more
        modules.pop()
    ids = [encoding.ids for encoding in tokenizer.encode_batch(modules)]
    return np.concatenate([np.array(row, dtype=np.int32) for row in ids])[:most]


def places_of(tokens: Tokens, count: int, size: int, draw: np.random.Generator) -> Tokens:
    """Returns excerpts [count, size] of `tokens`, each from a random position on.

    The first token of each excerpt is replaced by END.
    """
    starts = draw.integers(0, len(tokens) - size, count)
    windows = tokens[starts[:, None] + np.arange(size)]
    windows[:, 0] = 0
    return windows


def written(model: Llama, prompts: Tokens, size: int, temperatures: mx.array) -> Texts:
    """Returns texts [R, WINDOW] that begin with prompts [R, P] and are continued by the model.

    `size`: the number of tokens of each prompt that are used. `temperatures` [R, 1]: 0 is greedy.
    """
    attention = model.model.layers[0].self_attn
    shape: Shape = attention._shape
    rows, dtype = len(prompts), model._dtype
    caches = [
        [mx.zeros((rows, shape.kv_heads, WINDOW, shape.head), dtype=dtype) for _ in range(2)]
        for _ in model.model.layers
    ]
    prompt_ids = mx.array(prompts)
    tokens, ids, choices, states = prompt_ids[:, 0], [], [], []
    for at in range(WINDOW):
        state = decoded(model, tokens, at, caches, shape)
        logits = model.model.embed_tokens.score(state).astype(mx.float32)
        choice = mx.argmax(logits, axis=-1).astype(mx.int32)
        ids.append(tokens)
        choices.append(choice)
        states.append(state)
        if at + 1 < size:
            tokens = prompt_ids[:, at + 1]
        else:
            noise = mx.random.gumbel(logits.shape)
            drawn = mx.argmax(logits + temperatures * noise, axis=-1).astype(mx.int32)
            tokens = mx.where(temperatures[:, 0] > 0, drawn, choice)
        mx.eval(tokens, choice, state, caches)
    texts = Texts(mx.stack(ids, 1), mx.stack(choices, 1), mx.stack(states, 1))
    mx.eval(texts.ids, texts.choices, texts.states)
    return texts


def decoded(
    model: Llama, ids: mx.array, at: int, caches: list[list[mx.array]], shape: Shape
) -> mx.array:
    """Returns the states [R, hidden] of the tokens at position `at`; also fills the KV caches."""
    x = model.model.embed_tokens(ids, model._dtype)
    for layer, cache in zip(model.model.layers, caches, strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (
            part(normed).reshape(len(ids), -1, 1, shape.head)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (
            mx.fast.rope(
                part, shape.head, traditional=False, base=shape.rope_base, scale=1.0, offset=at
            )
            for part in (q, k)
        )
        for held, new in zip(cache, (k, v), strict=True):
            held[:, :, at : at + 1] = new
        keys, values = (held[:, :, : at + 1] for held in cache)
        y = mx.fast.scaled_dot_product_attention(q, keys, values, scale=shape.head**-0.5)
        x = x + attention.o_proj(y.reshape(len(ids), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.model.norm(x)


def read(model: Llama, ids: Tokens, rows: int) -> Texts:
    """Computes choices and states of the given texts [N, WINDOW], `rows` texts at a time."""
    parts = []
    for first in range(0, len(ids), rows):
        some = mx.array(ids[first : first + rows])
        x = model.model.embed_tokens(some, model._dtype)
        for layer in model.model.layers:
            x = layer(x)
        states = model.model.norm(x)
        choices = mx.argmax(model.model.embed_tokens.score(states), axis=-1).astype(mx.int32)
        mx.eval(states, choices)
        parts.append(Texts(some, choices, states))
    return joined(parts)


def joined(parts: list[Texts]) -> Texts:
    """Returns the texts of all parts as one; empties the list of parts."""
    texts = Texts(
        mx.concatenate([part.ids for part in parts]),
        mx.concatenate([part.choices for part in parts]),
        mx.concatenate([part.states for part in parts]),
    )
    mx.eval(texts.ids, texts.choices, texts.states)
    parts.clear()
    return texts


def training_texts(
    model: Llama, prompts: Tokens, tokens: Tokens, args: argparse.Namespace
) -> Texts:
    """Returns texts that the model writes in `args.batches` batches, and some training text."""
    draw, parts = np.random.default_rng(args.seed), []
    temperatures = mx.array([TEMPERATURES[row % len(TEMPERATURES)] for row in range(args.rows)])
    began = time.monotonic()
    for number in range(args.batches):
        size = PROMPTS[number % len(PROMPTS)]
        functions = prompts[draw.integers(0, len(prompts), args.rows)]
        places = places_of(tokens, args.rows, LONGEST, draw)
        # Of every eight rows four are functions; both halves have all temperatures.
        chosen = np.where((np.arange(args.rows) // 4 % 2)[:, None] == 0, functions, places)
        parts.append(written(model, chosen, size, temperatures[:, None]))
        say(f"batch {number + 1} is written, {time.monotonic() - began:.1f} s")
        if time.monotonic() - began > args.write_seconds:
            break
    windows = places_of(tokens, args.rows * len(parts) // 4, WINDOW, draw)
    parts.append(read(model, windows, max(1, min(256, args.rows))))
    return joined(parts)
