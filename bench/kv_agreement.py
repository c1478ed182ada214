"""Compares the next tokens of text over 8-bit keys and values with those over the model's numbers.

    python bench/kv_agreement.py FOLDER [--text PATH ...] [--tokens 20000] [--json FILE]

FOLDER is a model, or "demo". The text is teacher-forced: every token follows what the text has
before it, in windows of the model's context, at most CONTEXT. Each window is read in chunks, as a
prompt and as a resumed stream is, and again half in chunks and half token by token, as a prompt and
its answer are. A position agrees if its likeliest token is the same in both readings:

- auto, auto: what rounding alone changes between a stream and its resumption
- auto, int8: what 8-bit keys and values change
- int8, int8: as the first, with 8-bit keys and values

The check fails, with status 1, if fewer than 99 % of the positions agree, or if the same bytes hold
fewer than 1.9 times the tokens.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.bench import report
from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.process import private_temp
from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.layout_choice import choose_layout, make_layout
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import RowSpan
from mlxpool.worker.caches.stored import AUTO, INT8
from mlxpool.worker.kernels import device
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling.kv_blocks import blocks_for
from mlxpool.worker.scheduling.memory_estimate import dequantises_at_load
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import LoadedModel, load
from mlxpool.worker.weights.locate import locate, open_files

CONTEXT = 2048  # tokens of a window at most
CHUNK = 256  # tokens that are read at a time
LEAST_AGREEMENT, LEAST_CAPACITY = 0.99, 1.9
Pair = tuple[str, str]  # values of the setting `kv`: of the reference, and of what is compared
PAIRS: Sequence[Pair] = ((AUTO, AUTO), (AUTO, INT8), (INT8, INT8))
DEFAULT_TEXTS = ("docs/*.md", "{stdlib}/[a-d]*.py")


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many of `positions` have the reference's likeliest token.

    `divergence`: the mean of the Kullback-Leibler divergences from the reference, in nats.
    `margin`: the greatest difference of the reference's two greatest log-probabilities at a
    position that does not agree.
    """

    positions: int
    agreeing: int
    divergence: float
    margin: float

    @property
    def share(self) -> float:
        """The share of the positions that agree."""
        return self.agreeing / self.positions


def load_model(path: str) -> LoadedModel:
    """The model as a worker loads it."""
    config = ModelConfig(path=f"builtin:{path}" if path.startswith("demo") else path)
    folder = inspect(open_files(locate(config)))
    limit, float32 = device.memory_limit(0), not device.on_gpu()
    opened = dequantises_at_load(folder, limit=limit, float32=float32)
    return load(folder, dequantise=opened)


def windows(
    loaded: LoadedModel, texts: Sequence[Path], tokens: int, context: int = CONTEXT
) -> list[list[int]]:
    """The tokens of the texts in windows of at most `context`, so many tokens in all at most."""
    text = ChatTokenizer.from_folder(loaded.folder)
    size = min(context, loaded.folder.context)
    found: list[list[int]] = []
    for path in texts:
        ids = text.encode(path.read_text(encoding="utf-8", errors="replace"))
        for start in range(0, len(ids), size):
            if tokens <= 0:
                return found
            found.append(ids[start : start + min(size, tokens)])
            tokens -= len(found[-1])
    return found


def layout_of(loaded: LoadedModel, kv: str, context: int) -> tuple[Layout, RowShape]:
    """The layout in which a worker has rows, for one row."""
    shape = RowShape(loaded.folder.plan.caches, loaded.dtype, context, CHUNK, kv=kv)
    name, shape = choose_layout(None, shape, deterministic=False, on_gpu=device.on_gpu())
    layout = make_layout(
        name,
        shape,
        loaded.model,
        blocks_for(context) + 1,
        rows=1,
        deterministic=False,
        on_gpu=device.on_gpu(),
    )
    return layout, shape


def log_probabilities(
    layout: Layout, ids: Sequence[int], counts: Sequence[int]
) -> Iterator[np.ndarray]:
    """Yields the log-probabilities [n, vocabulary] behind each token of a new row.

    It is read in passes of so many tokens, in that order.
    """
    row, start = layout.store.new_row(), 0
    for count in counts:
        inputs = mx.array(list(ids[start : start + count]), dtype=mx.int32)
        logits = layout.forward([RowSpan(row, count, lines=count)], inputs, [0]).logits
        logits = logits.astype(mx.float32)
        found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(found)
        yield np.array(found)
        start += count
    layout.store.release(row)


def in_chunks(tokens: int) -> list[int]:
    """The passes that read so many tokens in chunks."""
    return [min(CHUNK, tokens - start) for start in range(0, tokens, CHUNK)]


