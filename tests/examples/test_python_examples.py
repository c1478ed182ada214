"""Each example in Python does what its docstring promises."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.commands import run_script_here
from support.counting_checker import expected_ids, text_of
from support.free_ports import free_port
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, Pool, until

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = """
[models.slow]
path = "builtin:counting"
counting.step_us = 5000
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), CONFIG) as running:
        yield running


def idle(pool: Pool) -> None:
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "every stream has ended")


# ---- asyncio_service -----------------------------------------------------------------------------


class Service:
    """The running example asyncio_service.py, and a connection to it."""

    def __init__(self, pool: Pool) -> None:
        script = str(EXAMPLES / "asyncio_service.py")
        command = [sys.executable, script, str(pool.run_dir), "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        port = int(line.removeprefix("listening on 127.0.0.1:"))
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.lines = self.socket.makefile("r")

    def ask(self, **line: Any) -> None:
        self.socket.sendall(json.dumps(line).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        return dict(json.loads(self.lines.readline()))

    def hear_end(self, ident: str) -> dict[str, Any]:
        """Reads up to the end of a request. Returns the last line, with the complete text."""
        text = ""
        while True:
            line = self.hear()
            if line.get("id") == ident:
                text += line.get("text", "")
                if "text" not in line:
                    return {**line, "whole": text}

    def hang_up(self) -> None:
        self.lines.close()
        self.socket.close()

    def close(self) -> None:
        self.hang_up()
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE)


@pytest.fixture
def service(pool: Pool) -> Iterator[Service]:
    with contextlib.closing(Service(pool)) as running:
        yield running


def test_the_service_interleaves_many_requests(service: Service) -> None:
    for number in range(20):
        service.ask(id=f"n{number}", model="counting", prompt="x", max_tokens=30)
    ends: dict[str, str] = {}
    tokens: dict[str, int] = {}
    while len(ends) < 20:
        line = service.hear()
        if "end" in line:
            ends[line["id"]], tokens[line["id"]] = line["end"], line["tokens"]
    assert set(ends.values()) == {"length"} and set(tokens.values()) == {30}


def test_the_service_tells_errors_apart(service: Service) -> None:
    service.ask(id="a", model="nobody", prompt="x")
    assert service.hear_end("a")["error"] == "unknown_model"
    service.ask(id="b", model="slow", prompt="x", max_tokens=100_000, seconds=0.2)
    assert service.hear_end("b")["error"] == "deadline_exceeded"
    service.ask(id="c", model="counting", prompt="x", max_tokens="many")
    assert service.hear_end("c")["error"] == "bad_request"
    service.ask(nonsense=1)
    assert service.hear()["error"] == "bad_request"
    service.socket.sendall(b"no JSON\n")
    assert service.hear()["error"] == "bad_request"


def test_the_service_cancels_one_and_not_the_other(service: Service, pool: Pool) -> None:
    service.ask(id="a", model="slow", prompt="x", max_tokens=100_000)
    service.ask(id="b", model="counting", prompt="x", max_tokens=5)
    service.ask(cancel="a")
    service.ask(cancel="nobody")
    ends: dict[str, str] = {}
    while len(ends) < 2:
        line = service.hear()
        if "end" in line:
            ends[line["id"]] = line["end"]
    assert ends == {"a": "cancelled", "b": "length"}
    idle(pool)


def test_a_disconnect_cancels_its_requests(service: Service, pool: Pool) -> None:
    service.ask(id="a", model="slow", prompt="x", max_tokens=100_000)
    assert service.hear()["text"]
    service.hang_up()
    idle(pool)


def test_the_service_ends_gracefully(service: Service) -> None:
    service.ask(id="a", model="slow", prompt="x", max_tokens=200)
    assert service.hear()["text"]
    service.process.send_signal(signal.SIGTERM)
    # The stream ended within GRACE, or was cancelled after it.
    assert service.hear_end("a")["end"] in ("length", "cancelled")
    assert service.process.wait(timeout=PATIENCE) == 0


# ---- batch_job -----------------------------------------------------------------------------------


def job(pool: Pool, folder: Path, *more: str, model: str = "counting") -> list[str]:
    files = [str(folder / "prompts.jsonl"), str(folder / "answers.jsonl")]
    script = str(EXAMPLES / "batch_job.py")
    return [sys.executable, script, model, *files, "--run-dir", str(pool.run_dir), *more]


def prompts(folder: Path, count: int, **more: Any) -> None:
    lines = [json.dumps({"prompt": f"p{n}", "max_tokens": 5, **more}) for n in range(count)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))


