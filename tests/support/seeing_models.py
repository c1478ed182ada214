"""Small models that read images, and images for them.

The weights are drawn from seeds with NumPy only. seeing_reference.py has stored the answers of an
independent implementation in tests/worker/models/expected/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from support.worker_checkpoints import BOS, EOS, write_json, write_tokenizer, write_weights

EXPECTED = Path(__file__).parents[1] / "worker" / "models" / "expected"
STEPS = 24  # number of tokens of the answer to each prompt
BEGIN, SLOT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
FIRST_ID = 260  # the id of the first of the three tokens
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    # The square root is 8, exact in bfloat16: transformers multiplies by the root in bfloat16, too.
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 264,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "sliding_window": 9,  # fewer than the tokens of an image
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 12,
    "rope_theta": 50000.0,
    "rope_local_base_freq": 700.0,
}
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": TEXT,
    "vision_config": VISION,
    "tie_word_embeddings": False,
    "mm_tokens_per_image": 16,
    "boi_token_index": FIRST_ID,
    "image_token_index": FIRST_ID + 1,
    "eoi_token_index": FIRST_ID + 2,
    "eos_token_id": [EOS],
}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": None,
    "do_pan_and_scan": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.4, 0.6],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 32, "width": 32},
}
QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
QWEN_TEMPLATE = GEMMA_TEMPLATE.replace("<start_of_image>", "".join(QWEN_TOKENS[:3]))
QWEN_VISION: dict[str, Any] = {
    "model_type": "qwen3_vl_vision",
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
    "hidden_act": "gelu_pytorch_tanh",
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 264,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 5000.0,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
            "rope_type": "default",
        },
    },
    "vision_config": QWEN_VISION,
    "vision_start_token_id": FIRST_ID,
    "image_token_id": FIRST_ID + 1,
    "vision_end_token_id": FIRST_ID + 2,
    "video_token_id": FIRST_ID + 3,
    "tie_word_embeddings": False,
    "eos_token_id": [EOS],
}
QWEN_PREPROCESSOR: dict[str, Any] = {
    **PREPROCESSOR,
    "image_processor_type": "Qwen2VLImageProcessor",
    "resample": 3,
    "size": {"shortest_edge": 256, "longest_edge": 1600},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
MLLAMA_IMAGE = "<|image|>"
MLLAMA_TEMPLATE = GEMMA_TEMPLATE.replace("<start_of_image>", MLLAMA_IMAGE)
MLLAMA_VISION: dict[str, Any] = {
    "model_type": "mllama_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "max_num_tiles": 4,
    "supported_aspect_ratios": [
        [1, 1],
        [1, 2],
        [1, 3],
        [1, 4],
        [2, 1],
        [2, 2],
        [3, 1],
        [4, 1],
    ],
    "intermediate_layers_indices": [1, 2],
    "vision_output_dim": 72,
    "norm_eps": 1e-5,
    "hidden_act": "gelu",
}
MLLAMA: dict[str, Any] = {
    "architectures": ["MllamaForConditionalGeneration"],
    "model_type": "mllama",
    "text_config": {
        "model_type": "mllama_text_model",
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "cross_attention_layers": [1, 3],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": FIRST_ID,
        "pad_token_id": 0,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
    },
    "vision_config": MLLAMA_VISION,
    "image_token_index": FIRST_ID,  # the first id after the vocabulary
    "eos_token_id": [EOS],
}
MLLAMA_PREPROCESSOR: dict[str, Any] = {
    **PREPROCESSOR,
    "image_processor_type": "MllamaImageProcessor",
    "size": {"height": 16, "width": 16},
    "max_image_tiles": 4,
    "do_pad": True,
}
# Prompts as lists of parts: a text, or the index of an image.
PROMPTS: Sequence[Sequence[str | int]] = (
    ("What is this? ", 0, " Say it."),
    (0, "and", 1, "differ in", 0, "what?"),
)
PICTURES = ((50, 70), (90, 33))  # height and width


def picture(number: int) -> Image.Image:
    """Returns image `number`: smooth colours with some noise."""
    height, width = PICTURES[number]
    rows, columns = np.mgrid[0:height, 0:width] / 20
    waves = [np.sin(rows * (1 + number) + channel + columns * channel) for channel in range(3)]
    noise = np.random.default_rng(number).standard_normal((height, width, 3)) * 12
    pixels = np.clip(np.stack(waves, axis=-1) * 100 + 128 + noise, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Returns an image as the bytes of a file."""
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


