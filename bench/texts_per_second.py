"""Measures texts per second of the encoder engine and of a pool beside sentence-transformers.

    python bench/texts_per_second.py --beside reference/bin/python [--rounds 7] [--out FOLDER]

The checkpoint is random, of the shape of all-MiniLM-L6-v2: a BERT of 6 layers and 384 numbers.
Texts have from 4 to 256 tokens, most of them few. All sides tokenise and embed the same list of
texts on a CPU: the engine in this process, a pool with one worker for one call of `embed`, and
sentence-transformers in the interpreter that is named, which has to have it. They take turns, and
the vectors are compared once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mlxpool.bench import report
from mlxpool.bench.measurement import OURS, Figures, Measurement, in_turn
from mlxpool.bench.pools import restart_with_openblas, serving
from mlxpool.client import Client
from mlxpool.common.process import private_temp
from mlxpool.worker.encoders.folder import inspect_encoder
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.encoders.text import EncoderText
from mlxpool.worker.encoders.vectors import Vectors, finished
from mlxpool.worker.models.encoders import encoder_plan
from mlxpool.worker.system.cpu_threads import process_cpu_threads
from mlxpool.worker.weights.files import folder_files

OTHER = "sentence-transformers"
MIN_COSINE = 0.9999
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
    "pad_token_id": 0,
}
MAX_TOKENS = 256
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
# Embeds the texts of a file once for each line it is sent; says in how many seconds.
PROGRAM = """
import json, sys, time
import numpy, torch, transformers, sentence_transformers
from sentence_transformers import SentenceTransformer
folder, texts, batch = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3])
model = SentenceTransformer(folder, device="cpu")
numpy.save(sys.argv[4], model.encode(texts, batch_size=batch))
modules = (sentence_transformers, transformers, torch)
print(", ".join(f"{one.__name__} {one.__version__}" for one in modules), flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    model.encode(texts, batch_size=batch, show_progress_bar=False)
    print(time.perf_counter() - begin, flush=True)
"""


def words() -> list[str]:
    """The words of the vocabulary, one token each."""
    return [f"w{index}" for index in range(CONFIG["vocab_size"] - len(SPECIAL))]


def write_checkpoint(folder: Path, seed: int) -> None:
    """Writes the files of the model."""
    vocab = {one: index for index, one in enumerate((*SPECIAL, *words()))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_TOKENS}
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(steps)
    ]
    pooling = {"word_embedding_dimension": CONFIG["hidden_size"], "pooling_mode_mean_tokens": True}
    files: dict[str, Any] = {
        "config.json": CONFIG,
        "tokenizer_config.json": {**settings, **special},
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS},
    }
    (folder / "2_Normalize").mkdir()
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    rng = np.random.default_rng(seed)
    weights = {
        name: _random(rng, name, shape) for name, shape in encoder_plan(CONFIG).model.shapes.items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    draw = rng.standard_normal(shape, np.float32)
    if len(shape) == 1:
        return np.asarray(0.05 * draw + name.endswith("weight"), np.float32)
    return draw / np.float32(shape[-1] ** 0.5)


def make_texts(count: int, seed: int) -> list[str]:
    """Texts of 4 to 256 tokens: half of them have less than 40, a tenth more than 120."""
    rng, known = random.Random(seed), words()
    lengths = (
        min(max(round(rng.lognormvariate(3.6, 0.9)), 2), MAX_TOKENS - 2) for _ in range(count)
    )
    return [" ".join(rng.choices(known, k=length)) for length in lengths]


class Ours:
    """The encoder engine in this process, with its own division of texts into passes."""

    def __init__(self, folder: Path) -> None:
        from mlxpool.worker.engine.encoding.encoder_engine import EncoderEngine
        from mlxpool.worker.weights.load import load

        encoder = inspect_encoder(folder_files(folder))
        self.text = EncoderText(encoder.source)
        self.engine = EncoderEngine(encoder, load(encoder.folder))
        self.engine.warm_up(lambda: None)
        self.threads = process_cpu_threads()
        if self.engine.divides:
            self.threads.divide_steps()
        self.threads.begin_step(time.monotonic())

    def embed(self, texts: Sequence[str]) -> Vectors:
        """The vectors of texts."""
        inputs = self.text.encode_texts(texts, truncate=True)
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].ids))
        rows = [
            self.engine.encode([inputs[index] for index in some], self.threads.parts)
            for some in passes(order, inputs, self.engine.lines)
        ]
        found = np.empty((len(texts), self.engine.dimensions), np.float32)
        found[order] = np.concatenate(rows)
        return finished(found, 0, normalise=self.engine.normalises)


def passes(order: Sequence[int], inputs: Sequence[EncoderInput], lines: int) -> Iterator[list[int]]:
    """The indexes in order, divided into passes of at most `lines` tokens."""
    some: list[int] = []
    tokens = 0
    for index in order:
        size = len(inputs[index].ids)
        if some and tokens + size > lines:
            yield some
            some, tokens = [], 0
        some.append(index)
        tokens += size
    yield some


class Beside:
    """sentence-transformers in another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions = self._line()

    def seconds(self) -> float:
        """Embeds the texts once."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        found = self._process.stdout.readline().strip()
        if not found:
            raise SystemExit(f"{OTHER} ended, exit status {self._process.wait()}")
        return found


@contextmanager
def running(python: str, folder: Path, texts: Path, batch: int, vectors: Path) -> Iterator[Beside]:
    """Starts the other side and ends it."""
    command = [python, "-c", PROGRAM, str(folder), str(texts), str(batch), str(vectors)]
    environment = {key: one for key, one in os.environ.items() if key != "LD_PRELOAD"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield Beside(process)
        assert process.stdin is not None
        process.stdin.close()


def measured(options: argparse.Namespace, folder: Path) -> Figures:
    """Writes the checkpoint and measures both sides in turns."""
    model, texts_file, vectors = folder / "model", folder / "texts.json", folder / "vectors.npy"
    model.mkdir()
    (folder / "run").mkdir(mode=0o700)
    write_checkpoint(model, seed=0)
    texts = make_texts(options.texts, seed=1)
    texts_file.write_text(json.dumps(texts))
    ours = Ours(model)
    tokens = sum(len(one.ids) for one in ours.text.encode_texts(texts))

    def rate(embed: Callable[[], object]) -> float:
        begin = time.perf_counter()
        embed()
        return len(texts) / (time.perf_counter() - begin)

    with (
        running(options.beside, model, texts_file, options.batch, vectors) as beside,
        serving(folder / "run", f'[models.bench]\npath = "{model}"\n'),
        Client(folder / "run") as client,
    ):
        wanted = np.load(vectors)
        pooled = np.array(list(client.embed("bench", texts, truncate=True)), np.float32)
        cosine = float(min((some * wanted).sum(1).min() for some in (ours.embed(texts), pooled)))
        if cosine < MIN_COSINE:
            raise SystemExit(f"vectors differ: a cosine of {cosine:.6f}, must be {MIN_COSINE}")
        sides = in_turn(
            {
                "engine": lambda: rate(lambda: ours.embed(texts)),
                "pool": lambda: rate(lambda: client.embed("bench", texts, truncate=True)),
                OTHER: lambda: len(texts) / beside.seconds(),
            },
            options.rounds,
        )
        versions = f"{report.versions()}; {beside.versions}"
    about = (
        f"{len(texts)} texts, {tokens / len(texts):.0f} tokens each in the mean. Random weights, 6"
        f" layers, 384 numbers, float32; {OTHER} embeds {options.batch} texts at a time; the least"
        f" cosine of a text's vectors is {cosine:.6f}."
    )
    return Figures(
        what="texts",
        command=f"python bench/{Path(sys.argv[0]).name} {shlex.join(arguments(options))}",
        about=about,
        versions=versions,
        machine=report.machine(),
        date=report.today(),
        lines=[
            Measurement("embedding", name, "texts/s", {OURS: sides[name], OTHER: sides[OTHER]})
            for name in ("engine", "pool")
        ],
    )


def arguments(options: argparse.Namespace) -> list[str]:
    """The flags that decide the figures."""
    given = {"rounds": options.rounds, "texts": options.texts, "batch": options.batch}
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["--beside", "reference/bin/python", *flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", required=True, help="a Python that has sentence-transformers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32, help="texts that the other embeds at once")
    parser.add_argument("--out", type=Path, help="a folder for texts.json")
    options = parser.parse_args()
    private_temp.use()
    restart_with_openblas(sys.argv)
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        figures = measured(options, Path(folder))
    print(report.markdown(figures))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        report.write(options.out / "texts.json", figures)


if __name__ == "__main__":
    main()
