"""Train the embedded embedding model: word vectors that find Python functions and passages of text.

The training text is the documentation of Python and of five packages: docstrings, and the code that
they describe. A pair is a description and its subject. The model learns that a pair is closer than
a description and any other subject. 24 modules of the standard library are held out: their
functions are the test, which compares the model with TF-IDF.

    python examples/train_demo_embedding.py --packages .venv/lib/python3.11/site-packages

The model is a BERT without layers: the mean of the layer-normalised vectors of the word pieces. The
norm scales all vectors to the same length. Its weights then set the first few components to 0. In
the vector of a frequent piece these components are large, so the piece adds little to the mean. The
gradients are written out in NumPy: training takes minutes of one processor core. The same seed and
packages give the same result.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import platform
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

Array = npt.NDArray[np.float32]
Score = Callable[[Sequence[str], Sequence[str]], npt.NDArray[Any]]

DEMO = Path(__file__).resolve().parent.parent / "worker" / "mlxpool" / "worker" / "demo_embed"
PACKAGES = ("networkx", "numpy", "scipy", "sklearn", "sympy")  # all under the BSD licence
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
# Modules that are held out of training, the same as for the demo model. The tests of the standard
# library are held out, too.
HELD_OUT = (
    *("argparse", "calendar", "cmd", "colorsys", "configparser", "csv", "dataclasses"),
    *("difflib", "fileinput", "fractions", "graphlib", "heapq", "ipaddress", "mailbox"),
    *("plistlib", "pprint", "sched", "shlex", "statistics", "tarfile", "textwrap", "timeit"),
    *("uuid", "zipfile"),
)
# Modules that are also held out, because the number of steps was chosen with them.
CHOSEN_ON = (
    *("bdb", "gettext", "gzip", "imaplib", "optparse", "pathlib", "platform", "random", "shutil"),
    *("traceback", "weakref", "webbrowser"),
)
NO_TEXT = ("test", "tests", "site-packages", "lib2to3", "idlelib", "pydoc_data")  # folders
PAD, CLS, SEP, UNKNOWN = SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
QUESTIONS = ("How do I {}?", "How can I {}?", "how to {}", "what does it mean to {}", "which {}")
QUERY_TOKENS, PASSAGE_TOKENS = 32, 112
MAX_CHARACTERS = 700  # most characters of a passage
THIRD = 3  # every third passage is stored for the tests
MISSPELT = 0.3  # share of misspelt queries in training
DUMPED = 8  # numbers of a vector that the norm's weights set to 0


@dataclass(frozen=True)
class Shape:
    """The sizes of the model: the largest whose float16 weights and tokenizer fit into 8 MB."""

    vocab: int = 9216
    hidden: int = 384
    positions: int = 512
    epsilon: float = 1e-12


@dataclass(frozen=True)
class Plan:
    """The settings of a training run."""

    steps: int = 1500
    batch: int = 512  # pairs
    rate: float = 4e-2
    temperature: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Item:
    """A documented function, class or passage. `rest`: the docstring after its first paragraph."""

    name: str
    summary: str
    rest: str
    code: str


# ---------------------------------------------------------------------------------- the text


def read_items(library: Path, packages: Path) -> list[Item]:
    """Returns each documented item of the training text once."""
    held_out = {f"{name}.py" for name in (*HELD_OUT, *CHOSEN_ON)}
    items = [*modules(library, held_out)]
    for name in PACKAGES:
        items += modules(packages / name, set())
    items += [item for text in topics.values() for item in passages(text)]
    return list({(item.summary, item.rest[:100]): item for item in items}.values())


def modules(folder: Path, without: set[str]) -> Iterator[Item]:
    """Yields the items of a folder's Python files, without files that are not UTF-8."""
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder)
        if path.as_posix() in without or set(path.parts) & set(NO_TEXT):
            continue
        try:
            yield from documented(file.read_text(encoding="utf-8"), path.stem)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue


def documented(source: str, module: str) -> Iterator[Item]:
    """Yields the documented functions and classes of a module, named with their class or module."""
    tree, lines = ast.parse(source), source.splitlines()

    def walk(node: ast.AST, owner: str) -> Iterator[Item]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            text = ast.get_docstring(child)
            if text and (item := described(f"{owner}.{child.name}", text, code(child, lines))):
                yield item
            yield from walk(child, child.name)

    yield from walk(tree, module)
    yield from passages(ast.get_docstring(tree) or "")


