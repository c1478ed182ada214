"""Show a model's thoughts apart from its answer, through the gateway with Ollama's client.

    python examples/thinking.py "Who are you?" [--url http://127.0.0.1:11434]

The answer is streamed: thoughts first, in parentheses, then the answer. The built-in `demo-chat`
thinks if it is asked to. Needs `pip install ollama`.

Exit code 0: an answer; 1: no gateway answers, or the pool failed.
"""

from __future__ import annotations

import argparse
import sys

import httpx
import ollama


def show(client: ollama.Client, model: str, question: str) -> None:
    """Prints the thoughts and the answer as they come."""
    messages = [{"role": "user", "content": question}]
    thinks = False
    for part in client.chat(model, messages, think=True, stream=True, options={"temperature": 0}):
        if part.message.thinking:
            print("" if thinks else "(", part.message.thinking, sep="", end="", flush=True)
            thinks = True
        if part.message.content:
            print(")\n" if thinks else "", part.message.content, sep="", end="", flush=True)
            thinks = False
    print(")" if thinks else "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Show a model's thoughts and its answer.")
    parser.add_argument("question", nargs="?", default="Who are you?")
    parser.add_argument("--url", default="http://127.0.0.1:11434", help="the gateway's")
    parser.add_argument("--model", default="demo-chat")
    options = parser.parse_args()
    try:
        with ollama.Client(host=options.url) as client:
            show(client, options.model, options.question)
    except (ConnectionError, httpx.ConnectError):  # raised by a single answer, by a stream
        print(f"no gateway answers at {options.url}: mlxpool gateway", file=sys.stderr)
        return 1
    except ollama.ResponseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
