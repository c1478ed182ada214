"""The status page: one file that requests nothing but `status.json`, and may do nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_bytes()


def content_security_policy(page: bytes) -> str:
    """The Content-Security-Policy that allows only the page's own script and style."""
    script, style = (_hash(page, tag) for tag in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(page: bytes, tag: bytes) -> str:
    """Of the one element with this tag, as browsers compute it."""
    (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


POLICY = content_security_policy(PAGE)
