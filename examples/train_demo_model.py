"""Train the demo model: a small Llama-shaped language model of Python source.

The training text is the standard library of the Python that runs this script (PSF licence), so no
download is needed. Whole modules are held out, together with their tests, and the model is
evaluated by the bits per byte of these modules, compared with `xz -9`.

    python examples/train_demo_model.py --steps 1600

On a GPU it takes minutes. The same seed, source and MLX back end give the same run, except for a
GPU's order of floating-point additions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DEMO = Path(__file__).resolve().parent.parent / "worker" / "mlxpool" / "worker" / "demo"
END = "<|endoftext|>"

# Modules that are held out of training, with their tests. Chosen before the first run, for variety.
HELD_OUT = (
    *("argparse", "calendar", "cmd", "colorsys", "configparser", "csv", "dataclasses"),
    *("difflib", "fileinput", "fractions", "graphlib", "heapq", "ipaddress", "mailbox"),
    *("plistlib", "pprint", "sched", "shlex", "statistics", "tarfile", "textwrap", "timeit"),
    *("uuid", "zipfile"),
)

# Prompts whose completions `--completions` writes. Also chosen before the first run.
PROMPTS = (
    "def factorial(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def test_put(self):\n",
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "try:\n    import zlib\nexcept ImportError:\n",
    "for key, value in",
    "if __name__ == '__main__':\n",
    "    def __repr__(self):\n        return",
    "async def fetch(reader, writer):\n",
    "# Return the largest item of the list.\ndef largest(items):\n",
)

# Byte-pair merges do not cross the borders of these pieces. Indentation and its line break are
# separate pieces, so that the model can choose the indentation after a prompt that ends in a
# newline. A word includes the one space or dot before it.
PIECES = "|".join(
    (
        r" {2,}",
        r"\n+",
        r"\t+",
        r"[ .]?[\p{L}_]+",
        r" ?\p{N}{1,3}",
        r" ?(?:[^\s\p{L}\p{N}_.]|\.(?![\p{L}_]))+",
        r"\s",
    )
)

# The model was not trained on conversations. Words become comments, code stays code, and the model
# completes the result.
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- message['content'] ~ '\\n' -}}"
    "{%- else -%}"
    "{%- for line in message['content'].splitlines() -%}"
    "{{- '# ' ~ line ~ '\\n' -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


@dataclass(frozen=True)
class Shape:
    """The sizes of the model: the largest whose bfloat16 weights and tokenizer fit into 8 MB."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 320
    context: int = 2048
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head(self) -> int:
        """Width of one head: 64, for which every back end has a fast attention."""
        return self.hidden // self.heads


@dataclass(frozen=True)
class Plan:
    """The settings of a training run."""

    steps: int
    batch: int = 32
    peak: float = 3e-3
    warmup: int = 200
    decay: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Corpus:
    """Texts by path inside the standard library, in path order."""

    train: dict[str, str]
    held_out: dict[str, str]

    def sha256(self) -> str:
        """Returns a digest of the training text, to compare two runs."""
        digest = hashlib.sha256()
        for text in self.train.values():
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()


# ---------------------------------------------------------------------------------- the text


def read_corpus(source: Path) -> Corpus:
    """Reads every module under `source` once, held-out modules first; drops exact copies."""
    texts = dict(read_modules(source))
    held_out = {name: texts[f"{name}.py"] for name in HELD_OUT}
    seen = set(held_out.values())
    train = {}
    for path, text in texts.items():
        if text not in seen and not tells_of_held_out(Path(path)):
            train[path] = text
            seen.add(text)
    return Corpus(train, held_out)


def read_modules(source: Path) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of the library's own UTF-8 modules, without generated files."""
    for file in sorted(source.rglob("*.py")):
        path = file.relative_to(source)
        built = path.parts[0].startswith(("config-", "_sysconfigdata")) or (
            "site-packages" in path.parts
        )
        try:
            text = "" if built else file.read_bytes().decode()
        except UnicodeDecodeError:  # tests of source encodings
            continue
        if text.strip():
            yield path.as_posix(), text.replace("\r\n", "\n")


