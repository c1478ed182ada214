"""Tests `check`, which reports a model's properties, memory and problems in one run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.cli.commands.check import lines
from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.records import as_map
from mlxpool.worker import versions
from mlxpool.worker.compute.model_source import open_source
from mlxpool.worker.diagnose.check import check, memory_problems
from mlxpool.worker.engine import description
from mlxpool.worker.layers.quantisation import QuantLayout
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling import memory_estimate
from mlxpool.worker.scheduling.memory_estimate import MemoryEstimate
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from mlxpool.worker.weights.locate import DEMO_FOLDER
from support import seeing_models as seeing
from support.draft_models import write_draft
from support.worker_checkpoints import EOS, config, random_weights, write_checkpoint, write_json
from support.worker_stores import Store, put_in_hub

MODEL = {
    "type", "size", "parameters", "layers", "context", "vocabulary", "quantisation", "tokenizer",
    "templates", "chat", "eos_ids", "digest", "features", "details",
}  # fmt: skip
MAX_RENDERER_MEMORY = {
    "context", "sequences", "weights", "token", "fixed", "sequence", "all_sequences",
    "prefix_cache", "prefix_disk", "least", "kv",
}  # fmt: skip
MACHINE = {"device", "total", "free", "limit", "pool_limit", "longest", "fits", "why"}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "good")


def of(path: Path, **settings: Any) -> dict[str, Any]:
    return check("m", ModelConfig(path=str(path), **settings))


def problems(path: Path) -> list[str]:
    """Returns all problems. The first is always the error of a worker."""
    messages = of(path)["problems"]
    with pytest.raises(ModelLoadFailed) as caught:
        inspect(path)
    assert messages[0] == str(caught.value)
    return list(messages)


def refused_with(folder: Path) -> str:
    """Returns the message of the error with which a worker refuses a folder."""
    with pytest.raises(ModelLoadFailed) as caught:
        open_source(ModelConfig(path=str(folder)))
    return str(caught.value)


def change(file: Path, **changes: Any) -> None:
    settings = {**json.loads(file.read_text()), **changes}
    write_json(file, {key: value for key, value in settings.items() if value is not None})


def test_an_unsupported_setting(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, model_type="mistral", sliding_window=9)
    spec = ModelConfig(path=str(path), deterministic=True)
    (words,) = check("m", spec)["problems"]
    assert "'mistral', whose layers keep windows or states" in words
    with pytest.raises(ModelLoadFailed) as caught:
        open_source(spec)
    assert str(caught.value) == words
    assert check("m", replace(spec, deterministic=False))["problems"] == []


@pytest.mark.parametrize(
    ("visible", "settings", "words"),
    [
        ("0,1", {"gpu_ids": ("2",)}, ["gpu_ids has 2", "may use are 0, 1"]),
        ("", {"gpu_ids": ("0",)}, ["gpu_ids is 0", "there is no GPU"]),
        ("0,1,2", {"devices": 4}, ["devices is 4", "there are 3", "at most 3"]),
    ],
)
def test_gpus_that_this_machine_does_not_have(
    monkeypatch: pytest.MonkeyPatch, visible: str, settings: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    spec = ModelConfig(path="builtin:counting", **settings)
    report = check("m", spec, machine=True)
    (why,) = report["machine"]["why"]
    assert not report["machine"]["fits"] and all(word in why for word in words), why
    assert list(lines(report))[-2:] == ["it cannot run on this machine:", f"  - {why}"]
    assert "machine" not in check("m", spec), "what is wrong here may be right elsewhere"


def test_gpus_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    spec = ModelConfig(path="builtin:counting", gpu_ids=("1",))
    assert "machine" not in check("m", spec, machine=True)


# ---- what it is ----------------------------------------------------------------------------------


def test_the_description_of_a_valid_model(good: Path) -> None:
    report = of(good)
    weights = random_weights(config())
    assert (report["name"], report["path"], report["problems"]) == ("m", str(good), [])
    assert report["model"] == {
        "type": "llama",
        "size": sum(array.nbytes for array in weights.values()),
        "parameters": sum(array.size for array in weights.values()),
        "layers": 2,
        "context": 512,
        "vocabulary": 264,
        "quantisation": "f32",
        "tokenizer": "BPE, byte-level",
        "templates": ["default"],
        "chat": {"tools": None, "thinking": None},
        "eos_ids": [EOS],
        "digest": versions.digest_of(inspect(good).digest),
        "features": ["batching", "tree", "resume", "format", "deterministic"],
        "details": {
            "modified": int((good / "config.json").stat().st_mtime),
            "width": 32,
            "heads": 4,
            "kv_heads": 2,
            "template": json.loads((good / "tokenizer_config.json").read_text())["chat_template"],
            "license": None,
            "sampling": {},
        },
    }
    assert set(report["model"]) == MODEL


@pytest.mark.parametrize(
    "write",
    [seeing.write_gemma, seeing.write_qwen, seeing.write_mllama],
    ids=lambda one: one.__name__,
)
def test_models_that_read_images_are_found_in_order(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    report = of(write(tmp_path))
    assert report["problems"] == [] and "vision" in report["model"]["features"]
    assert report["model"]["layers"] == (5 if write is seeing.write_mllama else 3)


def test_a_context_above_the_models_own_is_noted(good: Path) -> None:
    (note,) = of(good, context=10_000)["notes"]
    assert "context is 10000 tokens, the model's own is 512" in note
    assert note in "\n".join(lines(of(good, context=10_000)))
    assert of(good, context=512)["notes"] == of(good)["notes"] == []


def test_messages_without_a_template(good: Path) -> None:
    counting = check("c", ModelConfig(path="builtin:counting"))
    assert "`ROLE: CONTENT`" in "\n".join(lines(counting))
    (good / "chat_template.jinja").unlink(missing_ok=True)
    (good / "tokenizer_config.json").write_text("{}")
    assert "it takes no messages, only a prompt" in "\n".join(lines(of(good)))


def test_the_digest_equals_that_of_workers(good: Path) -> None:
    opened = open_source(ModelConfig(path=str(good))).opened
    assert of(good)["model"]["digest"] == opened.digest


def test_a_model_without_a_template(good: Path) -> None:
    change(good / "tokenizer_config.json", chat_template=None)
    report = of(good)
    model = report["model"]
    assert (report["problems"], model["templates"], model["chat"]) == ([], [], None)


def test_the_built_in_models() -> None:
    demo = check("d", ModelConfig(path="builtin:demo"))
    counting = check("c", ModelConfig(path="builtin:counting", context=64))
    assert set(demo["model"]) == set(counting["model"]) == MODEL
    assert demo["problems"] == counting["problems"] == []
    assert counting["model"]["context"] == 64
    assert "tree" not in counting["model"]["features"]
    (words,) = check("x", ModelConfig(path="builtin:nothing"))["problems"]
    assert "there is no 'builtin:nothing'" in words


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ({"a": QuantLayout("affine", 4, 64)}, "4-bit affine g64"),
        ({"a": QuantLayout("mxfp4", 4, 32)}, "4-bit mxfp4 g32"),
        (
            {
                "a": QuantLayout("affine", 4, 64),
                "b": QuantLayout("affine", 4, 64),
                "c": QuantLayout("affine", 8, 64),
            },
            "4-bit affine g64, mixed",
        ),
    ],
)
def test_quantisation_in_words(good: Path, layouts: dict[str, QuantLayout], words: str) -> None:
    sound = inspect(good)
    assert (
        description.quantisation(replace(sound, match=replace(sound.match, layouts=layouts)))
        == words
    )


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ({"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}, "BPE, byte-level"),
        (
            {
                "model": {"type": "BPE", "byte_fallback": True},
                "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
            },
            "BPE, byte fallback",
        ),
        ({"model": {"type": "WordPiece"}, "decoder": None}, "WordPiece"),
        ({}, "BPE"),
    ],
)
def test_the_kind_of_tokenizer_in_words(tokenizer: Any, words: str) -> None:
    assert description.tokenizer_kind(tokenizer) == words


# ---- what is wrong with it -----------------------------------------------------------------------


def test_all_missing_and_wrong_keys(good: Path) -> None:
    change(good / "config.json", hidden_size=None, num_hidden_layers=0, vocab_size="many")
    messages = problems(good)
    assert len(messages) == 3
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        assert any(key in words for words in messages), messages


def test_all_mismatched_tensors(tmp_path: Path) -> None:
    weights = random_weights(config())
    names = list(weights)
    del weights[names[1]]
    weights["extra.weight"] = weights[names[2]]
    weights[names[2]] = weights[names[2]][:3].copy()
    weights[names[3]] = weights[names[3]][:, :5].copy()
    folder = write_checkpoint(tmp_path / "m", weights=weights)
    messages = problems(folder)
    assert len(messages) == 4
    for words, name in zip(messages, (names[1], "extra.weight", names[2], names[3]), strict=True):
        assert repr(name) in words


def test_problems_of_all_kinds_are_listed_together(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    second, third = sorted(folder.glob("model-*.safetensors"))[1:]
    second.unlink()
    third.write_bytes(b"GGUF")
    change(folder / "config.json", rms_norm_eps=None)
    (folder / "tokenizer.json").unlink()
    change(folder / "tokenizer_config.json", chat_template="{% for %}")
    messages = problems(folder)
    for part in ("rms_norm_eps", "no tokenizer.json", second.name, "GGUF", "template"):
        assert any(part in words for words in messages), (part, messages)
    assert len(messages) == 5


def test_every_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    shards = sorted(folder.glob("model-*.safetensors"))
    for shard in shards[:2]:
        shard.unlink()
    (words,) = problems(folder)
    assert all(repr(shard.name) in words for shard in shards[:2]), words
    assert repr(shards[2].name) not in words


def test_a_wrong_shape_in_a_shard_while_another_is_missing(tmp_path: Path) -> None:
    weights = random_weights(config())
    weights["lm_head.weight"] = weights["lm_head.weight"][:7].copy()
    folder = write_checkpoint(tmp_path / "m", shards=2, weights=weights)
    sorted(folder.glob("model-*.safetensors"))[0].unlink()
    missing, shape = problems(folder)
    assert "missing" in missing and "'lm_head.weight' has shape [7, 32]" in shape


def test_a_tokenizer_of_another_model(good: Path) -> None:
    change(good / "config.json", vocab_size=200)
    weights = random_weights(config(vocab_size=200))
    folder = write_checkpoint(good.parent / "other", weights=weights, vocab_size=200)
    (words,) = of(folder)["problems"]
    assert "ids up to 255" in words and "rows for 200" in words
    assert refused_with(folder) == words
    messages = of(good)["problems"]
    assert words in messages and len(messages) > 1


def test_a_template_that_does_not_compile(good: Path) -> None:
    change(good / "tokenizer_config.json", chat_template="{% if x %}\n{% endfor %}")
    (words,) = of(good)["problems"]
    assert "template" in words and "line 2" in words
    assert refused_with(good) == words


def test_files_that_are_not_json(good: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (good / name).write_text("{")
    messages = problems(good)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert any(f"{name} is not JSON" in words for words in messages), messages


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"model_type": []}', '{"model_type": "zzz"}', "\x00", "[" * 100_000],
)
def test_no_config_makes_check_fail(good: Path, content: str) -> None:
    (good / "config.json").write_text(content)
    assert problems(good)


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (words,) = problems(tmp_path / "nothing")
    assert "does not exist" in words


def test_a_gguf_file_that_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "x.gguf"):
        (words,) = problems(path)
        assert "x.gguf" in words and "cut short" in words


def test_a_link_out_of_the_models_folder(good: Path, tmp_path: Path) -> None:
    border = tmp_path / "models"
    border.mkdir()
    (border / "m").symlink_to(good)
    spec = ModelConfig(path=str(border / "m"), within=str(border))
    (words,) = check("m", spec)["problems"]
    assert f"leads out of the models folder, to {good}" in words
    with pytest.raises(ModelLoadFailed) as caught:
        open_source(spec)
    assert str(caught.value) == words
    shutil.copytree(good, border / "n")
    assert check("n", ModelConfig(path=str(border / "n"), within=str(border)))["problems"] == []


def test_models_of_ollamas_store(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    store = Store(tmp_path / "store")
    for name in ("small:1b", "small:latest"):
        manifest = store.write(name, store.layers(good))
    first, second = (
        check("m", ModelConfig(path=f"ollama:small:{tag}")) for tag in ("1b", "latest")
    )
    assert (second["path"], second["problems"]) == (str(manifest), [])
    assert first["model"] == second["model"], "two tags for one model have one digest"
    (words,) = check("m", missing := ModelConfig(path="ollama:nothing"))["problems"]
    assert "nothing" in words
    assert check("m", missing, tell=print)["places"] == [
        str(manifest.parents[1] / "nothing/latest")
    ]


def test_models_of_the_hugging_face_cache(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = put_in_hub(good, tmp_path / "hub", "org/name")
    report = check("m", ModelConfig(path="org/name"))
    assert (report["path"], report["problems"]) == (str(folder), [])
    (words,) = check("m", missing := ModelConfig(path="org/other"))["problems"]
    assert "mlxpool pull org/other" in words
    places = check("m", missing, tell=print)["places"]
    assert places == [str(tmp_path / "hub" / "models--org--other")], "where changes are looked for"


# ---- what it needs -------------------------------------------------------------------------------


def reckoned(folder: Path, **changes: Any) -> MemoryEstimate:
    settings: dict[str, Any] = {
        "context": 100,
        "sequences": 4,
        "prefix_cache": "tree",
        "prefix_bytes": 0,
        "limit": 10**6,
        "chunk": 512,
        "float32": True,
    }
    return memory_estimate.estimate_memory(inspect(folder), **{**settings, **changes})


def test_keys_and_values_of_8_bits_take_a_quarter_of_32(good: Path) -> None:
    """The report names the dtype of keys and values, and counts fewer bytes for a token."""
    heads, layers = 2 * 2, 2  # keys and values
    assert reckoned(good, kv="int8").token == heads * layers * (8 + 2)  # 8 integers and a scale
    report = check("name", ModelConfig(path=str(good), kv="int8"), machine=True)
    plain = check("name", ModelConfig(path=str(good)), machine=True)
    assert (report["memory"]["kv"], plain["memory"]["kv"]) == ("int8", "auto")
    assert report["memory"]["token"] == heads * layers * 10


def test_memory_of_a_draft_model_is_needed_beside_that_of_its_model(tmp_path: Path) -> None:
    """The estimate includes the draft model's weights and rows.

    The broker also reserves memory for these weights.
    """
    plain = ModelConfig(path="builtin:demo", sequences=4)
    path = write_draft(tmp_path / "draft")
    drafting = replace(plain, draft=str(path), speculation="draft")
    reports = [check("m", settings, machine=True) for settings in (plain, drafting)]
    weights, more = (report["memory"]["weights"] for report in reports)
    draft = inspect(path)
    rows = 4 * min(draft.context, 1024) * sum(cache.token_bytes(2) for cache in draft.plan.caches)
    assert more >= weights + draft.weight_bytes + rows
    small = inspect(DEMO_FOLDER).weight_bytes + 1
    for model_config, fits in ((plain, True), (drafting, False)):
        (*why,) = check("m", model_config, machine=True, memory_limit=small)["machine"]["why"]
        assert (why == []) == fits, why


def test_prefixes_on_disk_are_told_or_refused(good: Path) -> None:
    report = check("m", ModelConfig(path=str(good), prefix_disk=2**30), machine=True)
    assert report["memory"]["prefix_disk"] == 2**30 and not report["problems"]
    for path in ("builtin:counting", "builtin:demo-embed"):
        (problem,) = check("m", ModelConfig(path=path, prefix_disk=2**30))["problems"]
        assert "prefix_disk is 1073741824 bytes, but" in problem and "keeps no prefixes" in problem


@pytest.mark.parametrize("path", ["builtin:counting", "builtin:demo-embed"])
def test_every_setting_that_such_a_model_has_not_is_told(path: str) -> None:
    settings: dict[str, Any] = {"devices": 2, "kv": "int8", "speculation": "mtp"}
    messages = check("m", ModelConfig(path=path, prefix_disk=2**30, **settings))["problems"]
    named = ("devices is 2", "kv = 'int8'", "prefix_disk is", "speculation is 'mtp'")
    assert all(any(name in problem for problem in messages) for name in named), messages
    assert len(messages) == len(named)
    with pytest.raises(ModelLoadFailed, match=r"speculation is 'mtp', but .* checks no drafts"):
        open_source(ModelConfig(path=path, speculation="mtp"))


def test_what_cannot_be_divided_is_told() -> None:
    def found(devices: int) -> list[str]:
        return list(check("m", ModelConfig(path="builtin:demo", devices=devices))["problems"])

    assert found(2) == []
    (problem,) = found(3)
    assert "devices is 3, but" in problem and "set devices to a divisor of" in problem


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"devices": 2}, "devices is 2"), ({"deterministic": True}, "deterministic is true")],
)
def test_a_head_whose_drafts_nobody_checks_is_refused_before_weights_are_read(
    settings: dict[str, Any], why: str
) -> None:
    config = ModelConfig(path="builtin:demo", speculation="mtp", **settings)
    (problem,) = check("m", config)["problems"]
    assert f"but {why}" in problem and problem.endswith(
        'leave speculation out, or set it to "auto"'
    )
    with pytest.raises(ModelLoadFailed, match=why):
        open_source(config)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"devices": 2}, "devices is 2"),
        ({"deterministic": True}, "deterministic is true"),
        ({"path": "builtin:counting"}, "the counting model checks none"),
        ({"path": "builtin:demo-embed"}, "a model of texts checks none"),
        ({}, ""),
    ],
)
def test_auto_without_drafts_is_a_note(settings: dict[str, Any], why: str) -> None:
    report = check("m", ModelConfig(**{"path": "builtin:demo", "speculation": "auto", **settings}))
    assert not report["problems"]
    notes = [note for note in report["notes"] if "no drafts are made" in note]
    assert len(notes) == bool(why) and all(why in note for note in notes)


def test_memory_is_weights_and_keys_and_values(good: Path) -> None:
    need = reckoned(good)
    weights = sum(array.nbytes for array in random_weights(config()).values())
    token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
    assert (need.weights, need.token, need.sequence) == (weights, token, 100 * token)
    assert need.all_sequences == 4 * need.sequence
    assert need.least == weights + need.sequence
    assert need.prefix_cache == (10**6 - weights) // 4
    assert reckoned(good, prefix_bytes=77).prefix_cache == 77
    assert reckoned(good, prefix_bytes=77, prefix_cache="off").prefix_cache == 0


def test_a_cpu_computes_float16_in_four_bytes() -> None:
    on_gpu, on_cpu = reckoned(DEMO_FOLDER, float32=False), reckoned(DEMO_FOLDER, float32=True)
    assert on_cpu.weights == 2 * on_gpu.weights == 2 * inspect(DEMO_FOLDER).weight_bytes
    assert on_cpu.token == 2 * on_gpu.token


def test_the_longest_context_that_fits(good: Path) -> None:
    need = reckoned(good, context=512)
    assert need.context_within(need.weights + 10 * need.token) == 10
    assert need.context_within(need.weights - 1) == 0
    assert need.context_within(10**12) == 512


def test_why_a_model_does_not_fit(good: Path) -> None:
    need = reckoned(good)
    assert memory_problems(need, 10**9, 10**9, need.weights) == []
    (limit,) = memory_problems(need, need.weights, 10**9, need.weights)
    assert f"weights take {need.weights} bytes" in limit and "raise memory_limit" in limit
    (pool,) = memory_problems(need, 10**9, need.weights - 1, need.weights)
    assert f"the pool's memory_limit is {need.weights - 1}" in pool


# ---- the process ---------------------------------------------------------------------------------


def ask(*lines: dict[str, Any]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "mlxpool.worker.diagnose.check"],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_gpu_refuses_to_be_deterministic(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core")
    monkeypatch.setattr("mlxpool.worker.kernels.device.on_gpu", lambda: True)
    spec = ModelConfig(path=str(good), deterministic=True)
    with pytest.raises(ModelLoadFailed, match="deterministic = true is built for the CPU alone"):
        open_source(spec).load(lambda tensors, size: None)
    (why,) = check("m", spec, machine=True)["machine"]["why"]
    assert "built for the CPU alone" in why


def test_a_line_for_each_model(good: Path) -> None:
    pytest.importorskip("mlx.core")
    spec = as_map(ModelConfig(path=str(good), context=64, sequences=3))
    listed, measured = ask(
        {"name": "a", "model": spec},
        {"name": "b", "model": spec, "machine": True, "memory_limit": 5},
    )
    assert set(listed) == {"name", "path", "problems", "notes", "model"}
    assert set(measured) == {"name", "path", "problems", "notes", "model", "memory", "machine"}
    assert set(measured["memory"]) == MAX_RENDERER_MEMORY and set(measured["machine"]) == MACHINE
    assert (measured["memory"]["context"], measured["memory"]["sequences"]) == (64, 3)
    assert measured["machine"]["pool_limit"] == 5 and not measured["machine"]["fits"]


def test_what_the_weights_say_is_told_before_the_tokenizer_is_read(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    read = ChatTokenizer.from_folder

    def noted(folder: ModelFolder) -> ChatTokenizer:
        events.append("text")
        return read(folder)

    monkeypatch.setattr(ChatTokenizer, "from_folder", noted)
    report = check("m", ModelConfig(path=str(good)), tell=events.append)
    known, text = events
    assert text == "text" and known["type"] == "llama" and known["size"] > 0
    assert known.items() <= report["model"].items()


def test_checking_without_machine_imports_no_mlx(good: Path) -> None:
    code = (
        "import sys; from mlxpool.common.config.schema import ModelConfig;"
        "from mlxpool.worker.diagnose.check import check;"
        "check('m', ModelConfig(path=sys.argv[1]));"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'mlx']"
    )
    subprocess.run([sys.executable, "-c", code, str(good)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not count it elsewhere")
def test_a_check_in_the_background_is_bounded() -> None:
    code = (
        "from mlxpool.worker.diagnose.check import bound_memory;"
        "from mlxpool.worker.diagnose.problems import *;"
        "problems = Problems(); bound_memory(2**29); problems.attempt(bytearray, 2**30);"
        "print(*problems.found); bound_memory(2**40)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MemoryError")
