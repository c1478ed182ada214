"""Print a chat's answer over HTTP as it is generated, even if the gateway is killed meanwhile.

    python examples/resume_stream.py MODEL "A question" [--url http://127.0.0.1:11434]

The request has its own key (Idempotency-Key). If the connection ends before the answer, the same
request is sent again with the id of the last event (Last-Event-ID). The gateway then continues
after that event. Needs a pool that keeps jobs (the default).
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

PAUSE = 0.2  # seconds before the request is sent again
LATER = (429, 502, 503)  # statuses of a gateway that may take the request later


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the events of an answer; none is repeated or left out."""
    headers = {"content-type": "application/json", "idempotency-key": str(uuid.uuid4())}
    while True:
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as answer:
                event: dict[str, str] = {}
                for line in answer:
                    name, _, value = line.decode().rstrip("\n").partition(": ")
                    if name:
                        event[name] = value
                        continue
                    if "id" in event:  # the event is complete, and part of the answer
                        headers["last-event-id"] = event["id"]
                        if event["data"] == "[DONE]":
                            return
                        yield json.loads(event["data"])
                    event = {}
        except urllib.error.HTTPError as error:
            if error.code not in LATER:
                raise
        except (OSError, http.client.HTTPException):  # the connection has ended
            pass
        time.sleep(PAUSE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print an answer that outlives the gateway.")
    parser.add_argument("model")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:11434", help="the gateway's")
    parser.add_argument("--max-tokens", type=int, default=200)
    options = parser.parse_args()
    messages = [{"role": "user", "content": options.question}]
    body = {"model": options.model, "messages": messages, "max_tokens": options.max_tokens}
    for event in events(f"{options.url}/v1/chat/completions", {**body, "stream": True}):
        for choice in event.get("choices", ()):
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