def tells_of_held_out(path: Path) -> bool:
    """Whether a file is a held-out module or, by its name, a test of a held-out module."""
    if path.parts[0] == "test":
        return path.stem.startswith(tuple(f"test_{name}" for name in HELD_OUT))
    return len(path.parts) == 1 and path.stem in HELD_OUT


def train_tokenizer(corpus: Corpus, vocab: int) -> Tokenizer:
    """Trains byte-level BPE: any text has tokens, and decoding returns the same bytes.

    Encoding puts END before the text, as before every document in training.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[(END, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train.values(), trainer)
    return tokenizer


def encode_train(corpus: Corpus, tokenizer: Tokenizer, seed: int) -> mx.array:
    """Returns the training text as one array of ids in shuffled order, END before each document."""
    documents = [e.ids for e in tokenizer.encode_batch(list(corpus.train.values()))]
    random.Random(seed).shuffle(documents)
    return mx.array([id for document in documents for id in document], mx.int32)


def batches(tokens: mx.array, context: int, plan: Plan) -> Iterator[mx.array]:
    """Yields batches of ids [batch, context + 1] without end. Each epoch has other offsets."""
    span = mx.arange(context + 1)
    rng = random.Random(plan.seed)
    while True:
        starts = list(range(rng.randrange(context), tokens.size - context - 1, context))
        rng.shuffle(starts)
        for at in range(0, len(starts) - plan.batch + 1, plan.batch):
            yield tokens[mx.array(starts[at : at + plan.batch])[:, None] + span]


# Attributes have the names of the Hugging Face layout, so that weights need no renaming. Weights
# are float32; each is cast to the type of the activations at its use.


class Linear(nn.Module):
    """A linear layer without a bias."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = mx.random.normal((outputs, inputs)) * (scale / math.sqrt(inputs))

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight.astype(x.dtype).T


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = mx.ones((shape.hidden,))
        self._epsilon = shape.epsilon

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight.astype(x.dtype), self._epsilon)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.head)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.head)
        self.o_proj = Linear(shape.heads * shape.head, shape.hidden, residual_scale(shape))

    def __call__(self, x: mx.array) -> mx.array:
        q = self._rotate(self._heads(self.q_proj(x)))
        k = self._rotate(self._heads(self.k_proj(x)))
        v = self._heads(self.v_proj(x))
        y = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=self._shape.head**-0.5, mask="causal"
        )
        return self.o_proj(y.transpose(0, 2, 1, 3).flatten(-2))

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self._shape.head).transpose(0, 2, 1, 3)

    def _rotate(self, x: mx.array) -> mx.array:
        return mx.fast.rope(
            x, self._shape.head, traditional=False, base=self._shape.rope_base, scale=1.0, offset=0
        )