def described(name: str, text: str, source: str) -> Item | None:
    """Returns an item, or None if its docstring is too short."""
    summary, _, rest = text.partition("\n\n")
    summary = " ".join(summary.split())
    if len(summary.split()) < 3:
        return None
    return Item(name, summary[:300], " ".join(rest[:MAX_CHARACTERS].split()), source)


def code(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """Returns the source of a definition without its docstring and comments."""
    first = node.body[0]
    head = lines[node.lineno - 1 : first.lineno - 1] or [lines[node.lineno - 1]]
    body = lines[first.end_lineno or 0 : node.end_lineno]
    text = re.sub(r"#.*", "", "\n".join([*head, *body]))
    return " ".join(text.split())[:MAX_CHARACTERS]


def passages(text: str) -> Iterator[Item]:
    """Yields each paragraph of a text: its first sentence describes its other sentences."""
    for paragraph in text.split("\n\n"):
        first, _, rest = " ".join(paragraph.split()).partition(". ")
        if len(first.split()) >= 5 and len(rest.split()) >= 8:
            yield Item("", first[:300], rest[:MAX_CHARACTERS], "")


# ------------------------------------------------------------------------------------ pairs


def misspelt(text: str, rng: random.Random, share: float = 0.25) -> str:
    """Returns the text with letters swapped or left out in some of its longer words."""

    def changed(word: str) -> str:
        if len(word) < 5 or rng.random() > share:
            return word
        at = rng.randrange(1, len(word) - 1)
        if rng.random() < 0.5:
            return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        return word[:at] + word[at + 1 :]

    return " ".join(changed(word) for word in text.split())


def pair(item: Item, rng: random.Random) -> tuple[str, str]:
    """Returns a query and the passage that it should find."""
    query, passages = item.summary, [part for part in (item.rest, item.code) if part]
    sentences = re.split(r"(?<=[.:;]) ", item.rest)
    if len(sentences) > 2 and rng.random() < 0.3:
        chosen = rng.randrange(len(sentences))
        query = sentences[chosen]
        rest = " ".join(sentences[:chosen] + sentences[chosen + 1 :])
        passages = [item.summary + " " + rest]
    elif item.name and rng.random() < 0.15:
        query, passages = item.name, [item.summary + " " + item.rest]
    passage = rng.choice(passages) if passages else item.name
    if item.name and passage is item.rest and rng.random() < 0.5:
        passage = item.name + " " + passage
    if rng.random() < 0.1:
        query = rng.choice(QUESTIONS).format(query[:1].lower() + query[1:].rstrip("."))
    if rng.random() < 0.2:
        words = query.split()
        query = " ".join(word for word in words if rng.random() > 0.25) or query
    if rng.random() < MISSPELT:
        query = misspelt(query, rng)
    return query, passage


def batches(items: Sequence[Item], size: int, seed: int) -> Iterator[list[tuple[str, str]]]:
    """Yields batches of pairs without end; each item occurs once in an epoch."""
    rng = random.Random(seed)
    order = list(range(len(items)))
    while True:
        rng.shuffle(order)
        for at in range(0, len(order) - size + 1, size):
            yield [pair(items[index], rng) for index in order[at : at + size]]


def train_tokenizer(items: Iterable[Item], vocab: int) -> Tokenizer:
    """Trains a lower-case WordPiece tokenizer, which splits CamelCase and under_scores."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN, max_input_chars_per_word=40))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Replace(Regex("(?<=[a-z0-9])(?=[A-Z])"), " "),
            normalizers.Lowercase(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\s_]+"), "removed"),
            pre_tokenizers.Split(Regex(r"\p{N}|[^\p{L}\p{N}]"), "isolated"),
        ]
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL), show_progress=False, limit_alphabet=200
    )
    texts = (" ".join((item.name, item.summary, item.rest, item.code)) for item in items)
    tokenizer.train_from_iterator(texts, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
    )
    return tokenizer


def token_ids(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> list[list[int]]:
    """Returns the ids of texts, each of at most `most` tokens."""
    tokenizer.enable_truncation(most)
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
    tokenizer.no_truncation()
    return rows


# --------------------------------------------------------------------------------- the model


class Words:
    """The trained model: a vector for each token, the layer norm's weights, and Adam's moments."""

    def __init__(self, shape: Shape, weights: Array, seed: int) -> None:
        """`weights`: how much each token counts in the vector of a text before training, 0 to 1."""
        size, rng = shape.hidden, np.random.default_rng(seed)
        words = rng.standard_normal((shape.vocab, size)).astype(np.float32)
        words[:, :DUMPED] = 0
        words *= (weights / np.linalg.norm(words, axis=1))[:, None]
        rest = np.sqrt(1 - weights**2)[:, None] / math.sqrt(DUMPED)
        words[:, :DUMPED] = rest * np.array([1.0, -1.0] * (DUMPED // 2))
        gain = np.ones(size, np.float32)
        gain[:DUMPED] = 0
        self.shape = shape
        self.values = {"words": words * math.sqrt(size), "gain": gain, "shift": 0 * gain}
        self.means = {name: np.zeros_like(value) for name, value in self.values.items()}
        self.squares = {name: np.zeros_like(value) for name, value in self.values.items()}
        self.steps = 0

    def update(self, slopes: Mapping[str, Array], rate: float) -> None:
        """Runs a step of Adam with these gradients. The components that the norm removes stay 0."""
        self.steps += 1
        for name, slope in slopes.items():
            mean, square = self.means[name], self.squares[name]
            mean += 0.1 * (slope - mean)
            square += 0.01 * (slope * slope - square)
            size = np.sqrt(square / (1 - 0.99**self.steps)) + 1e-8
            self.values[name] -= rate / (1 - 0.9**self.steps) * mean / size
        for name in ("gain", "shift"):
            self.values[name][:DUMPED] = 0

    def vectors(self, rows: Sequence[Sequence[int]]) -> Array:
        """Returns the vectors [n, d] of texts, of length 1."""
        return forward(self, rows)[0]

    def stored(self) -> dict[str, npt.NDArray[np.float16]]:
        """Returns the tensors by their names in a BERT checkpoint."""
        shape, values = self.shape, self.values
        tensors = {
            "embeddings.word_embeddings.weight": values["words"],
            "embeddings.position_embeddings.weight": np.zeros((shape.positions, shape.hidden)),
            "embeddings.token_type_embeddings.weight": np.zeros((2, shape.hidden)),
            "embeddings.LayerNorm.weight": values["gain"],
            "embeddings.LayerNorm.bias": values["shift"],
        }
        return {name: tensor.astype(np.float16) for name, tensor in tensors.items()}


Backward = Callable[[Array], dict[str, Array]]


def forward(model: Words, rows: Sequence[Sequence[int]]) -> tuple[Array, Backward]:
    """Returns the vectors [n, d] of texts, and the backward pass.

    The backward pass is a function from the gradients of the vectors to those of the model.
    """
    values = model.values
    used, at = np.unique(np.concatenate([np.array(row) for row in rows]), return_inverse=True)
    of_row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    counts = np.bincount(of_row * len(used) + at, minlength=len(rows) * len(used))
    shares = counts.reshape(len(rows), len(used)).astype(np.float32)
    shares /= shares.sum(1, keepdims=True)

    words = values["words"][used]
    centred = words - words.mean(1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(1, keepdims=True) + model.shape.epsilon)
    normed = centred / deviation
    pooled = shares @ (normed * values["gain"] + values["shift"])
    lengths = np.linalg.norm(pooled, axis=1, keepdims=True)
    vectors = pooled / lengths

    def backward(slope: Array) -> dict[str, Array]:
        slope = (slope - (slope * vectors).sum(1, keepdims=True) * vectors) / lengths
        states = shares.T @ slope
        of_normed = states * values["gain"]
        of_words = of_normed - of_normed.mean(1, keepdims=True)
        of_words -= normed * (of_normed * normed).mean(1, keepdims=True)
        all_words = np.zeros_like(values["words"])
        all_words[used] = of_words / deviation
        return {"words": all_words, "gain": (states * normed).sum(0), "shift": states.sum(0)}

    return vectors, backward


def token_weights(tokenizer: Tokenizer, items: Sequence[Item]) -> Array:
    """Returns a weight of each token, 0.02 to 0.99; tokens that fewer items have weigh more."""
    counts = np.ones(tokenizer.get_vocab_size())
    texts = [f"{item.name} {item.summary} {item.rest}" for item in items]
    for row in tokenizer.encode_batch_fast(texts):
        counts[list(set(row.ids))] += 1
    return np.asarray((np.log(len(texts) / counts) / 8).clip(0.02, 0.99), np.float32)


# ------------------------------------------------------------------------------ the training


def softmax(scores: Array) -> Array:
    """Returns the softmax along the last axis."""
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def cost(left: Array, right: Array, temperature: float) -> tuple[float, Array, Array]:
    """Returns the contrastive loss of queries and passages [n, d], and its gradients for both.

    The loss is the mean of two cross entropies: each query must find its passage among all
    passages, and each passage its query.
    """
    scores, targets = left @ right.T / temperature, np.eye(len(left), dtype=np.float32)
    rows, columns = softmax(scores), softmax(scores.T).T
    value = -float(np.log(np.diag(rows)).mean() + np.log(np.diag(columns)).mean()) / 2
    slope = np.asarray(rows + columns - 2 * targets, np.float32) / np.float32(
        2 * len(left) * temperature
    )
    return value, np.asarray(slope @ right, np.float32), np.asarray(slope.T @ left, np.float32)


def train(
    model: Words,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    plan: Plan,
    watch: Callable[[int, float], None],
) -> None:
    """Trains the model; the rate rises for a twentieth of the steps, then falls to zero."""
    warmup, pairs = max(plan.steps // 20, 1), batches(items, plan.batch, plan.seed)
    for step in range(plan.steps):
        queries, passages = zip(*next(pairs), strict=True)
        left, left_back = forward(model, token_ids(tokenizer, queries, QUERY_TOKENS))
        right, right_back = forward(model, token_ids(tokenizer, passages, PASSAGE_TOKENS))
        value, of_left, of_right = cost(left, right, plan.temperature)
        slopes, more = left_back(of_left), right_back(of_right)
        done = step / plan.steps
        rate = plan.rate * min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * done))
        model.update({name: slope + more[name] for name, slope in slopes.items()}, rate)
        watch(step, value)


# ---------------------------------------------------------------------------------- the test


def held_out_items(library: Path, modules: Sequence[str] = HELD_OUT) -> list[Item]:
    """Returns the functions of the held-out modules that have a description and code."""
    by_summary: dict[str, Item] = {}
    for name in modules:
        for item in documented((library / f"{name}.py").read_text(encoding="utf-8"), name):
            if item.name and len(item.code) > 60:
                by_summary.setdefault(item.summary, item)
    return list(by_summary.values())


def tests_of(items: Sequence[Item]) -> dict[str, list[str]]:
    """Returns the queries of each test by its name; query i should find the code of item i."""
    rng = random.Random(1)
    return {
        "descriptions": [item.summary for item in items],
        "misspelt descriptions": [misspelt(item.summary, rng, 0.5) for item in items],
    }


def rank_figures(scores: npt.NDArray[Any]) -> dict[str, float]:
    """Returns recall at 1 and mean reciprocal rank for scores [n, n] of queries and passages.

    The passage of query i is passage i.
    """
    ranks = (scores > np.diag(scores)[:, None]).sum(1) + 1
    return {
        "first": round(float((ranks == 1).mean()), 4),
        "mrr": round(float((1 / ranks).mean()), 4),
    }


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case; CamelCase and under_scores are split."""
    return re.findall(r"[a-z]+|[0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower())


def tf_idf(queries: Sequence[str], passages: Sequence[str]) -> npt.NDArray[Any]:
    """Returns the cosines [n, m] of the TF-IDF vectors of queries and passages.

    A vector has for each word log(1 + its count in the text) times the word's rarity.
    """
    bags = [words_of(passage) for passage in passages]
    places = {word: index for index, word in enumerate(sorted({w for bag in bags for w in bag}))}
    rarity = np.zeros(len(places))
    for bag in bags:
        rarity[[places[word] for word in set(bag)]] += 1
    rarity = np.log((1 + len(bags)) / (1 + rarity)) + 1

    def rows(some: Iterable[Sequence[str]]) -> npt.NDArray[Any]:
        matrix = []
        for bag in some:
            row = np.zeros(len(places))
            for word in bag:
                if word in places:
                    row[places[word]] += 1
            row = np.log1p(row) * rarity
            matrix.append(row / max(float(np.linalg.norm(row)), 1e-12))
        return np.array(matrix)

    return np.asarray(rows(words_of(query) for query in queries) @ rows(bags).T)


def judged(score: Score, items: Sequence[Item]) -> dict[str, dict[str, float]]:
    """Returns the figures of every test."""
    passages = [item.code for item in items]
    return {name: rank_figures(score(some, passages)) for name, some in tests_of(items).items()}


def model_score(model: Words, tokenizer: Tokenizer) -> Score:
    """Scores queries and passages by a model."""

    def score(queries: Sequence[str], passages: Sequence[str]) -> npt.NDArray[Any]:
        left, right = (
            model.vectors(token_ids(tokenizer, some, model.shape.positions))
            for some in (queries, passages)
        )
        return np.asarray(left @ right.T)

    return score


# ------------------------------------------------------------------------------- the program


def write(folder: Path, model: Words, tokenizer: Tokenizer, training: Mapping[str, Any]) -> None:
    """Writes the files of sentence-transformers' layout, and the figures."""
    shape = model.shape
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.hidden,
        "layer_norm_eps": shape.epsilon,
        "max_position_embeddings": shape.positions,
        "num_attention_heads": 6,
        "num_hidden_layers": 0,
        "pad_token_id": 0,
        "type_vocab_size": 2,
        "vocab_size": shape.vocab,
    }
    special = {"pad_token": PAD, "cls_token": CLS, "sep_token": SEP, "unk_token": UNKNOWN}
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.positions,
            **special,
        },
        "modules.json": [
            {
                "idx": index,
                "name": str(index),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
            for index, (path, kind) in enumerate(steps)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": shape.hidden,
            "pooling_mode_mean_tokens": True,
        },
        "sentence_bert_config.json": {"max_seq_length": shape.positions},
        "training.json": training,
    }
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    save_file(model.stored(), str(folder / "model.safetensors"), metadata={"format": "pt"})