def answers(folder: Path) -> dict[int, dict[str, Any]]:
    lines = (folder / "answers.jsonl").read_text().splitlines()
    records = {(line := json.loads(text))["line"]: line for text in lines}
    assert len(records) == len(lines), "a line was done twice"
    return records


def check(found: dict[int, dict[str, Any]], count: int, tokens: int = 5, seed: int = 0) -> None:
    wanted = [text_of(expected_ids(f"p{n}", seed + n, tokens)) for n in range(count)]
    assert [found[n]["text"] for n in range(count)] == wanted


def test_a_batch(pool: Pool, tmp_path: Path) -> None:
    prompts(tmp_path, 40)
    command = job(pool, tmp_path, "--at-once", "7", "--seed", "5")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "40 of 40 lines, 0 failed" in done.stderr and done.stderr.count("\n") == 1
    check(answers(tmp_path), 40, seed=5)


def test_a_killed_batch_resumes(pool: Pool, tmp_path: Path) -> None:
    prompts(tmp_path, 12, max_tokens=20)
    command = job(pool, tmp_path, "--at-once", "2", model="slow")
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    file = tmp_path / "answers.jsonl"
    try:
        until(lambda: file.exists() and file.read_text().count("\n") >= 3, "three are done")
    finally:
        first.kill()
        first.wait()
    kept = file.read_text()
    with file.open("a") as out:
        out.write('{"line": 11, "te')  # an incomplete line, as after a kill
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert file.read_text().startswith(kept[: kept.rindex("\n") + 1])
    check(answers(tmp_path), 12, tokens=20)


