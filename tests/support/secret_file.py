"""Files that only their owner may read: keys of HTTP clients, tokens, secrets."""

from __future__ import annotations

from pathlib import Path


def secret_file(path: Path, text: str) -> Path:
    """Writes a file that other users cannot read at any moment; returns its path."""
    path.touch(0o600)
    path.write_text(text)
    return path
