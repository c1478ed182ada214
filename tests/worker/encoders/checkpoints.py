"""Writes small random checkpoints of encoder models, with the same numbers on every machine.

test_encoder_models.py computes them with the engine and in plain NumPy.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlxpool.worker.models.encoders import encoder_plan
from mlxpool.worker.models.text_decoders import Answers

WORDS = (
    *("the", "a", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "yes", "no"),
    *("query", "passage", "vector", "search"),
)
TEXTS = (
    "the quick brown fox",
    "a dog",
    "search: the lazy dog jumps over the quick brown fox, then 12 more foxes",
    "",
    "Straße, naïve café 東京",
    "vector search " * 40,  # longer than the models read
    "query",
    "the lazy fox jumps over a vector; the dog sleeps.",
)
PAIRS = (
    ("quick fox", "the quick brown fox jumps over the lazy dog"),
    ("search", "a passage"),
    ("vector search", "the dog " * 60),  # longer than the models read
    ("quick fox", "vector search over a passage"),
)
MAX_TOKENS = 48  # of all models except rerankers with a question
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
ROWS = 64  # positions
PLAIN = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
QUERY = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
SEARCH = {"prompts": {"query": "search | query: ", "document": "title: none | text: "}}


@dataclass(frozen=True)
class Case:
    """A checkpoint to write and test.

    `config`: the content of config.json. `tokenizer`: a key of TOKENIZERS. `poolings`: the poolings
    in modules.json, which is missing without them. `dense`: the output sizes of its dense layers.
    `prompts`: the prompts in config_sentence_transformers.json. `prefix`: the prefix of the names
    of all tensors but the head's. `answers`: the model is a language model that rates pairs by its
    answer.
    """

    config: Mapping[str, Any]
    tokenizer: str
    poolings: tuple[str, ...] = ()
    normalises: bool = False
    dense: tuple[int, ...] = ()
    prompts: Mapping[str, Any] = field(default_factory=dict)
    prompt_name: str = ""
    prefix: str = ""
    answers: bool = False
    dimensions: int = 0  # the first dimensions that are kept and normalised; 0: all


def _config(model_type: str, architecture: str, **rest: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "architectures": [architecture],
        **SIZES,
        "vocab_size": 0,
        "max_position_embeddings": ROWS,
        **rest,
    }


def _labels(count: int, **rest: Any) -> dict[str, Any]:
    names = {str(index): f"label {index}" for index in range(count)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}, **rest}


BERT = _config("bert", "BertModel", type_vocab_size=2, pad_token_id=0)
BERT_HEAD = {**BERT, "architectures": ["BertForSequenceClassification"]}
XLM = _config("xlm-roberta", "XLMRobertaModel", type_vocab_size=1, pad_token_id=1)
XLM_HEAD = {**XLM, "architectures": ["XLMRobertaForSequenceClassification"]}
NOMIC = _config("nomic_bert", "NomicBertModel", type_vocab_size=2, hidden_act="silu")
MODERN = _config(
    "modernbert",
    "ModernBertModel",
    local_attention=8,
    pad_token_id=0,
    cls_token_id=1,
    sep_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
)
MODERN_HEAD = {**MODERN, "architectures": ["ModernBertForSequenceClassification"]}
QWEN = _config(
    "qwen3",
    "Qwen3Model",
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=True,
    pad_token_id=0,
    max_window_layers=3,
    use_sliding_window=False,
)
GEMMA = _config(
    "gemma3_text",
    "Gemma3TextModel",
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_local_base_freq=100.0,
    query_pre_attn_scalar=8,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    hidden_activation="gelu_pytorch_tanh",
    use_bidirectional_attention=True,
    tie_word_embeddings=True,
    pad_token_id=0,
)
ALL_POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")

CASES: Mapping[str, Case] = {
    "bert": Case(BERT, "wordpiece", ("mean",), True, prompts=QUERY),
    "bert, a prompt": Case(BERT, "wordpiece", ("mean",), True, prompts=QUERY, prompt_name="query"),
    "bert, 16 dimensions": Case(BERT, "wordpiece", ("cls",), dimensions=16),
    "bert, all poolings": Case(BERT, "wordpiece", ALL_POOLINGS),
    "bert without modules": Case(BERT, "wordpiece"),
    "roberta": Case(
        {**XLM, "model_type": "roberta", "architectures": ["RobertaModel"]}, "bpe of roberta"
    ),
    "xlm-roberta": Case(XLM, "unigram of roberta", ("cls",), True),
    "nomic_bert": Case(NOMIC, "wordpiece", ("mean",), True),
    "modernbert": Case(MODERN, "bpe", ("mean",)),
    "qwen3": Case(QWEN, "bpe, an end", ("lasttoken",), True, prompts=QUERY, prompt_name="query"),
    "embeddinggemma": Case(
        GEMMA, "unigram", ("mean",), True, dense=(64, 32), prompts=SEARCH, prompt_name="document"
    ),
    "bert, rerank": Case({**BERT_HEAD, **_labels(1)}, "wordpiece", prefix="bert."),
    "bert, rerank without activation": Case(
        {
            **BERT_HEAD,
            **_labels(1),
            "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        },
        "wordpiece",
        prefix="bert.",
    ),
    "bert, rerank without types": Case(
        {**BERT_HEAD, **_labels(1)}, "wordpiece without types", prefix="bert."
    ),
    "xlm-roberta, rerank": Case(
        {**XLM_HEAD, **_labels(1)}, "unigram of roberta", prefix="roberta."
    ),
    "modernbert, rerank": Case(
        {**MODERN_HEAD, **_labels(1), "classifier_pooling": "mean"}, "bpe", prefix="model."
    ),
    "bert, classify": Case({**BERT_HEAD, **_labels(3)}, "wordpiece", prefix="bert."),
    "bert, classify many": Case(
        {**BERT_HEAD, **_labels(3), "problem_type": "multi_label_classification"},
        "wordpiece",
        prefix="bert.",
    ),
    "modernbert, classify": Case({**MODERN_HEAD, **_labels(4)}, "bpe", prefix="model."),
    "qwen3, one label": Case(
        {**QWEN, **_labels(1), "architectures": ["Qwen3ForSequenceClassification"]},
        "bpe, an end",
        prefix="model.",
    ),
    "qwen3, asked": Case(
        {**QWEN, "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 1024},
        "bpe",
        prefix="model.",
        answers=True,
    ),
}


def write(folder: Path, case: Case) -> Path:
    """Writes the files of a checkpoint and returns the folder."""
    folder.mkdir(parents=True)
    tokenizer = TOKENIZERS[case.tokenizer]()
    config = {**case.config, "vocab_size": tokenizer.get_vocab_size()}
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", config)
    bound = config["max_position_embeddings"] if case.answers else MAX_TOKENS
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names = ["input_ids", "attention_mask", *["token_type_ids"] * (case.tokenizer == "wordpiece")]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": bound,
            "model_input_names": names,
            **special,
        },
    )
    _save(folder / "model.safetensors", _weights(config, case))
    if case.poolings:
        _write_modules(folder, case)
    if case.prompts:
        write_json(folder / "config_sentence_transformers.json", case.prompts)
    return folder


def _weights(config: Mapping[str, Any], case: Case) -> dict[str, np.ndarray]:
    options = {"answers": Answers(0, 1)} if case.answers else {}
    shapes = encoder_plan(config, **options).model.shapes
    weights = {}
    for name, shape in shapes.items():
        head = name.startswith(("classifier", "score", "head.", "lm_head"))
        stored = name.removeprefix("model.")
        if not head:
            stored = case.prefix + stored
        if case.prefix == "roberta." and name.startswith("classifier"):
            stored = name
        if name.startswith("pooler"):
            stored = case.prefix + name
        weights[stored] = _random(name, shape, config)
    return weights


def _random(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> np.ndarray:
    draw = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        norm = name.endswith("weight") and config["model_type"] != "gemma3_text"
        return (0.2 * draw + norm).astype(np.float32)
    if "embed" in name:
        return (0.5 * draw).astype(np.float32)
    return np.asarray(1.5 * draw / shape[-1] ** 0.5).astype(np.float32)


def _write_modules(folder: Path, case: Case) -> None:
    steps = [("1_Pooling", "sentence_transformers.models.Pooling")]
    modes = {f"pooling_mode_{OLD_NAMES.get(pooling, pooling)}": True for pooling in case.poolings}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **modes})
    inputs = 32 * len(case.poolings)
    for index, outputs in enumerate(case.dense, 2):
        name = f"{index}_Dense"
        steps.append((name, "sentence_transformers.models.Dense"))
        settings = {
            "in_features": inputs,
            "out_features": outputs,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        write_json(folder / name / "config.json", settings)
        weight = _random(name, (outputs, inputs), case.config)
        _save(folder / name / "model.safetensors", {"linear.weight": weight})
        inputs = outputs
    if case.normalises:
        name = f"{len(steps) + 1}_Normalize"
        steps.append((name, "sentence_transformers.models.Normalize"))
        (folder / name).mkdir()
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(steps, 1)
    ]
    write_json(folder / "modules.json", [*PLAIN, *listed])
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS})


OLD_NAMES = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "weightedmean": "weightedmean_tokens",
}


def _save(file: Path, arrays: dict[str, np.ndarray]) -> None:
    save_file(arrays, str(file), metadata={"format": "pt"})


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


# ---- tokenizers --------------------------------------------------------------------------------

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
ROBERTA_SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")  # positions begin after the id of [PAD]
LETTERS = [chr(code) for code in range(33, 127)]


def _template(
    pair: str, single: str = "[CLS] $A [SEP]", special: Sequence[str] = SPECIAL
) -> processors.TemplateProcessing:
    ids = [(token, special.index(token)) for token in ("[CLS]", "[SEP]")]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _wordpiece() -> Tokenizer:
    words = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
    words = list(dict.fromkeys(words))
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = _template("[CLS] $A [SEP] $B:1 [SEP]:1")
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _unigram(special: Sequence[str] = SPECIAL) -> Tokenizer:
    pieces = [(token, 0.0) for token in special]
    pieces += [("▁" + word, -4.0 - index / 10) for index, word in enumerate(WORDS)]
    pieces += [(piece, -9.0 - index / 100) for index, piece in enumerate(["▁", *LETTERS])]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = _template("[CLS] $A [SEP] [SEP] $B [SEP]", special=special)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _bpe(special: Sequence[str] = SPECIAL) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges, words = [], []
    for word in ("yes", "no", "Ġthe", "Ġdog"):
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            words.append(word[: end + 1])
    vocab = {
        piece: index for index, piece in enumerate([*special, *letters, *dict.fromkeys(words)])
    }
    tokenizer = Tokenizer(models.BPE(vocab, list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _template("[CLS] $A [SEP] $B [SEP]", special=special)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _bpe_end() -> Tokenizer:
    tokenizer = _bpe()
    tokenizer.post_processor = _template("$A $B [SEP]", "$A [SEP]")
    return tokenizer


TOKENIZERS: Mapping[str, Callable[[], Tokenizer]] = {
    "wordpiece": _wordpiece,
    "wordpiece without types": _wordpiece,
    "unigram": _unigram,
    "unigram of roberta": partial(_unigram, ROBERTA_SPECIAL),
    "bpe": _bpe,
    "bpe of roberta": partial(_bpe, ROBERTA_SPECIAL),
    "bpe, an end": _bpe_end,
}
