"""Writes reference.json: the results of sentence-transformers and transformers for CASES.

    python -m venv reference && reference/bin/pip install torch sentence-transformers
    PYTHONPATH=common:worker:tests reference/bin/python tests/worker/encoders/make_reference.py

checkpoints.py writes the same checkpoints on every machine. So the file contains only the expected
rows, a digest of each checkpoint, and the versions. sentence-transformers itself embeds texts
(`encode` with a case's prompt, truncate_dim and normalize_embeddings) and rates pairs (`predict` of
CrossEncoder), all texts in one batch. The text-classification pipeline of transformers classifies
texts. All models, nomic-bert too, are classes of transformers, so checkpoints contain no code. A
Qwen3 reranker gets its question in a chat template, as in sentence-transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from mlxpool.worker.encoders import text as questions
from worker.encoders.checkpoints import CASES, PAIRS, TEXTS, Case, write

REFERENCE = Path(__file__).with_name("reference.json")
PACKAGES = ("sentence-transformers", "transformers", "tokenizers", "torch", "numpy")
DIGITS = 7  # decimals that are kept
SEQUENCES = "ForSequenceClassification"


def checkpoint_digest(folder: Path) -> str:
    """The hash of a checkpoint's settings and of its tensors, however their files are laid out."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.*")):
        place = file.relative_to(folder)
        if file.suffix == ".safetensors":
            for name, array in sorted(load_file(str(file)).items()):
                digest.update(f"{place} {name} {array.shape}".encode())
                digest.update(array.tobytes())
        elif file.name != "tokenizer.json":  # the text depends on the version of tokenizers
            digest.update(f"{place} {file.read_text()}".encode())
    return digest.hexdigest()


def asked(case: Case) -> str:
    """Returns the task of the case's model: embed, rerank or classify."""
    labels = len(case.config.get("id2label", ()))
    if case.answers or (labels == 1 and case.config["architectures"][0].endswith(SEQUENCES)):
        return "rerank"
    return "classify" if labels else "embed"


def rows(folder: Path, case: Case) -> Any:
    """Returns the expected rows of a case: for each of TEXTS, or of PAIRS for a reranker."""
    kind = asked(case)
    return {"embed": _vectors, "rerank": _scores, "classify": _probabilities}[kind](folder, case)


def _vectors(folder: Path, case: Case) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(
        list(TEXTS),
        prompt_name=case.prompt_name or None,
        truncate_dim=case.dimensions or None,
        normalize_embeddings=case.normalises or bool(case.dimensions),
    )


def _scores(folder: Path, case: Case) -> Any:
    from sentence_transformers import CrossEncoder

    options = {"processor_kwargs": {"chat_template": _chat_template()}} if case.answers else {}
    return CrossEncoder(str(folder), device="cpu", **options).predict(list(PAIRS))[:, None]


def _chat_template() -> str:
    """Returns the chat template of a Qwen3 reranker: a question with a query and a document."""
    turns = {
        role: f"{{{{ (messages | selectattr('role', 'eq', '{role}') | first).content }}}}"
        for role in ("query", "document")
    }
    pair = questions.QUESTION.format(instruction=questions.INSTRUCTION, **turns)
    # A template loses its last newline, but text between quotation marks stays unchanged.
    begin, end = (
        f"{{{{ {text!r} }}}}" for text in (questions.QUESTION_BEGIN, questions.QUESTION_END)
    )
    return begin + pair + end


def _probabilities(folder: Path, case: Case) -> Any:
    from transformers import pipeline

    names = list(case.config["id2label"].values())
    classify = pipeline("text-classification", str(folder), top_k=None, device="cpu")
    answers: Any = classify(list(TEXTS), truncation=True, batch_size=len(TEXTS))
    by_name: list[dict[str, float]] = [
        {entry["label"]: entry["score"] for entry in answer} for answer in answers
    ]
    return [[answer[name] for name in names] for answer in by_name]


def reference(folder: Path) -> Mapping[str, Any]:
    """Returns the content of reference.json; writes the checkpoints below `folder`."""
    cases = {}
    for index, (name, case) in enumerate(CASES.items()):
        checkpoint = write(folder / str(index), case)
        values = [[round(float(x), DIGITS) for x in row] for row in rows(checkpoint, case)]
        cases[name] = {"checkpoint": checkpoint_digest(checkpoint), "rows": values}
        print(name, len(values), "rows of", len(values[0]))
    versions = {
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }
    return {"versions": versions, "cases": cases}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(reference(Path(folder)), indent=1)
    REFERENCE.write_text(_short(text) + "\n", encoding="utf-8")


def _short(text: str) -> str:
    """Returns JSON text with a line for each row of numbers."""
    lines: list[str] = []
    for line in text.splitlines():
        number = line.strip().rstrip(",").lstrip("-")
        last = lines[-1] if lines else ""
        if number[:1].isdigit() or (number == "]" and last and last[-1].isdigit()):
            lines[-1] += line.strip()
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
