"""The version of this package; pyproject.toml reads it here."""

from __future__ import annotations

VERSION = "0.1.0"
