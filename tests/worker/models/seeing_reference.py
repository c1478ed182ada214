"""Writes into expected/ what transformers answers to the models of support/seeing_models.py.

Run it in an environment of its own, from the folder tests/:

    python3.11 -m venv REF
    REF/bin/pip install torch==2.13.0 transformers==VERSION pillow numpy tokenizers safetensors
    PYTHONPATH=.:../common:../worker:../broker REF/bin/python worker/models/seeing_reference.py

The file that it writes names the versions it was made with. The tests need none of them.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
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
        """Without the processor of videos, which needs torchvision."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
            return type(argument)

    processor = Processor(images, tokenizer, images, chat_template=seeing.QWEN_TEMPLATE)
    return _answers(torch, model, processor)


def _answers(torch: Any, model: Any, processor: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
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
        found[f"prompt_{number}"] = inputs["input_ids"][0].numpy().astype(np.int32)
        found[f"ids_{number}"] = ids.numpy().astype(np.int32)
        chosen = logprobs.gather(1, ids[:, None])[:, 0]
        found[f"logprobs_{number}"] = chosen.numpy()
        found[f"first_{number}"] = logprobs[0].numpy().astype(np.float32)
        if number == 1:
            with torch.no_grad():
                features = model.get_image_features(
                    **{
                        key: inputs[key]
                        for key in inputs
                        if key in ("pixel_values", "image_grid_thw")
                    },
                    return_dict=True,
                ).pooler_output
            every = [*features]
            found["features_0"], found["features_1"] = (one.numpy() for one in every[:2])
    return found


def main() -> int:
    """Writes one file for each model."""
    versions = [
        f"{name} {importlib.import_module(name).__version__}"
        for name in ("torch", "transformers", "numpy", "PIL", "tokenizers", "safetensors")
    ]
    for name, answers in (("gemma3", gemma), ("qwen3_vl", qwen)):
        with tempfile.TemporaryDirectory() as folder:
            found = answers(Path(folder))
        file = seeing.EXPECTED / f"{name}_images.npz"
        np.savez_compressed(file, versions=np.array(versions), **found)
        print(file, file.stat().st_size, "bytes,", *versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
