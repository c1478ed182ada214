"""Recognises files with wrong contents by their first bytes. Pure.

Downloads leave such files: a Git LFS pointer, a web page, an empty file, zeros.
"""

from __future__ import annotations

import re

HEAD_BYTES = 512  # first bytes of a file that are examined
DOWNLOAD = "download it again"
POINTERS = (b"version https://git-lfs.github.com/", b"version https://hawser", b"# xet version")
# The whole content of a short file: a hub's answer that refuses the file.
REFUSAL = re.compile(
    rb"\s*(?:\d{3}:? )?(?:entry not found|not found|repository not found|unauthorized|forbidden"
    rb"|access (?:to|denied)\b.*|invalid (?:credentials|username or password).*|bad gateway"
    rb"|too many requests|internal server error|service unavailable|gateway time-?out)[.!]?\s*",
    re.IGNORECASE | re.DOTALL,
)
# Further whole contents of a short file: a symbolic link as text (from git, or copies without
# links), the pointer of git-annex or DVC, and an error in JSON.
LINK = re.compile(rb"(?:(?:\.\./)+(?:\.git/annex/objects|blobs)|/annex/objects)/\S+\s*")
DVC = re.compile(rb"(?:outs:\s*\n)?- md5: [0-9a-f]{32}\b.*", re.DOTALL)
JSON_ERROR = re.compile(rb'\s*\{\s*"(?:errors?|message|detail)"\s*:.*', re.DOTALL)
PAGE = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html|head|\?xml|error\b)", re.IGNORECASE
)
OTHERS = (
    (b"GGUF", "a GGUF file"),
    (b"PK\x03\x04", "a ZIP archive, as PyTorch writes"),
    (b"\x80\x02", "a pickle of Python, as PyTorch writes"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
)


def fault_of(head: bytes, size: int) -> str:
    """Describes the real content of a file of `size` bytes, and the remedy; "" if not recognised.

    `head`: the first HEAD_BYTES bytes of the file.
    """
    if not size:
        return f"is empty: {DOWNLOAD}"
    if head.startswith(POINTERS):
        return (
            "is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder, or"
            f" {DOWNLOAD}"
        )
    if PAGE.match(head):
        return f"is a web page, as a server sends for a login or an error: {DOWNLOAD}"
    if size <= HEAD_BYTES and REFUSAL.fullmatch(head):
        return f"holds a server's refusal, {head.decode(errors='replace').strip()!r}: {DOWNLOAD}"
    if size <= HEAD_BYTES and JSON_ERROR.fullmatch(head):
        return f"holds a server's error, {head.decode(errors='replace').strip():.100}: {DOWNLOAD}"
    if size <= HEAD_BYTES and (LINK.fullmatch(head) or DVC.fullmatch(head)):
        return (
            "holds the path of the file, not the file itself, as a copy without links or a store of"
            f" large files leaves: copy it with the files that links lead to, or {DOWNLOAD}"
        )
    if size >= 8 and not any(head):
        return f"begins with zeros, as a download that was not completed: {DOWNLOAD}"
    kind = next((kind for magic, kind in OTHERS if head.startswith(magic)), "")
    return f"is {kind} under another name" if kind else ""
