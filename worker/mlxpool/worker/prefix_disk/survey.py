"""Lists, verifies and deletes the records in a folder of prefixes, for operators.

Works without a worker; running workers notice deletions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from mlxpool.worker.prefix_disk.folder import ModelFolder, models_in, segment_files
from mlxpool.worker.prefix_disk.records import BadRecord, Kind, aligned
from mlxpool.worker.prefix_disk.segments import Segment


class Contents(Struct):
    """The segments of one model with one digest, and counts of their contents.

    `about`: the description of the digest; empty if no segment is readable. `bad`: the number of
    invalid records and segments. `torn`: bytes of incomplete records, after a writer ended or the
    machine lost power.
    """

    model: str
    digest: str
    about: dict[str, Any] = field(default_factory=dict)
    segments: int = 0
    records: int = 0
    tokens: int = 0
    snapshots: int = 0
    bytes: int = 0
    used: float = 0.0  # time of the last use, in Unix seconds
    bad: int = 0
    torn: int = 0
    faults: list[str] = field(default_factory=list)


def survey(root: Path, model: str | None = None, *, verify: bool = False) -> list[Contents]:
    """Returns the contents for all models or for `model`; `verify`: reads and checks every record.

    Raises ValueError for a model without a folder.
    """
    known = models_in(root)
    if model is not None and model not in known:
        raise ValueError(
            f"{root} has no prefixes of {model!r:.80}; it has those of:"
            f" {', '.join(known) or 'no model'}"
        )
    names = list(known) if model is None else [model]
    return [contents for name in names for contents in _of_model(name, known[name], verify=verify)]


def _of_model(model: str, path: Path, *, verify: bool) -> Iterator[Contents]:
    by_digest: dict[str, Contents] = {}
    for segment in sorted(segment_files(path), key=lambda file: file.path):
        name = segment.path.parent.name
        contents = by_digest.setdefault(name, Contents(model, name))
        contents.segments += 1
        contents.bytes += segment.size
        contents.used = max(contents.used, segment.used)
        try:
            _add(contents, segment.path, verify=verify)
        except FileNotFoundError:
            pass  # another process has deleted the file
        except (BadRecord, OSError) as error:
            contents.bad += 1
            contents.faults.append(f"{segment.path}: {error}")
    yield from by_digest.values()


def _add(contents: Contents, path: Path, *, verify: bool) -> None:
    segment = Segment(path)
    try:
        contents.about = segment.about
        for header, place in segment.scan():
            contents.records += 1
            if header.kind is Kind.STATE:
                contents.snapshots += 1
            else:
                contents.tokens += header.tokens
            if verify:
                try:
                    segment.read(place)
                except BadRecord as error:
                    contents.bad += 1
                    contents.faults.append(f"{path} at {place.offset}: {error}")
        if segment.broken:
            contents.bad += 1
            contents.faults.append(f"{path} at {segment.scanned}: no record begins there")
        else:
            contents.torn += max(0, path.stat().st_size - aligned(segment.scanned))
    finally:
        segment.close()


def remove(root: Path, model: str, digest: str = "") -> int:
    """Deletes the segments of a model whose digest begins with `digest`; returns their bytes.

    Raises ValueError for a model without a folder, or if no segment has such a digest. Raises
    OSError if the folder cannot be locked, or a segment cannot be deleted.
    """
    known = models_in(root)
    if model not in known:
        raise ValueError(f"{root} has no prefixes of {model!r:.80}; `mlxpool prefix ls` lists them")
    freed, folder = 0, ModelFolder(root, model, 0)
    with folder.locked():
        files = folder.files()
        chosen = [file for file in files if file.path.parent.name.startswith(digest)]
        if digest and not chosen:
            there = sorted({file.path.parent.name for file in files})
            raise ValueError(
                f"{root} has no prefixes of {model!r:.80} whose digest begins with {digest!r:.80};"
                f" it has {', '.join(there) or 'none'}"
            )
        for file in chosen:
            file.path.unlink(missing_ok=True)
            freed += file.size
            with contextlib.suppress(OSError):
                file.path.parent.rmdir()
    return freed