def as_a_request(tokens: int) -> list[int]:
    """The passes that read half of so many tokens in chunks, as a prompt, and the others one by
    one.
    """
    return in_chunks(tokens // 2) + [1] * (tokens - tokens // 2)


def compare(
    loaded: LoadedModel, texts: Sequence[Sequence[int]], pairs: Sequence[Pair] = PAIRS
) -> list[Agreement]:
    """The agreement of each pair of caches: one read in chunks, one read as a request."""
    context = max(map(len, texts))
    layouts = {
        kv: layout_of(loaded, kv, context)[0] for kv in {kv for pair in pairs for kv in pair}
    }
    found = [Agreement(0, 0, 0.0, 0.0) for _ in pairs]
    for ids in texts:
        chunks, passes = in_chunks(len(ids)), as_a_request(len(ids))
        exact = {
            kv: np.concatenate(list(log_probabilities(layouts[kv], ids, chunks)))
            for kv in {reference for reference, _ in pairs}
        }
        for kv in {kv for _, kv in pairs}:
            start = 0
            for other in log_probabilities(layouts[kv], ids, passes):
                here = slice(start, start + len(other))
                for number, (reference, compared) in enumerate(pairs):
                    if compared == kv:
                        found[number] = _added(found[number], exact[reference][here], other)
                start += len(other)
    return [replace(one, divergence=one.divergence / one.positions) for one in found]


def _added(before: Agreement, exact: np.ndarray, other: np.ndarray) -> Agreement:
    """An agreement with more positions [n, vocabulary]; its divergence is a sum."""
    agrees = exact.argmax(-1) == other.argmax(-1)
    top = np.partition(exact, -2, axis=-1)[:, -2:]
    margins = (top[:, 1] - top[:, 0])[~agrees]
    return Agreement(
        before.positions + len(exact),
        before.agreeing + int(agrees.sum()),
        before.divergence + float((np.exp(exact) * (exact - other)).sum()),
        max([before.margin, *margins.tolist()]),
    )


def capacity_ratio(loaded: LoadedModel) -> float:
    """How many times as many tokens the same bytes hold with 8-bit keys and values."""
    plain, quantised = (layout_of(loaded, kv, CONTEXT)[1] for kv in (AUTO, INT8))
    return plain.token_bytes / quantised.token_bytes


def problems(agreement: Agreement, ratio: float) -> list[str]:
    """What does not hold, in words."""
    found = []
    if agreement.share < LEAST_AGREEMENT:
        found.append(
            f"{agreement.share:.2%} of the positions agree, must be {LEAST_AGREEMENT:.0%} at least"
        )
    if ratio < LEAST_CAPACITY:
        found.append(f"the same bytes hold {ratio:.2f} times the tokens, not {LEAST_CAPACITY}")
    return found


def find_texts(patterns: Sequence[str]) -> list[Path]:
    """The files of these patterns, relative to the repository; {stdlib} is Python's library."""
    root, found = Path(__file__).parent.parent, []
    for pattern in patterns:
        path = Path(pattern.format(stdlib=sysconfig.get_paths()["stdlib"]))
        base = Path(path.anchor) if path.is_absolute() else root
        found += sorted(base.glob(str(path.relative_to(path.anchor))))
    return [path for path in found if path.is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--text", nargs="+", default=list(DEFAULT_TEXTS))
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    private_temp.use()
    loaded = load_model(arguments.folder)
    every = find_texts(arguments.text)
    share = max(1, arguments.tokens // max(1, len(arguments.text)))
    texts = [
        window
        for pattern in arguments.text
        for window in windows(loaded, find_texts([pattern]), share)
    ]
    if not texts:
        parser.error(f"no text is at {arguments.text}")
    found = dict(zip(PAIRS, compare(loaded, texts), strict=True))
    ratio = capacity_ratio(loaded)
    rows = [
        [
            ", ".join(pair),
            f"{one.positions:,}",
            f"{one.share:.3%}",
            f"{one.divergence:.2e}",
            f"{one.margin:.5f}",
        ]
        for pair, one in found.items()
    ]
    print(report.versions(), report.machine(), f"{len(every)} texts", sep="; ")
    print(report.table(["kv", "positions", "agree", "divergence", "greatest margin"], rows))
    print(f"tokens in the same bytes: {ratio:.2f} times")
    figures: dict[str, Any] = {" ".join(pair): asdict(one) for pair, one in found.items()}
    report.save(arguments.json, {**figures, "ratio": ratio})
    wrong = problems(found[AUTO, INT8], ratio)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
