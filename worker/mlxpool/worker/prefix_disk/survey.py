"""What a folder of prefixes has, whether it checks, and its deletion: for operators.

Needs no worker; workers that run notice what was deleted.
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
    """The segments of one model that have one digest, and what was found in them.

    `about`: what the digest covers, in words; empty where no segment says it. `bad`: records and
    segments that do not check. `torn`: bytes of records that were not completed, because a writer
    was ended or the machine lost power.
    """

    model: str
    digest: str
    about: dict[str, Any] = field(default_factory=dict)
    segments: int = 0
    records: int = 0
    tokens: int = 0
    snapshots: int = 0
    bytes: int = 0
    used: float = 0.0  # seconds of the epoch
    bad: int = 0
    torn: int = 0
    faults: list[str] = field(default_factory=list)


def survey(root: Path, model: str | None = None, *, verify: bool = False) -> list[Contents]:
    """Returns what there is of all models, or of one; `verify`: reads and checks every record.

    Raises ValueError for a model that has no folder.
    """
    known = models_in(root)
    if model is not None and model not in known:
        raise ValueError(
            f"{root} has no prefixes of {model!r:.80}; it has those of:"
            f" {', '.join(known) or 'no model'}"
        )
    names = list(known) if model is None else [model]
    return [found for name in names for found in _of_model(name, known[name], verify=verify)]


def _of_model(model: str, path: Path, *, verify: bool) -> Iterator[Contents]:
    found: dict[str, Contents] = {}
    for one in sorted(segment_files(path), key=lambda file: file.path):
        name = one.path.parent.name
        contents = found.setdefault(name, Contents(model, name))
        contents.segments += 1
        contents.bytes += one.size
        contents.used = max(contents.used, one.used)
        try:
            _add(contents, one.path, verify=verify)
        except FileNotFoundError:
            pass  # deleted meanwhile
        except (BadRecord, OSError) as error:
            contents.bad += 1
            contents.faults.append(f"{one.path}: {error}")
    yield from found.values()


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
    """Deletes the segments of a model, all or those whose digest begins so; returns their bytes.

    Raises ValueError for a model that has no folder, for a digest that none has, and OSError.
    """
    known = models_in(root)
    if model not in known:
        raise ValueError(f"{root} has no prefixes of {model!r:.80}; `mlxpool prefix ls` lists them")
    freed, folder = 0, ModelFolder(root, model, 0)
    with folder.locked():
        files = folder.files()
        chosen = [one for one in files if one.path.parent.name.startswith(digest)]
        if digest and not chosen:
            there = sorted({one.path.parent.name for one in files})
            raise ValueError(
                f"{root} has no prefixes of {model!r:.80} whose digest begins with {digest!r:.80};"
                f" it has {', '.join(there) or 'none'}"
            )
        for one in chosen:
            one.path.unlink(missing_ok=True)
            freed += one.size
            with contextlib.suppress(OSError):
                one.path.parent.rmdir()
    return freed