class FeedForward(nn.Module):
    """A SwiGLU feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.feed_forward)
        self.up_proj = Linear(shape.hidden, shape.feed_forward)
        self.down_proj = Linear(shape.feed_forward, shape.hidden, residual_scale(shape))

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape)
        self.post_attention_layernorm = Norm(shape)

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    """One vector per token; the same table embeds tokens and computes their logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = mx.random.normal((shape.vocab, shape.hidden)) / math.sqrt(shape.hidden)

    def __call__(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        return self.weight[ids].astype(dtype)

    def score(self, x: mx.array) -> mx.array:
        """Returns logits of every token in the vocabulary."""
        return x @ self.weight.astype(x.dtype).T


class Decoder(nn.Module):
    """The layers between ids and the last hidden state."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = Embedding(shape)
        self.layers = [Layer(shape) for _ in range(shape.layers)]
        self.norm = Norm(shape)


class Llama(nn.Module):
    """The whole model: ids [batch, time] to logits [batch, time, vocab]."""

    def __init__(self, shape: Shape, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__()
        self.model = Decoder(shape)
        self._dtype = dtype

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.model.embed_tokens(ids, self._dtype)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.embed_tokens.score(self.model.norm(x))


def residual_scale(shape: Shape) -> float:
    """Returns the factor by which the initial weights of each layer's output are scaled.

    With this factor, the sum of the outputs of all layers is as large as one unscaled output.
    """
    return 1.0 / math.sqrt(2 * shape.layers)


# ------------------------------------------------------------------------------ the training


def nats(model: Llama, ids: mx.array) -> mx.array:
    """Returns the loss in nats of each token of `ids` except the first, given the tokens before."""
    logits = model(ids[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, ids[:, 1:])


def number(x: mx.array) -> float:
    """Returns the sum of an array as a Python number."""
    return float(x.sum().item().real)


def compute_type() -> mx.Dtype:
    """Returns bfloat16 on a GPU, where it is several times faster, and float32 on a CPU."""
    return mx.bfloat16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32


def schedule(plan: Plan) -> Callable[[mx.array], mx.array]:
    """Returns the learning rate by step: linear up to the peak, then half a cosine to zero."""
    warmup = min(plan.warmup, max(plan.steps // 10, 1))
    rise = optim.linear_schedule(0.0, plan.peak, warmup)
    fall = optim.cosine_decay(plan.peak, max(plan.steps - warmup, 1))
    return optim.join_schedules([rise, fall], [warmup])


def compiled_step(model: Llama, plan: Plan) -> tuple[Callable[[mx.array], mx.array], Any]:
    """Returns a step of AdamW as a compiled function of a batch, and the state that it changes."""
    optimizer = optim.AdamW(schedule(plan), betas=[0.9, 0.95], weight_decay=plan.decay)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]
    cost_and_slope = nn.value_and_grad(model, lambda ids: nats(model, ids).mean())

    @partial(mx.compile, inputs=state, outputs=state)
    def step(ids: mx.array) -> mx.array:
        cost: mx.array
        cost, slope = cost_and_slope(ids)
        slope, _ = optim.clip_grad_norm(slope, 1.0)
        optimizer.update(model, slope)
        return cost

    return step, state


def train(
    shape: Shape, plan: Plan, tokens: mx.array, watch: Callable[[int, float, Llama], None]
) -> Llama:
    """Trains from scratch. `watch` gets the step, its loss in nats and the model at intervals."""
    mx.random.seed(plan.seed)
    model = Llama(shape, compute_type())
    step, state = compiled_step(model, plan)
    interval = max(plan.steps // 20, 1)
    for count, ids in enumerate(islice(batches(tokens, shape.context, plan), plan.steps), 1):
        cost = step(ids)
        mx.async_eval(cost, state)
        if count % 10 == 0:  # bounds the work that the host queues ahead of the device
            mx.eval(cost, state)
        if count % interval == 0:
            watch(count, number(cost), model)
    mx.eval(state)
    return model


def steps_in(seconds: float, shape: Shape, plan: Plan, tokens: mx.array) -> int:
    """Returns the number of steps that fit into `seconds`, from the time of a few steps."""
    step, state = compiled_step(Llama(shape, compute_type()), plan)
    source = batches(tokens, shape.context, plan)
    for count in (10, 40):  # the first ten steps include the compilation
        began = time.monotonic()
        for ids in islice(source, count):
            mx.eval(step(ids), state)
    return max(int(seconds * 40 / (time.monotonic() - began)), 1)


# -------------------------------------------------------------------------------- the result


def windows(ids: list[int], context: int) -> Iterator[tuple[list[int], list[float]]]:
    """Yields overlapping windows of a document's ids, and a mask of the targets to evaluate.

    In all windows except the first, only the second half is evaluated. Every token is thus
    evaluated once, with at least half a context before it if the document has that much.
    """
    half = context // 2
    for start in range(0, max(len(ids) - 1 - half, 1), half):
        piece = ids[start : start + context + 1]
        skipped = half if start else 0
        counted = [0.0] * skipped + [1.0] * (len(piece) - 1 - skipped)
        padding = context + 1 - len(piece)
        yield piece + [0] * padding, counted + [0.0] * padding


def document_bits(model: Llama, tokenizer: Tokenizer, text: str, context: int) -> float:
    """Returns the bits that the model needs for a text, from an empty context."""
    ids = tokenizer.encode(text).ids
    cut = windows(ids, context)
    total = 0.0
    while part := list(islice(cut, 8)):
        cost = nats(model, mx.array([piece for piece, _ in part]))
        total += number(cost * mx.array([counted for _, counted in part]))
    return total / math.log(2)


def bits_per_byte(
    model: Llama, tokenizer: Tokenizer, corpus: Corpus, context: int
) -> dict[str, float]:
    """Returns bits per UTF-8 byte of each held-out module, and of all modules under the name ''."""
    bits = {
        name: document_bits(model, tokenizer, text, context)
        for name, text in corpus.held_out.items()
    }
    sizes = {name: len(text.encode()) for name, text in corpus.held_out.items()}
    by_module = {name: bits[name] / sizes[name] for name in bits}
    return {"": sum(bits.values()) / sum(sizes.values())} | by_module


def xz_bits_per_byte(corpus: Corpus) -> tuple[float, float]:
    """Returns the bits per byte of the held-out modules, compressed with `xz -9`, in two ways.

    For the first figure xz compresses the modules alone. For the second figure it compresses them
    after the training text, which fits into the window of xz.
    """
    held_out = "".join(corpus.held_out.values()).encode()
    before = "".join(corpus.train.values()).encode()
    alone = len(lzma.compress(held_out, preset=9))
    after = len(lzma.compress(before + held_out, preset=9)) - len(lzma.compress(before, preset=9))
    return alone * 8 / len(held_out), after * 8 / len(held_out)


def complete(model: Llama, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    """Continues a prompt by at most 96 tokens, drawn at temperature 0.5."""
    ids = tokenizer.encode(prompt).ids
    prompt_length = len(ids)
    for key in mx.random.split(mx.random.key(seed), 96):
        logits = model(mx.array([ids]))[0, -1]
        drawn = int(number(mx.random.categorical(logits / 0.5, key=key)))
        if drawn == ids[0]:
            break
        ids.append(drawn)
    return tokenizer.decode(ids[prompt_length:])


def configuration(shape: Shape) -> dict[str, Any]:
    """Returns config.json, as other programs that read Llama folders expect it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_base,
        "rms_norm_eps": shape.epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def named_weights(model: Llama) -> list[tuple[str, mx.array]]:
    """Returns every weight with its name in the Hugging Face layout."""
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    return flat


def save(folder: Path, shape: Shape, tokenizer: Tokenizer, model: Llama) -> None:
    """Writes the model in the Hugging Face layout, its weights rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.astype(mx.bfloat16) for name, w in named_weights(model)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "config.json", configuration(shape))
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def load(folder: Path, shape: Shape) -> tuple[Llama, Tokenizer]:
    """Loads the saved model in float32, to evaluate the weights that are shipped."""
    model = Llama(shape)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    model.load_weights([(name, w.astype(mx.float32)) for name, w in weights.items()])
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes a value as indented JSON."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


# ----------------------------------------------------------------------------------- the run


def make(folder: Path, corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """Trains the tokenizer and the model, saves both, and returns the report."""
    shape = Shape(feed_forward=args.feed_forward, layers=args.layers)
    tokenizer = train_tokenizer(corpus, shape.vocab)
    tokens = encode_train(corpus, tokenizer, args.seed)
    say(f"{len(corpus.train)} modules, {tokens.size} tokens, {mx.default_device()}")
    plan = Plan(args.steps, args.batch, args.peak, seed=args.seed)
    if args.seconds:
        steps = steps_in(args.seconds, shape, plan, tokens)
        plan = Plan(steps, args.batch, args.peak, seed=args.seed)
    say(f"{plan}")
    began = time.monotonic()

    def watch(step: int, cost: float, model: Llama) -> None:
        judged = bits_per_byte(model, tokenizer, corpus, shape.context)[""]
        say(f"{time.monotonic() - began:7.1f} s  step {step}  {cost:.3f} nats  {judged:.4f} bits")

    model = train(shape, plan, tokens, watch)
    seconds = time.monotonic() - began
    save(folder, shape, tokenizer, model)
    return {
        "parameters": sum(w.size for _, w in named_weights(model)),
        "steps": plan.steps,
        "tokens_per_step": plan.batch * shape.context,
        "training_tokens": tokens.size,
        "epochs": round(plan.steps * plan.batch * shape.context / tokens.size, 1),
        "peak_learning_rate": plan.peak,
        "seed": plan.seed,
        "seconds": round(seconds, 1),
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "mlx": version("mlx"),
        "python": args.python,
    }


def judge(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """Returns figures of the saved model on the held-out modules."""
    shape = Shape(**sizes_from(json.loads((folder / "config.json").read_text())))
    model, tokenizer = load(folder, shape)
    by_module = bits_per_byte(model, tokenizer, corpus, shape.context)
    alone, after = xz_bits_per_byte(corpus)
    return {
        "source_files": len(corpus.train),
        "source_bytes": sum(len(text.encode()) for text in corpus.train.values()),
        "source_sha256": corpus.sha256(),
        "held_out_bytes": sum(len(text.encode()) for text in corpus.held_out.values()),
        "bits_per_byte": round(by_module.pop(""), 4),
        "xz_bits_per_byte": round(alone, 4),
        "xz_after_source_bits_per_byte": round(after, 4),
        "bits_per_byte_by_module": {name: round(bits, 4) for name, bits in by_module.items()},
    }


def sizes_from(config: dict[str, Any]) -> dict[str, int]:
    """Returns the sizes of a config.json, as far as this program has options for them."""
    return {"layers": config["num_hidden_layers"], "feed_forward": config["intermediate_size"]}


def completions(folder: Path) -> str:
    """Returns the completion of each prompt by the saved model, as Markdown."""
    shape = Shape(**sizes_from(json.loads((folder / "config.json").read_text())))
    model, tokenizer = load(folder, shape)
    parts = []
    for number, prompt in enumerate(PROMPTS, 1):
        answer = complete(model, tokenizer, prompt, seed=number)
        parts.append(
            f"### {number}\n\nPrompt:\n\n```text\n{prompt}\n```\n\n"
            f"Completion:\n\n```text\n{answer}\n```\n"
        )
    return "\n".join(parts)


def say(line: str) -> None:
    """Reports progress immediately."""
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    library = Path(sysconfig.get_path("stdlib"))
    parser = argparse.ArgumentParser(description="Train mlxpool's demo model.")
    parser.add_argument("--source", type=Path, default=library, help="folder of Python source")
    parser.add_argument(
        "--python", default=platform.python_version(), help="the version that --source is of"
    )
    parser.add_argument("--out", type=Path, default=DEMO, help="folder of the model")
    parser.add_argument("--steps", type=int, default=1600, help="training steps")
    parser.add_argument("--seconds", type=float, help="instead of --steps: as many as fit")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--feed-forward", type=int, default=320, help="width inside a layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge-only", action="store_true", help="train nothing")
    parser.add_argument("--completions", type=Path, help="Markdown file to write them to")
    return parser.parse_args()


def main() -> None:
    """Trains the model, evaluates it, and writes both reports beside it."""
    args = arguments()
    corpus = read_corpus(args.source)
    report = args.out / "training.json"
    data = json.loads(report.read_text()) if args.judge_only else make(args.out, corpus, args)
    write_json(report, data)
    write_json(report, data | judge(args.out, corpus))
    say(report.read_text())
    if args.completions:
        args.completions.write_text(completions(args.out))


if __name__ == "__main__":
    main()
