"""A hub of models on loopback: the part of huggingface.co's HTTP that downloads use, with faults.

Requests for large files (safetensors, GGUF) are redirected to another host name, as the real hub
redirects them to a store; requests for small files are answered directly.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")
COMMIT = "1123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a-token-of-these-tests"
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_STORED = re.compile(r"/stored/([^/]+/[^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-")


@dataclass(slots=True)
class Repository:
    """The files of a repository by name, and the faults of their downloads.

    `cuts` maps a file to the number of bytes after which the connection ends, once. `sent` maps a
    file to bytes that are sent in place of its contents. `status` is the HTTP status for each file.
    If `gated` is True, only requests with TOKEN may read the repository.
    """

    files: Mapping[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    status: int = 200
    cuts: dict[str, int] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)

    def entries(self) -> list[dict[str, Any]]:
        """Returns the list of files in the form of the hub's API."""
        return [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": git_hash(content),
                **({"lfs": _lfs(content)} if name.endswith(LARGE) else {}),
            }
            for name, content in self.files.items()
        ]


def folder_of(path: Path) -> dict[str, bytes]:
    """Returns the files of a model's folder."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


def git_hash(content: bytes) -> str:
    """Returns git's object name of a file's contents."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _lfs(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}


class ModelHub(ThreadingHTTPServer):
    """The HTTP server of the hub.

    `repositories` maps ORG/NAME to files. `asked` has each request: method, path, Range,
    Authorization. `held` maps a file to an event; the server sends the contents after the event is
    set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.status = 200  # the status of every answer
        self.held: dict[str, threading.Event] = {}
        self.asked: list[tuple[str, str, str, str]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect during an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def gets(self, file: str) -> list[str]:
        """Returns the Range of each GET for the contents of a file; "" for the whole file."""
        return [
            part
            for method, path, part, _ in self.asked
            if method == "GET" and path.endswith(f"/{file}")
        ]


@contextmanager
def running_hub() -> Iterator[ModelHub]:
    """Runs a hub until the end of the block."""
    with ModelHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelHub

    def log_message(self, *words: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        part, key = (self.headers.get(name, "") for name in ("Range", "Authorization"))
        self.server.asked.append((self.command, path, part, key))
        if self.server.status != 200:
            self._fail(self.server.status, "", "the hub is under repair")
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"))
        elif (match := _RESOLVE.fullmatch(path)) is not None:
            self._resolve(*match.groups())
        elif (match := _STORED.fullmatch(path)) is not None:
            self._send_file(self.server.repositories[match[1]], match[2], {})
        else:
            self._fail(404, "", "Sorry, we can't find the page you are looking for.")

    def _repository(self, name: str) -> Repository | None:
        """Returns a repository.

        If it is missing or not readable, answers with an error and returns None.
        """
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        repository = self.server.repositories.get(name)
        if key not in ("", TOKEN, "hf_of-another-account"):
            self._fail(401, "", "Invalid credentials in Authorization header")
        elif repository is None:
            self._fail(404 if key else 401, "RepoNotFound", "Repository not found")
        elif repository.gated and key != TOKEN:
            self._fail(403 if key else 401, "GatedRepo", f"Access to model {name} is restricted.")
        else:
            return repository
        return None

    def _describe(self, name: str) -> None:
        # The real hub describes a gated repository to all users, and protects only its files.
        repository = self.server.repositories.get(name)
        if repository is None and self._repository(name) is None:
            return
        assert repository is not None
        about = {
            "id": name,
            "sha": repository.commit,
            "siblings": repository.entries(),
            "private": False,
        }
        self._send(200, {"Content-Type": "application/json"}, json.dumps(about).encode())

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if repository.status != 200:
            self._fail(repository.status, "", "the store is under repair")
        elif revision not in ("main", repository.commit):
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif file not in repository.files:
            self._fail(404, "EntryNotFound", "Entry not found")
        elif file.endswith(LARGE):
            about = _lfs(repository.files[file])
            headers = {
                "X-Repo-Commit": repository.commit,
                "X-Linked-Etag": f'"{about["sha256"]}"',
                "X-Linked-Size": str(about["size"]),
                "Location": f"http://localhost:{self.server.server_port}/stored/{name}/{file}",
            }
            self._send(302, headers, b"")
        else:
            etag = f'"{git_hash(repository.files[file])}"'
            self._send_file(repository, file, {"X-Repo-Commit": repository.commit, "ETag": etag})

    def _send_file(self, found: Repository, file: str, headers: dict[str, str]) -> None:
        content = found.sent.get(file, found.files[file])
        requested = _RANGE.match(self.headers.get("Range", ""))
        begin = int(requested[1]) if requested else 0
        if requested:
            about = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            headers = {**headers, "Content-Range": about}
        if self.command == "GET" and file in self.server.held:
            self.server.held[file].wait()
        cut = found.cuts.pop(file, None) if self.command == "GET" else None
        self._send(206 if requested else 200, headers, content[begin:], cut)

    def _fail(self, status: int, code: str, words: str) -> None:
        headers = {"X-Error-Code": code} if code else {}
        body = json.dumps({"error": words}).encode()
        self._send(status, {**headers, "X-Error-Message": words}, body)

    def _send(
        self, status: int, headers: Mapping[str, str], body: bytes, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
