"""Files that only their owner may read: keys of HTTP clients, tokens, secrets."""

from __future__ import annotations

from pathlib import Path


def secret_file(path: Path, text: str) -> Path:
    """Write a file that other users can read at no moment."""
    path.touch(0o600)
    path.write_text(text)
    return path
