"""The versions of this project's rules that determine the tokens of an answer. No MLX."""

from __future__ import annotations

import hashlib

RULES = 1  # incremented whenever the same logits, options and seed give another token
# Incremented whenever our layers or kernels cache other keys, values or states of the same tokens:
# then older entries in the disk tier of the prefix cache are not read.
KEPT_RULES = 1


def digest_of(folder: str, kv: str = "auto") -> str:
    """Returns a digest of a model folder's digest, of RULES and of `kv`.

    A resume compares this digest, because other weights or rules give other tokens. `kv`: the
    setting for the format of cached keys and values; rounded keys give other tokens, too.
    """
    stored = "" if kv == "auto" else f":kv={kv}"
    return hashlib.sha256(f"{RULES}:{folder}{stored}".encode()).hexdigest()


def version_of(package: str) -> str:
    """Returns the version of a package; "" if it is imported without being installed."""
    # The start of a worker does not need this import.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
