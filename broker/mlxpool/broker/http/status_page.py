"""The status page: its files in one, which requests `status.json` and may do nothing else.

`page/page.html` names its style sheet and its scripts; here they take the places of their tags, so
that one answer is the whole page and a policy with their hashes allows them and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

FOLDER = Path(__file__).with_name("page")
STYLE = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">')
SCRIPT = re.compile(r'<script src="(\w+\.js)"></script>')


def assembled(folder: Path) -> bytes:
    """The page with its style sheet and its scripts in it."""
    page = (folder / "page.html").read_text("utf-8")
    page = STYLE.sub(lambda found: f"<style>{_text(folder / found[1])}</style>", page)
    page = SCRIPT.sub(lambda found: f"<script>{_text(folder / found[1])}</script>", page)
    return page.encode()


def _text(file: Path) -> str:
    """The text of a file. Raises ValueError where it would end its element."""
    text = file.read_text("utf-8")
    if "</s" in text.lower():
        raise ValueError(f"{file.name} has '</s', which would end its element in the page")
    return f"\n{text}"


def content_security_policy(page: bytes) -> str:
    """The Content-Security-Policy that allows only the page's own scripts and style."""
    scripts, styles = (" ".join(_hashes(page, tag)) for tag in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: bytes, tag: bytes) -> list[str]:
    """Of each element with this tag, as browsers compute it."""
    texts = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    digests = (hashlib.sha256(text).digest() for text in texts)
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]


PAGE = assembled(FOLDER)
POLICY = content_security_policy(PAGE)
