"""Writes transformers' answers to the models of support/seeing_models.py into expected/.

Run it in an environment of its own, from the folder tests/:

    python3.11 -m venv REF
    REF/bin/pip install torch==2.13.0 transformers==VERSION pillow numpy tokenizers safetensors
    PYTHONPATH=.:../common:../worker:../broker REF/bin/python worker/models/seeing_reference.py

The written file names the versions of these packages. The tests do not need the packages.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from support import seeing_models as seeing


def gemma(folder: Path) -> dict[str, Any]:
    """The answers of Gemma 3."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    seeing.write_gemma(folder)
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    names = {"boi_token": seeing.BEGIN, "image_token": seeing.SLOT, "eoi_token": seeing.END}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=names,
    )
    settings = {
        key: value for key, value in seeing.PREPROCESSOR.items() if key != "image_processor_type"
    }
    module = importlib.import_module("transformers.models.gemma3.image_processing_pil_gemma3")
    processor = transformers.Gemma3Processor(
        module.Gemma3ImageProcessorPil(**settings),
        tokenizer,
        chat_template=seeing.GEMMA_TEMPLATE,
        image_seq_length=seeing.GEMMA["mm_tokens_per_image"],
    )
    return _answers(torch, model, processor)


def qwen(folder: Path) -> dict[str, Any]:
    """The answers of Qwen3-VL."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    seeing.write_qwen(folder)
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    begin, slot, end, video = seeing.QWEN_TOKENS
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={
            "image_token": slot,
            "video_token": video,
            "vision_start_token": begin,
            "vision_end_token": end,
        },
    )
    settings = {
        key: value
        for key, value in seeing.QWEN_PREPROCESSOR.items()
        if key not in ("image_processor_type", "do_pan_and_scan")
    }
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    images = module.Qwen2VLImageProcessorPil(**settings)

    class Processor(transformers.Qwen3VLProcessor):  # type: ignore[misc,name-defined]
        """Qwen3-VL's processor without its video processor, which needs torchvision."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
            return type(argument)

    processor = Processor(images, tokenizer, images, chat_template=seeing.QWEN_TEMPLATE)
    return _answers(torch, model, processor)


def mllama(folder: Path) -> dict[str, Any]:
    """Returns the expected answers of Llama 3.2 Vision.

    Two differences between transformers 5 and Meta's code are corrected. transformers takes the
    states after the layers in intermediate_layers_indices, Meta's code the states before them; so
    transformers gets the preceding layers. For tokens before the first image, transformers masks
    only the feed-forward; Meta's code also masks their attention, so the mask is added here.
    """
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    taken = [layer - 1 for layer in seeing.MLLAMA_VISION["intermediate_layers_indices"]]
    vision = {**seeing.MLLAMA_VISION, "intermediate_layers_indices": taken}
    seeing.write_mllama(folder, vision_config=vision)
    model = transformers.MllamaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    layers = [block for block in model.model.language_model.layers if hasattr(block, "cross_attn")]
    for layer in layers:
        _mask_tokens_before_images(layer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": seeing.MLLAMA_IMAGE},
    )
    settings = {
        key: value
        for key, value in seeing.MLLAMA_PREPROCESSOR.items()
        if key not in ("image_processor_type", "do_pan_and_scan")
    }
    module = importlib.import_module("transformers.models.mllama.image_processing_pil_mllama")
    processor = transformers.MllamaProcessor(
        module.MllamaImageProcessorPil(**settings), tokenizer, chat_template=seeing.MLLAMA_TEMPLATE
    )

    def features(inputs: Any) -> list[Any]:
        """Returns the keys and values of each image's tiles in each cross-attention layer."""
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        states = model.model.vision_model(**{name: inputs[name] for name in names})
        projections = model.model.multi_modal_projector(states.last_hidden_state)[0]
        tensors = []
        for number, tiles in enumerate(inputs["aspect_ratio_mask"][0].sum(-1).tolist()):
            image = projections[number, :tiles].flatten(0, 1)
            parts = []
            for attention in (layer.cross_attn for layer in layers):
                shape = -1, attention.num_key_value_heads, attention.head_dim
                parts.append(attention.k_norm(attention.k_proj(image).view(shape)).transpose(0, 1))
                parts.append(attention.v_proj(image).view(shape).transpose(0, 1))
            tensors.append(torch.stack(parts))
        return tensors

    return _answers(torch, model, processor, features)


def _mask_tokens_before_images(layer: Any) -> None:
    seen: list[Any] = []

    def remember(module: Any, args: Any, given: dict[str, Any]) -> None:
        seen[:] = [given["full_text_row_masked_out_mask"]]

    def masked(module: Any, args: Any, output: Any) -> Any:
        return (output[0] if seen[0] is None else output[0] * seen[0][:, 0], *output[1:])

    layer.register_forward_pre_hook(remember, with_kwargs=True)
    layer.cross_attn.register_forward_hook(masked)


def _answers(
    torch: Any, model: Any, processor: Any, features_of: Callable[[Any], list[Any]] | None = None
) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for number, prompt in enumerate(seeing.PROMPTS):
        images = [seeing.picture(part) for part in prompt if isinstance(part, int)]
        messages = [{"role": "user", "content": seeing.parts_of(prompt)}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(
            images=[images], text=[text], return_tensors="pt", add_special_tokens=False
        )
        with torch.no_grad():
            answer = model.generate(
                **inputs,
                max_new_tokens=seeing.STEPS,
                min_new_tokens=seeing.STEPS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        given = inputs["input_ids"].shape[1]
        logits = torch.stack(answer.logits)[:, 0]
        ids = answer.sequences[0, given:]
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        answers[f"prompt_{number}"] = inputs["input_ids"][0].numpy().astype(np.int32)
        answers[f"ids_{number}"] = ids.numpy().astype(np.int32)
        chosen = logprobs.gather(1, ids[:, None])[:, 0]
        answers[f"logprobs_{number}"] = chosen.numpy()
        answers[f"first_{number}"] = logprobs[0].numpy().astype(np.float32)
        if number == 1:
            with torch.no_grad():
                features = [*(features_of or partial(_image_features, model))(inputs)]
            answers["features_0"], answers["features_1"] = (
                tensor.numpy() for tensor in features[:2]
            )
    return answers


def _image_features(model: Any, inputs: Any) -> Any:
    names = [name for name in inputs if name in ("pixel_values", "image_grid_thw")]
    given = {name: inputs[name] for name in names}
    return model.get_image_features(**given, return_dict=True).pooler_output


MODELS = (("gemma3", gemma), ("mllama", mllama), ("qwen3_vl", qwen))


def main() -> int:
    """Writes one file for each model."""
    versions = [
        f"{name} {importlib.import_module(name).__version__}"
        for name in ("torch", "transformers", "numpy", "PIL", "tokenizers", "safetensors")
    ]
    for name, answers in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            arrays = answers(Path(folder))
        file = seeing.EXPECTED / f"{name}_images.npz"
        np.savez_compressed(file, versions=np.array(versions), **arrays)
        print(file, file.stat().st_size, "bytes,", *versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
