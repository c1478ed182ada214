"""Let a model call Python functions, through the gateway with OpenAI's client.

    python examples/tools.py "What is the weather in Lisbon?" [--url http://127.0.0.1:11434]

The model gets the question and the list of tools and answers with a call. The program runs the
function and sends the result back, and the model answers with it in a sentence. The built-in
`demo-chat` does this; `--think` shows its thoughts, too. Needs `pip install openai`.

Exit code 0: an answer; 1: no gateway answers, or the pool failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import openai

ROUNDS = 5  # most rounds of calls, so that a model that never answers is stopped
HOURS = {"London": 0, "Lisbon": 0, "Paris": 1, "Cairo": 2, "Tokyo": 9}  # from UTC, in winter
SKIES = ("sunny", "cloudy", "rainy")


def get_weather(city: str) -> dict[str, Any]:
    """Returns an invented weather, the same each time."""
    number = sum(city.encode())
    return {"temperature": number % 30, "sky": SKIES[number % 3]}


def get_time(city: str) -> str | dict[str, str]:
    """Returns the time in one of a few cities."""
    if city not in HOURS:
        return {"error": f"unknown city {city}"}
    return f"{datetime.now(UTC) + timedelta(hours=HOURS[city]):%H:%M}"


def add(a: float, b: float) -> float:
    """Returns the sum."""
    return a + b


FUNCTIONS: dict[str, Callable[..., Any]] = {"get_weather": get_weather, "get_time": get_time}
FUNCTIONS["add"] = add


def tool(name: str, description: str, **parameters: str) -> Any:
    """Returns a tool in OpenAI's form.

    `parameters`: the JSON type of each parameter; all parameters are required.
    """
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_weather", "Get the current weather of a city.", city="string"),
    tool("get_time", "Get the local time of a city.", city="string"),
    tool("add", "Adds two numbers.", a="number", b="number"),
]


def result_of(name: str, arguments: str) -> str:
    """Returns a function's result as text for the model; an error of a call is a result as well."""
    try:
        value = FUNCTIONS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        value = {"error": f"{type(error).__name__}: {error}"}
    return value if isinstance(value, str) else json.dumps(value)


def ask(client: openai.OpenAI, model: str, question: str, think: bool) -> str:
    """Returns the model's answer, after the calls that it asks for; prints each step."""
    messages: list[Any] = [{"role": "user", "content": question}]
    options: dict[str, Any] = {"reasoning_effort": "low"} if think else {}
    for _ in range(ROUNDS):
        completion = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, temperature=0, **options
        )
        message = completion.choices[0].message
        thought = getattr(message, "reasoning_content", None)
        if thought:
            print(f"thinks   {thought.strip()}")
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            result = result_of(call.function.name, call.function.arguments)
            print(f"calls    {call.function.name} {call.function.arguments}")
            print(f"returns  {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise SystemExit(f"no answer after {ROUNDS} rounds of calls")


def main() -> int:
    parser = argparse.ArgumentParser(description="Let a model call Python functions.")
    parser.add_argument("question", nargs="?", default="What is the weather in Lisbon?")
    parser.add_argument("--url", default="http://127.0.0.1:11434", help="the gateway's")
    parser.add_argument("--model", default="demo-chat")
    parser.add_argument("--think", action="store_true", help="let the model think first")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key="none")
    try:
        with client:
            print(f"answers  {ask(client, options.model, options.question, options.think)}")
    except openai.APIConnectionError:
        print(f"no gateway answers at {options.url}: mlxpool gateway", file=sys.stderr)
        return 1
    except openai.APIError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
