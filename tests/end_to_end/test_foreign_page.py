"""A page of another origin in a real browser changes nothing in a pool without keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from support.chromium import Chromium
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, Pool, until

CONFIG = """
[pool]
state_dir = "{state}"
[models.slow]
path = "builtin:counting"
counting.step_us = 200000
"""
# All ways in which a page sends a request without asking the server for consent first.
PAGE = """<html><body><iframe name="answer"></iframe>
<form method="post" target="answer" action="{url}/v1/jobs/form/cancel"></form>
<iframe sandbox="allow-scripts allow-forms" srcdoc='<form method="post"
 action="{url}/v1/jobs/sandbox/cancel"></form><script>document.forms[0].submit()</script>'></iframe>
<script>
document.forms[0].submit();
navigator.sendBeacon("{url}/v1/jobs/beacon/cancel", "x");
const form = new FormData();
form.append("purpose", "batch");
form.append("file", new Blob(["{{}}\\n"]), "x.jsonl");
const send = (path, more) =>
  fetch("{url}" + path, {{method: "POST", mode: "no-cors", ...more}}).catch(() => 0);
Promise.all([
  send("/v1/jobs/fetch/cancel", {{referrerPolicy: "no-referrer"}}),
  send("/v1/files", {{body: form}}),
  send("/api/generate", {{body: '{{"model": "slow", "keep_alive": 0}}'}}),
]).then(() => document.title = "sent");
</script></body></html>"""
JOBS = ("form", "sandbox", "beacon", "fetch")


@contextmanager
def site(page: str) -> Iterator[str]:
    """The URL of another server, which has only this page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_page_of_another_origin_changes_nothing(tmp_path: Path) -> None:
    config = CONFIG.format(state=tmp_path / "jobs")
    with (
        Chromium() as browser,
        Pool(tmp_path, config) as pool,
        GatewayThread(pool.run_dir) as gateway,
        httpx.Client(base_url=gateway.url, timeout=PATIENCE) as http,
        site(PAGE.format(url=gateway.url)) as foreign,
    ):
        for key in JOBS:
            job = {"model": "slow", "prompt": "x", "key": key, "options": {"max_tokens": 10_000}}
            assert http.post("/v1/jobs", json=job).status_code == 200
        browser.open(foreign)
        until(lambda: browser.driver.title == "sent", "the page has sent its requests")

        def refused() -> int:
            """Returns the number of requests that were answered 403."""
            lines = [
                line for line in http.get("/metrics").text.splitlines() if 'status="403"' in line
            ]
            return sum(round(float(line.split()[-1])) for line in lines if "requests_total" in line)

        until(lambda: refused() == len(JOBS) + 2, "each of them is refused")
        states = {row["key"]: row["state"] for row in http.get("/v1/jobs").json()["data"]}
        assert states.keys() == set(JOBS) and not {"cancelled", "done"} & set(states.values())
        assert http.get("/v1/files").json()["data"] == []