def licences(packages: Path) -> dict[str, str]:
    """Returns version and licence of the training text, by package."""
    known = {"python": f"{platform.python_version()}, PSF-2.0"}
    versions = {package.name: package.version for package in distributions(path=[str(packages)])}
    for name in PACKAGES:
        known[name] = f"{versions[DISTRIBUTIONS.get(name, name)]}, BSD-3-Clause"
    return known


def digest(items: Sequence[Item]) -> str:
    """Returns a digest of the training text, to compare two runs."""
    text = "\0".join(f"{item.name} {item.summary} {item.rest} {item.code}" for item in items)
    return hashlib.sha256(text.encode()).hexdigest()


def stored_test(items: Sequence[Item]) -> dict[str, Any]:
    """Returns a third of the test as JSON for a file: both lists of queries, and the passages."""
    queries = {name: some[::THIRD] for name, some in tests_of(items).items()}
    return {
        "text": f"CPython {platform.python_version()}, licence PSF-2.0",
        "queries": queries,
        "passages": [item.code for item in items[::THIRD]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="site-packages with the text")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--out", type=Path, default=DEMO)
    parser.add_argument("--test", type=Path, help="a file for the test, as JSON")
    options = parser.parse_args()
    shape, plan, begin = Shape(), Plan(steps=options.steps, seed=options.seed), time.monotonic()
    items = read_items(options.library, options.packages)
    tokenizer = train_tokenizer(items, shape.vocab)
    model = Words(shape, token_weights(tokenizer, items), plan.seed)
    chosen_on = held_out_items(options.library, CHOSEN_ON)

    def watch(step: int, value: float) -> None:
        if step % 250 == 249:
            print(step + 1, round(value, 3), judged(model_score(model, tokenizer), chosen_on))

    train(model, tokenizer, items, plan, watch)
    held_out = held_out_items(options.library)
    training = {
        **asdict(plan),
        "parameters": sum(tensor.size for tensor in model.stored().values()),
        "seconds": round(time.monotonic() - begin),
        "text": licences(options.packages),
        "items": len(items),
        "items_sha256": digest(items),
        "passages": len(held_out),
        "model": judged(model_score(model, tokenizer), held_out),
        "tf_idf": judged(tf_idf, held_out),
    }
    write(options.out, model, tokenizer, training)
    if options.test:
        options.test.write_text(json.dumps(stored_test(held_out), indent=0) + "\n")
    print(json.dumps(training, indent=2))


if __name__ == "__main__":
    main()
