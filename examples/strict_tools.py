"""Make a model call a tool with arguments that fit its schema, through the gateway.

    python examples/strict_tools.py "What is the weather in Lisbon?" [--url http://127.0.0.1:11434]

Two rounds with OpenAI's client. In round one the tools are `strict` and a call is required: the
answer is constrained to a call, so its arguments always fit the classes below, for any question. In
round two no tool may be called, and the model answers with the result in a sentence. The built-in
`demo-chat` does this. The choice of the right tool and the right arguments is up to the model.
Needs `pip install openai`.

Exit code 0: an answer; 1: no gateway answers, or the pool failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel, ConfigDict, Field

SKIES = ("sunny", "cloudy", "rainy")


class Weather(BaseModel):
    """Get the current weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Cairo", "Lisbon", "London", "Paris", "Tokyo"]

    def result(self) -> dict[str, Any]:
        """Returns an invented weather, the same each time."""
        number = sum(self.city.encode())
        return {"temperature": number % 30, "sky": SKIES[number % 3]}


class Add(BaseModel):
    """Adds two numbers."""

    model_config = ConfigDict(extra="forbid")
    a: int = Field(ge=0, le=999)
    b: int = Field(ge=0, le=999)

    def result(self) -> int:
        """The sum."""
        return self.a + self.b


TOOLS = [
    openai.pydantic_function_tool(Weather, name="get_weather"),
    openai.pydantic_function_tool(Add, name="add"),
]


def ask(client: openai.OpenAI, model: str, question: str) -> str:
    """Returns the model's answer, with the result of one call; prints each step."""
    messages: list[Any] = [{"role": "user", "content": question}]
    first = client.chat.completions.parse(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", temperature=0
    )
    message = first.choices[0].message
    assert message.tool_calls, "with `required` an answer is a call"
    call = message.tool_calls[0]
    arguments = call.function.parsed_arguments  # an object of one of the classes above
    assert isinstance(arguments, Weather | Add)
    result = arguments.result()
    print(f"calls    {call.function.name} {arguments!r}")
    print(f"returns  {json.dumps(result)}")
    messages += [
        message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)},
    ]
    second = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", temperature=0
    )
    return second.choices[0].message.content or ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Have a model call a strict tool.")
    parser.add_argument("question", nargs="?", default="What is the weather in Lisbon?")
    parser.add_argument("--url", default="http://127.0.0.1:11434", help="the gateway's")
    parser.add_argument("--model", default="demo-chat")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key="none")
    try:
        with client:
            print(f"answers  {ask(client, options.model, options.question)}")
    except openai.APIConnectionError:
        print(f"no gateway answers at {options.url}: mlxpool gateway", file=sys.stderr)
        return 1
    except openai.APIError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
