"""Checks that a model can draft for another model, and loads the draft model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.encoders.folder import is_encoder
from mlxpool.worker.prompt.tokenizer import ChatTokenizer, read_tokenizer
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from mlxpool.worker.weights.locate import COUNTING, find_files

if TYPE_CHECKING:  # the import needs MLX
    from mlxpool.worker.draft_model.engine import DraftModelEngine

SHOWN = 60  # the most characters of a token in an error


def inspect_draft(path: str, target: ModelFolder) -> ModelFolder:
    """Returns the checked folder of the draft model at `path`, without loading it.

    Raises ModelLoadFailed if our code does not compute the model, if the model does not generate
    text, or if its tokenizer differs from `target`'s; the error has the first id that differs.
    """
    try:
        if path == COUNTING:
            raise ModelLoadFailed("the counting model drafts nothing")
        files = find_files(path)
        if is_encoder(files, ""):
            raise ModelLoadFailed("it is an encoder model, which generates no tokens")
        folder = inspect(files)
        if folder.uses_mlx_lm:
            raise ModelLoadFailed("mlx-lm's code computes it, which cannot be used for drafts")
        if folder.vision is not None:
            raise ModelLoadFailed("it reads images; a draft model reads text only")
        require_same_tokens(target, folder)
    except ModelLoadFailed as error:
        raise ModelLoadFailed(f"draft is {path!r}: {error}") from error
    return folder


def require_same_tokens(target: ModelFolder, draft: ModelFolder) -> None:
    """Raises ModelLoadFailed if the same id means different tokens in the two models.

    Ids without an embedding in one of the models are not compared: models of one family pad their
    vocabularies to different sizes.
    """
    ours, theirs = (tokens_by_id(folder) for folder in (target, draft))
    rows = min(target.plan.embedding_rows, draft.plan.embedding_rows)
    for token in sorted(ours.keys() | theirs.keys()):
        if token >= rows:
            break
        own, drafted = ours.get(token), theirs.get(token)
        if own != drafted:
            raise ModelLoadFailed(
                f"its tokenizer has {_shown(drafted)} for the id {token}, the model's tokenizer has"
                f" {_shown(own)}; a draft model must have the tokenizer of its model"
            )


def tokens_by_id(folder: ModelFolder) -> dict[int, tuple[str, bool]]:
    """Returns each token of a tokenizer, added tokens included, and whether it is special."""
    tokenizer, _ = read_tokenizer(folder.files / "tokenizer.json")
    added = tokenizer.get_added_tokens_decoder()
    plain = {token: text for text, token in tokenizer.get_vocab(with_added_tokens=False).items()}
    tokens = {token: (text, False) for token, text in plain.items()}
    return {**tokens, **{token: (entry.content, entry.special) for token, entry in added.items()}}


def _shown(token: tuple[str, bool] | None) -> str:
    if token is None:
        return "no token"
    text, special = token
    return f"{'the special token ' if special else ''}{json.dumps(text[:SHOWN])}"


def load_draft(
    folder: ModelFolder,
    on_progress: Callable[[int, int], None],
    *,
    rows: int,
    limit: int,
) -> DraftModelEngine:
    """Loads a draft model for `rows` sequences; `limit`: the most bytes of the process.

    Raises ModelLoadFailed if wrong drafts cannot be removed from the rows of the draft model.
    """
    from mlxpool.worker.draft_model.engine import DraftModelEngine
    from mlxpool.worker.kernels import device
    from mlxpool.worker.scheduling.memory_estimate import dequantises_at_load
    from mlxpool.worker.weights.load import load

    dequantise: Any = dequantises_at_load(
        folder, limit=device.memory_limit(limit), float32=not device.on_gpu()
    )
    loaded = load(folder, on_progress, dequantise=dequantise)
    text = ChatTokenizer.from_folder(folder).table(folder.plan.vocab_size)
    engine = DraftModelEngine(loaded, text, rows=rows, limit=limit)
    if engine.no_drafts:
        raise ModelLoadFailed(f"the draft model of {folder.files.where}: {engine.no_drafts}")
    return engine
