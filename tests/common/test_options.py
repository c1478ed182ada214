"""Sampling options: names, types, bounds, and their form in messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from mlxpool.common import options as module
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import (
    ALIASES,
    CHECKS,
    REQUEST_KEYS,
    GenerateOptions,
    Options,
)

INTEGERS = {
    "max_tokens": (-(2**31), 2**31 - 1),
    "top_k": (0, 2**31 - 1),
    "repeat_last_n": (-1, 2**31 - 1),
    "seed": (-1, 2**64 - 1),
    "top_logprobs": (0, 20),
    "num_keep": (-1, 2**31 - 1),
    "num_ctx": (0, 2**31 - 1),
    "prompt_logprobs": (-1, 20),
    "thinking_budget": (-1, 2**31 - 1),
}
NUMBERS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
}
FLAGS = (
    "logprobs",
    "ignore_eos",
    "truncate",
    "shift",
    "echo",
    "continue_message",
    "plain_contents",
)


def refused(**raw: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        Options.parse(raw)
    return caught.value.message


def test_every_option_has_a_check_and_is_tested_here() -> None:
    assert {f.name for f in fields(Options)} == set(CHECKS)
    elsewhere = {"format"}  # tested in test_answer_format.py
    texts = {"logit_bias", "stop", "suffix"}
    assert {*INTEGERS, *NUMBERS, *FLAGS, *elsewhere, *texts} == set(CHECKS)


def test_the_keywords_of_the_client_are_the_options_and_the_keys_of_a_request() -> None:
    assert set(GenerateOptions.__annotations__) == {*CHECKS, *ALIASES, *REQUEST_KEYS}
    assert not GenerateOptions.__required_keys__
    elsewhere = {"echo", "prompt_logprobs"}  # flags of `run`, not of `chat`
    elsewhere |= {"continue_message", "plain_contents", "suffix"}  # for prompts without a flag
    maps = {"logit_bias", "format"}  # maps cannot be flags
    assert set(module.FLAGS) == set(CHECKS) - maps - elsewhere


def test_nothing_is_the_defaults() -> None:
    assert Options.parse({}) == Options()
    assert Options.parse(dict.fromkeys(CHECKS)) == Options(), "None is: not given"


@pytest.mark.parametrize(("name", "bounds"), [*INTEGERS.items(), *NUMBERS.items()])
def test_bounds(name: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    step = 1 if name in INTEGERS else 0.001
    assert getattr(Options.parse({name: low}), name) == low
    assert getattr(Options.parse({name: high}), name) == high
    for beyond in (low - step, high + step):
        assert f"option '{name}' is {beyond}" in refused(**{name: beyond})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, "1", True, [1], b"1"])
def test_what_is_no_integer(name: str, value: Any) -> None:
    assert f"option '{name}' must be an integer" in refused(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["1", False, [0.5], {}])
def test_what_is_no_number(name: str, value: Any) -> None:
    assert f"option '{name}' must be a number" in refused(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_endless_or_none(name: str, value: float) -> None:
    assert f"option '{name}'" in refused(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true"])
def test_what_is_no_flag(name: str, value: Any) -> None:
    assert f"option '{name}' must be true or false" in refused(**{name: value})
    assert getattr(Options.parse({name: True}), name) is True


def test_a_suffix_is_a_text_of_bounded_size() -> None:
    assert Options.parse({"suffix": "x" * 2**18}).suffix == "x" * 2**18
    assert "has 262145 bytes, at most 262144" in refused(suffix="x" * (2**18 + 1))
    assert "must be text" in refused(suffix=1)


def test_a_number_may_be_written_as_an_integer() -> None:
    assert isinstance(Options.parse({"temperature": 1}).temperature, float)


def test_num_predict_is_max_tokens() -> None:
    assert Options.parse({"num_predict": 7}).max_tokens == 7
    assert "'num_predict'" in refused(num_predict="x")


@pytest.mark.parametrize("tokens", [3, 0, -1, -2])
def test_max_tokens_wins_over_num_predict_in_any_order(tokens: int) -> None:
    assert Options.parse({"max_tokens": tokens, "num_predict": 7}).max_tokens == tokens
    assert Options.parse({"num_predict": 7, "max_tokens": tokens}).max_tokens == tokens


def test_num_predict_counts_where_max_tokens_is_not_set_and_is_checked_in_any_case() -> None:
    assert Options.parse({"num_predict": 7, "max_tokens": None}).max_tokens == 7
    assert "'num_predict'" in refused(max_tokens=3, num_predict="x")


@pytest.mark.parametrize(
    ("name", "near"),
    [("temprature", "temperature"), ("topk", "top_k"), ("num_predct", "num_predict")],
)
def test_an_unknown_option_is_told_the_nearest(name: str, near: str) -> None:
    assert f"did you mean '{near}'?" in refused(**{name: 1})


def test_an_option_like_no_other_is_told_all() -> None:
    message = refused(zzz=1)
    assert all(name in message for name in CHECKS)


def test_names_of_any_type_are_unknown() -> None:
    for name in (1, b"seed", None):
        with pytest.raises(BadRequest, match="unknown option"):
            Options.parse({name: 1})  # type: ignore[dict-item]


# ---- stop ----------------------------------------------------------------------------------------


def test_stop_is_a_string_or_a_list() -> None:
    assert Options.parse({"stop": "a"}).stop == ("a",)
    assert Options.parse({"stop": ["a", "b"]}).stop == ("a", "b")
    assert Options.parse({"stop": []}).stop == ()


@pytest.mark.parametrize("value", [1, [1], ["a", None], {"a": 1}, b"a"])
def test_what_is_no_stop(value: Any) -> None:
    assert "'stop' must be a string or a list" in refused(stop=value)


def test_bounds_of_stop() -> None:
    most = module.MAX_STOP_BYTES
    assert Options.parse({"stop": "é" * (most // 2)}).stop
    assert "0 bytes" in refused(stop="")
    assert f"{most + 2} bytes" in refused(stop="é" * (most // 2 + 1))
    assert len(Options.parse({"stop": ["x"] * module.MAX_STOPS}).stop) == module.MAX_STOPS
    assert f"{module.MAX_STOPS + 1} strings" in refused(stop=["x"] * (module.MAX_STOPS + 1))


# ---- logit_bias ----------------------------------------------------------------------------------


def test_biases_by_text_or_number() -> None:
    assert Options.parse({"logit_bias": {"5": 1, 7: -2.5}}).logit_bias == {5: 1.0, 7: -2.5}


@pytest.mark.parametrize(
    "key", ["", "a", "-1", "1.5", "²", " 1", str(2**31), "1" * 5000, -1, 1.5, None, True, b"5"]
)
def test_what_is_no_token(key: Any) -> None:
    message = refused(logit_bias={key: 1.0})
    assert "no token id" in message
    assert len(message) < 200


@pytest.mark.parametrize("value", ["1", None, True, math.nan, 101, -101])
def test_what_is_no_bias(value: Any) -> None:
    assert "logit_bias[5]" in refused(logit_bias={"5": value})


def test_bounds_of_biases() -> None:
    most = module.MAX_BIASES
    assert len(Options.parse({"logit_bias": {str(n): 0 for n in range(most)}}).logit_bias) == most
    assert f"{most + 1} entries" in refused(logit_bias={str(n): 0 for n in range(most + 1)})
    assert "must be a map" in refused(logit_bias=[[1, 2]])


def test_a_long_value_is_shown_in_short() -> None:
    assert len(refused(seed="x" * 10_000)) < 200
    assert len(refused(seed=10**4000)) < 200


@pytest.mark.parametrize(
    "value", [10**400, -(10**4400), float("nan"), float("inf")], ids=["400", "4400", "nan", "inf"]
)
def test_a_number_out_of_range_is_refused(value: float) -> None:
    assert "must be from 0 to 100" in refused(temperature=value)
    assert "must be from -100 to 100" in refused(logit_bias={"1": value})


@pytest.mark.parametrize(
    ("raw", "alternatives", "reports"),
    [
        ({}, -1, False),
        ({"logprobs": True, "top_logprobs": 3}, -1, False),
        ({"echo": True}, -1, True),
        ({"echo": True, "top_logprobs": 3}, -1, True),
        ({"echo": True, "logprobs": True, "top_logprobs": 3}, 3, True),
        ({"echo": True, "logprobs": True, "prompt_logprobs": -1}, -1, True),
        ({"echo": True, "logprobs": True, "prompt_logprobs": 0}, 0, True),
        ({"prompt_logprobs": 5}, 5, True),
        ({"prompt_logprobs": -1}, -1, False),
    ],
)
def test_what_is_reported_of_a_prompt(
    raw: dict[str, Any], alternatives: int, reports: bool
) -> None:
    options = Options.parse(raw)
    assert (options.prompt_alternatives, options.reports_prompt) == (alternatives, reports)
    assert not options.prompt_only
    assert Options.parse({**raw, "max_tokens": 0}).prompt_only == reports


# ---- round trips ---------------------------------------------------------------------------------

given_options = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.integers(low, high) for name, (low, high) in INTEGERS.items()},
        **{name: st.floats(low, high) for name, (low, high) in NUMBERS.items()},
        **{name: st.booleans() for name in FLAGS},
        "stop": st.lists(st.text(min_size=1, max_size=5), max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    },
)


@given(given_options)
def test_to_the_wire_and_back(raw: dict[str, Any]) -> None:
    options = Options.parse(raw)
    assert Options.parse(options.to_wire()) == options
    for name, value in raw.items():
        assert getattr(options, name) == (tuple(value) if name == "stop" else value)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*CHECKS, "num_predict"]), junk, max_size=3))
def test_junk_is_a_bad_request_at_worst(raw: dict[str, Any]) -> None:
    try:
        Options.parse(raw)
    except BadRequest:
        pass


def test_keys_of_the_request_are_told_from_options() -> None:
    with pytest.raises(BadRequest, match="did you mean 'deadline_ms'"):
        Options.parse({"deadline": 1})
    with pytest.raises(BadRequest, match="'deadline_ms'; it is a key of the request, beside"):
        Options.parse({"deadline_ms": 1})
    with pytest.raises(BadRequest, match="beside options: deadline_ms, queue_ms"):
        Options.parse({"quux_zyx": 1})
