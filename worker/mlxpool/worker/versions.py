"""The version of the rules in our own code that decide which tokens a request gives. No MLX."""

from __future__ import annotations

import hashlib

RULES = 1  # raised whenever the same logits, options and seed give another token


def digest_of(folder: str, kv: str = "auto") -> str:
    """Returns the digest of a model folder combined with RULES; a resume compares it.

    `kv`: what its rows store (the setting of this name), since rounded keys give other tokens.
    """
    stored = "" if kv == "auto" else f":kv={kv}"
    return hashlib.sha256(f"{RULES}:{folder}{stored}".encode()).hexdigest()