def test_a_batch_records_failures_and_retries_them(pool: Pool, tmp_path: Path) -> None:
    lines = [{"prompt": "p0", "max_tokens": 5}, {"prompt": "p1", "max_tokens": 5, "top_p": 7}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run(job(pool, tmp_path), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "2 of 2 lines, 1 failed" in done.stderr
    assert answers(tmp_path)[1]["error"] == "bad_request"
    prompts(tmp_path, 2)
    done = subprocess.run(job(pool, tmp_path), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    check(answers(tmp_path), 2)


def test_a_line_that_is_no_prompt_is_named(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n"y"\n')
    done = subprocess.run(job(pool, tmp_path), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "prompts.jsonl:2: must be" in done.stderr


# ---- chaos_demo ----------------------------------------------------------------------------------


def test_the_completion_is_unaffected_by_killed_workers() -> None:
    pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)
    command = [sys.executable, str(EXAMPLES / "chaos_demo.py"), "--kills", "2", "--tokens", "90"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"⟨worker \d+ killed⟩", done.stderr)) == 2
    assert "90 tokens, the same as in peace" in done.stderr
    peace, fire = done.stdout[: len(done.stdout) // 2], done.stdout[len(done.stdout) // 2 :]
    assert peace == fire and len(peace) > 90


# ---- retrieval -----------------------------------------------------------------------------------

MODULE = '''
def add(a, b):
    """Return the sum."""
    return a + b


def read_settings(path):
    with open(path) as file:
        return json.load(file)


class Stack:
    def push(self, item):
        self.items.append(item)
'''


def retrieval(pool: Pool, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script_here(EXAMPLES / "retrieval.py", *arguments, "--run-dir", str(pool.run_dir))


def test_retrieval_finds_the_function_that_is_described(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def (")
    for description, name in (
        ("read the settings from a JSON file", "module.py:7 read_settings"),
        ("push an item on a stack", "module.py:13 push"),
    ):
        done = retrieval(pool, str(tmp_path), description, "--top", "1")
        assert done.stderr == "" and done.stdout.split(" ", 1)[1] == f"{name}\n"


def test_retrieval_says_what_is_wrong(pool: Pool, tmp_path: Path) -> None:
    done = retrieval(pool, str(tmp_path), "x")
    assert done.returncode == 1 and "there are no functions" in done.stderr
    (tmp_path / "module.py").write_text(MODULE)
    done = retrieval(pool, str(tmp_path), "x", "--model", "counting")
    assert done.returncode == 1 and "generates text" in done.stderr


# ---- tools and thinking --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(pool: Pool) -> Iterator[str]:
    with GatewayThread(Path(pool.run_dir)) as gateway:
        yield gateway.url


def example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script_here(EXAMPLES / name, *arguments)


def example_process(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs an example as users do."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


CALL = 'calls    get_weather {"city": "Lisbon"}\nreturns  {"temperature": 15, "sky": "sunny"}\n'
ANSWER = "answers  The weather in Lisbon: temperature 15, sky sunny.\n"


def test_tools_calls_a_function_and_says_its_result(url: str) -> None:
    done = example("tools.py", "--url", url)
    assert (done.stdout, done.stderr, done.returncode) == (CALL + ANSWER, "", 0)
    done = example("tools.py", "What is 17 plus 25?", "--url", url)
    assert done.stdout == (
        'calls    add {"a": 17, "b": 25}\nreturns  42\nanswers  17 plus 25 is 42.\n'
    )


def test_tools_with_thoughts(url: str) -> None:
    done = example("tools.py", "--think", "--url", url)
    first, second = done.stdout.split(CALL)
    assert first == (
        "thinks   The user asks for the weather in Lisbon. I call get_weather with city Lisbon.\n"
    )
    assert second == f"thinks   The tool has answered. I say what it found.\n{ANSWER}"


@pytest.mark.parametrize(
    ("question", "printed"),
    [
        (
            "What is the weather in Lisbon?",
            "calls    get_weather Weather(city='Lisbon')\n"
            'returns  {"temperature": 15, "sky": "sunny"}\n'
            "answers  The weather in Lisbon: temperature 15, sky sunny.\n",
        ),
        (
            "What is 17 plus 25?",
            "calls    add Add(a=17, b=25)\nreturns  42\nanswers  17 plus 25 is 42.\n",
        ),
    ],
)
def test_strict_tools_calls_in_one_round_and_answers_in_the_next(
    url: str, question: str, printed: str
) -> None:
    done = example("strict_tools.py", question, "--url", url)
    assert (done.stdout, done.stderr, done.returncode) == (printed, "", 0)


def test_strict_tools_never_gets_arguments_that_do_not_fit(url: str) -> None:
    """If no tool suits the question, the model still calls one, with arguments that fit it."""
    done = example("strict_tools.py", "Book a table for 4.", "--url", url)
    assert done.returncode == 0
    assert done.stdout.startswith(("calls    get_weather Weather(city='", "calls    add Add(a="))


@pytest.mark.parametrize(
    ("name", "model"),
    [("tools.py", "demo"), ("tools.py", "counting"), ("strict_tools.py", "counting")],
)
def test_tools_of_a_model_that_knows_none(url: str, name: str, model: str) -> None:
    done = example(name, "--url", url, "--model", model)
    assert done.returncode == 1
    assert f"Error code: 400 - the chat template of '{model}' knows no tools" in done.stderr


def test_strict_tools_has_its_calls_of_a_model_that_knows_none(url: str) -> None:
    done = example("strict_tools.py", "--url", url, "--model", "demo")
    assert (done.stderr, done.returncode) == ("", 0) and done.stdout.startswith("calls    ")


def test_thinking_shows_thoughts_and_answer(url: str) -> None:
    done = example("thinking.py", "--url", url)
    assert (done.stderr, done.returncode) == ("", 0)
    thoughts, answer = done.stdout.split("\n", 1)
    assert thoughts == "(The user asks what I am. I answer.)"
    assert answer.startswith("I am demo-chat, a small model that comes with mlxpool.")


@pytest.mark.parametrize("name", ["tools.py", "strict_tools.py", "thinking.py"])
def test_without_a_gateway(name: str) -> None:
    done = example_process(name, "--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1 and "no gateway answers at" in done.stderr


@pytest.mark.parametrize("name", ["tools.py", "strict_tools.py", "thinking.py"])
def test_a_model_that_is_not_there(name: str, url: str) -> None:
    done = example(name, "--url", url, "--model", "demo-cha")
    assert done.returncode == 1 and "there is no model 'demo-cha'" in done.stderr