class Weights(dict[str, np.ndarray]):
    """Random weights by name, drawn in the order of `add`."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    def add(self, name: str, *shape: int, scale: float = 0.0) -> None:
        """Adds normal random numbers times `scale`; 0 stands for 1.4 / sqrt(last dimension)."""
        scale = scale or 1.4 * shape[-1] ** -0.5
        self[name] = self._draw.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def linear(self, name: str, outputs: int, inputs: int) -> None:
        """Adds a matrix and a bias."""
        self.add(f"{name}.weight", outputs, inputs)
        self.add(f"{name}.bias", outputs, scale=0.2)

    def rms_norm(self, name: str, size: int) -> None:
        """Adds the weight of a norm without a bias."""
        self[f"{name}.weight"] = 1 + self._draw.standard_normal(size, dtype=np.float32) / 10

    def norm(self, name: str, size: int) -> None:
        """Adds the weight and the bias of a layer norm."""
        self[f"{name}.weight"] = 1 + self._draw.standard_normal(size, dtype=np.float32) / 10
        self.add(f"{name}.bias", size, scale=0.1)


def gemma_weights(seed: int = 3) -> dict[str, np.ndarray]:
    """Returns random weights by tensor name, as in released files of Gemma 3."""
    weights = Weights(seed)
    _add_text(weights)
    _add_tower(weights)
    size, hidden = int(VISION["hidden_size"]), int(TEXT["hidden_size"])
    weights.add("multi_modal_projector.mm_soft_emb_norm.weight", size, scale=0.2)
    weights.add("multi_modal_projector.mm_input_projection_weight", size, hidden, scale=0.1)
    return dict(weights)


def _add_text(weights: Weights) -> None:
    text, add = TEXT, weights.add
    hidden, width, dim = int(text["hidden_size"]), int(text["intermediate_size"]), 8
    add("language_model.model.embed_tokens.weight", 264, hidden, scale=0.05)
    for layer in range(int(text["num_hidden_layers"])):
        name = f"language_model.model.layers.{layer}"
        for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            add(f"{name}.{part}_layernorm.weight", hidden, scale=0.2)
        for part, heads in (("q", 4), ("k", 2), ("v", 2)):
            add(f"{name}.self_attn.{part}_proj.weight", heads * dim, hidden)
        add(f"{name}.self_attn.o_proj.weight", hidden, 4 * dim)
        for part in "qk":
            add(f"{name}.self_attn.{part}_norm.weight", dim, scale=0.2)
        for part in ("gate", "up"):
            add(f"{name}.mlp.{part}_proj.weight", width, hidden)
        add(f"{name}.mlp.down_proj.weight", hidden, width)
    add("language_model.model.norm.weight", hidden, scale=0.2)
    add("language_model.lm_head.weight", 264, hidden, scale=0.4)


def _add_tower(weights: Weights) -> None:
    vision, add = VISION, weights.add
    size, wide, patch = (
        int(vision[key]) for key in ("hidden_size", "intermediate_size", "patch_size")
    )
    name = "vision_tower.vision_model"
    add(f"{name}.embeddings.patch_embedding.weight", size, 3, patch, patch, scale=0.2)
    add(f"{name}.embeddings.patch_embedding.bias", size, scale=0.2)
    add(f"{name}.embeddings.position_embedding.weight", 64, size, scale=0.5)
    for layer in range(int(vision["num_hidden_layers"])):
        inner = f"{name}.encoder.layers.{layer}"
        weights.norm(f"{inner}.layer_norm1", size)
        weights.norm(f"{inner}.layer_norm2", size)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights.linear(f"{inner}.self_attn.{part}", size, size)
        weights.linear(f"{inner}.mlp.fc1", wide, size)
        weights.linear(f"{inner}.mlp.fc2", size, wide)
    weights.norm(f"{name}.post_layernorm", size)


def qwen_weights(seed: int = 4) -> dict[str, np.ndarray]:
    """Returns random weights by tensor name, as in released files of Qwen3-VL."""
    weights = Weights(seed)
    text, name = QWEN["text_config"], "model.language_model"
    hidden, width, heads, kv, dim = text["hidden_size"], text["intermediate_size"], 4, 2, 16
    weights.add(f"{name}.embed_tokens.weight", 264, hidden, scale=0.5)
    for layer in range(text["num_hidden_layers"]):
        inner = f"{name}.layers.{layer}"
        for part, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", dim),
            ("self_attn.k_norm", dim),
        ):
            weights.rms_norm(f"{inner}.{part}", size)
        for part, count in (("q", heads), ("k", kv), ("v", kv)):
            weights.add(f"{inner}.self_attn.{part}_proj.weight", count * dim, hidden)
        weights.add(f"{inner}.self_attn.o_proj.weight", hidden, heads * dim)
        for part in ("gate", "up"):
            weights.add(f"{inner}.mlp.{part}_proj.weight", width, hidden)
        weights.add(f"{inner}.mlp.down_proj.weight", hidden, width)
    weights.rms_norm(f"{name}.norm", hidden)
    weights.add("lm_head.weight", 264, hidden, scale=0.4)
    _add_qwen_tower(weights)
    return dict(weights)


def _add_qwen_tower(weights: Weights) -> None:
    vision, name = QWEN_VISION, "model.visual"
    hidden, patch, out = vision["hidden_size"], vision["patch_size"], vision["out_hidden_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    weights.add(f"{name}.patch_embed.proj.weight", hidden, 3, 2, patch, patch, scale=0.15)
    weights.add(f"{name}.patch_embed.proj.bias", hidden, scale=0.2)
    weights.add(f"{name}.pos_embed.weight", vision["num_position_embeddings"], hidden, scale=0.5)
    for layer in range(vision["depth"]):
        inner = f"{name}.blocks.{layer}"
        weights.norm(f"{inner}.norm1", hidden)
        weights.norm(f"{inner}.norm2", hidden)
        weights.linear(f"{inner}.attn.qkv", 3 * hidden, hidden)
        weights.linear(f"{inner}.attn.proj", hidden, hidden)
        weights.linear(f"{inner}.mlp.linear_fc1", vision["intermediate_size"], hidden)
        weights.linear(f"{inner}.mlp.linear_fc2", hidden, vision["intermediate_size"])
    deep = [f"deepstack_merger_list.{n}" for n in range(len(vision["deepstack_visual_indexes"]))]
    for part in ("merger", *deep):
        weights.norm(f"{name}.{part}.norm", hidden if part == "merger" else merged)
        weights.linear(f"{name}.{part}.linear_fc1", merged, merged)
        weights.linear(f"{name}.{part}.linear_fc2", out, merged)


def mllama_weights(seed: int = 5) -> dict[str, np.ndarray]:
    """Returns random weights by tensor name, as in released files of Llama 3.2 Vision."""
    weights = Weights(seed)
    text, name = MLLAMA["text_config"], "language_model.model"
    hidden, width, heads, kv, dim = text["hidden_size"], text["intermediate_size"], 4, 2, 16
    weights.add(f"{name}.embed_tokens.weight", text["vocab_size"] + 8, hidden, scale=0.5)
    for layer in range(text["num_hidden_layers"]):
        inner = f"{name}.layers.{layer}"
        crossed = layer in text["cross_attention_layers"]
        attention = f"{inner}.{'cross_attn' if crossed else 'self_attn'}"
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights.rms_norm(f"{inner}.{part}", hidden)
        for part, count in (("q", heads), ("k", kv), ("v", kv)):
            weights.add(f"{attention}.{part}_proj.weight", count * dim, hidden)
        weights.add(f"{attention}.o_proj.weight", hidden, heads * dim)
        if crossed:
            weights.rms_norm(f"{attention}.q_norm", dim)
            weights.rms_norm(f"{attention}.k_norm", dim)
            weights.add(f"{inner}.cross_attn_attn_gate", 1, scale=0.8)
            weights.add(f"{inner}.cross_attn_mlp_gate", 1, scale=0.8)
        for part in ("gate", "up"):
            weights.add(f"{inner}.mlp.{part}_proj.weight", width, hidden)
        weights.add(f"{inner}.mlp.down_proj.weight", hidden, width)
    weights.rms_norm(f"{name}.norm", hidden)
    weights.add("language_model.lm_head.weight", text["vocab_size"], hidden, scale=0.4)
    _add_mllama_tower(weights)
    weights.linear("multi_modal_projector", hidden, MLLAMA_VISION["vision_output_dim"])
    return dict(weights)


def _add_mllama_tower(weights: Weights) -> None:
    vision, name = MLLAMA_VISION, "vision_model"
    hidden, patch, tiles = vision["hidden_size"], vision["patch_size"], vision["max_num_tiles"]
    ratios = len(vision["supported_aspect_ratios"]) + 1
    tokens = (vision["image_size"] // patch) ** 2 + 1
    weights.add(f"{name}.patch_embedding.weight", hidden, 3, patch, patch, scale=0.2)
    weights.add(f"{name}.class_embedding", hidden, scale=0.5)
    inner = f"{name}.gated_positional_embedding"
    weights.add(f"{inner}.gate", 1, scale=0.8)
    weights.add(f"{inner}.embedding", tokens, hidden, scale=0.5)
    weights.add(f"{inner}.tile_embedding.weight", ratios, tiles * tokens * hidden, scale=0.5)
    for weight in ("pre", "post"):
        inner = f"{name}.{weight}_tile_positional_embedding"
        weights.add(f"{inner}.gate", 1, scale=0.8)
        weights.add(f"{inner}.embedding.weight", ratios, tiles * hidden, scale=0.5)
    weights.norm(f"{name}.layernorm_pre", hidden)
    weights.norm(f"{name}.layernorm_post", hidden)
    for part, layers in (
        ("transformer", vision["num_hidden_layers"]),
        ("global_transformer", vision["num_global_layers"]),
    ):
        for layer in range(layers):
            inner = f"{name}.{part}.layers.{layer}"
            weights.norm(f"{inner}.input_layernorm", hidden)
            weights.norm(f"{inner}.post_attention_layernorm", hidden)
            for weight in "qkvo":
                weights.add(f"{inner}.self_attn.{weight}_proj.weight", hidden, hidden)
            weights.linear(f"{inner}.mlp.fc1", vision["intermediate_size"], hidden)
            weights.linear(f"{inner}.mlp.fc2", hidden, vision["intermediate_size"])
            if part == "global_transformer":
                weights.add(f"{inner}.gate_attn", 1, scale=0.8)
                weights.add(f"{inner}.gate_ffn", 1, scale=0.8)


def write_mllama(
    path: Path,
    weights: Mapping[str, np.ndarray] | None = None,
    preprocessor: Mapping[str, Any] | None = MLLAMA_PREPROCESSOR,
    **changes: Any,
) -> Path:
    """Writes the folder of a Llama 3.2 Vision; `changes` are keys of config.json."""
    weights_ = mllama_weights() if weights is None else weights
    config = {**MLLAMA, **changes}
    return _write(path, config, weights_, preprocessor, (MLLAMA_IMAGE,), MLLAMA_TEMPLATE)


def write_qwen(
    path: Path,
    weights: Mapping[str, np.ndarray] | None = None,
    preprocessor: Mapping[str, Any] | None = QWEN_PREPROCESSOR,
    **changes: Any,
) -> Path:
    """Writes the folder of a Qwen3-VL; `changes` are keys of config.json."""
    weights_ = qwen_weights() if weights is None else weights
    return _write(path, {**QWEN, **changes}, weights_, preprocessor, QWEN_TOKENS, QWEN_TEMPLATE)


def write_gemma(
    path: Path,
    weights: Mapping[str, np.ndarray] | None = None,
    preprocessor: Mapping[str, Any] | None = PREPROCESSOR,
    **changes: Any,
) -> Path:
    """Writes the folder of a Gemma 3 that reads images; `changes` are keys of config.json."""
    weights_ = gemma_weights() if weights is None else weights
    return _write(path, {**GEMMA, **changes}, weights_, preprocessor, (BEGIN, SLOT, END))


def _write(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    preprocessor: Mapping[str, Any] | None,
    tokens: Sequence[str],
    template: str = GEMMA_TEMPLATE,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    if preprocessor is not None:
        write_json(path / "preprocessor_config.json", preprocessor)
    add_tokens(path, tokens, template)
    write_weights(path, dict(weights))
    return path


def add_tokens(path: Path, texts: Sequence[str], template: str) -> None:
    """Writes a tokenizer with further special tokens, and a chat template."""
    write_tokenizer(path, {"chat_template": template})
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts])
    tokenizer.save(str(path / "tokenizer.json"))


def parts_of(prompt: Sequence[str | int]) -> list[dict[str, Any]]:
    """Returns the content parts of a message: texts, and images by the numbers of their blobs."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "blob": part}
        for part in prompt
    ]
