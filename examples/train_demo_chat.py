"""Train demo-chat: a small chat model that calls tools, thinks if asked, counts and repeats.

All training text is drawn by examples/demo_chat/: conversations with tools whose names, parameters
and values are mostly invented words, so that the model has to copy them from its prompt. Test
conversations are drawn from other words.

    python examples/train_demo_chat.py --out FOLDER [--backend torch]

With the same seed and back end the run is the same on one machine. MLX needs no further package;
PyTorch takes a third of the time on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from demo_chat.batches import batches, drawn_ahead
from demo_chat.conversations import conversations
from demo_chat.forward import expected
from demo_chat.judging import judge, table
from demo_chat.template import CHAT_TEMPLATE, END, segments
from demo_chat.tokenizer import train_tokenizer
from demo_chat.training import Plan, Train
from demo_chat.weights import Shape, Weights, initial, load, parameters, save_weights

DEMO = Path(__file__).resolve().parent.parent / "worker" / "mlxpool" / "worker" / "demo_chat"
TOKENIZER = DEMO / "tokenizer.json"
TOKENIZER_SEED, TOKENIZER_CONVERSATIONS = 10**6, 6000
SHOWN = 250  # steps after which the loss is printed
SAVED = 1000  # steps after which the model is saved, for a test or a new start


def tokenizer_of(shape: Shape) -> Tokenizer:
    """Returns a tokenizer, trained on conversations like the model's."""
    drawn = islice(conversations(TOKENIZER_SEED), TOKENIZER_CONVERSATIONS)
    texts = ("".join(text for text, _ in segments(conversation)) for conversation in drawn)
    return train_tokenizer(texts, shape.vocab)


def make(
    folder: Path,
    shape: Shape,
    plan: Plan,
    backend: str,
    start: Path | None,
    drawers: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Trains a new model, or the model in `start`; saves it in `folder` and returns the report.

    `drawers`: the number of processes that draw conversations; 0 means this process.
    """
    train: Train = importlib.import_module(f"demo_chat.training_{backend}").train
    before: list[Any] = []
    if start is None:
        weights = initial(shape, plan.seed)
    else:
        tokenizer, weights = load(start)
        before = json.loads((start / "training.json").read_text("utf-8"))["runs"]
    given = (tokenizer, plan.seed, plan.tokens, plan.longest)
    drawn = drawn_ahead(*given, drawers) if drawers else batches(*given)
    began = time.monotonic()
    mean = 0.0

    def watch(step: int, loss: float, weights: Callable[[], Weights]) -> None:
        nonlocal mean
        mean = loss if step == 1 else 0.98 * mean + 0.02 * loss
        if step % SHOWN == 0 or step == 1:
            say(f"{time.monotonic() - began:7.1f} s  step {step}  {mean:.4f} nats")
        if step % SAVED == 0 and step < plan.last:
            save(folder, shape, tokenizer, weights())
            write_json(folder / "training.json", report(step, mean))

    def report(steps: int, loss: float) -> dict[str, Any]:
        run = {
            **asdict(plan),
            "steps_done": steps,
            "loss": round(loss, 4),
            "seconds": round(time.monotonic() - began),
            "backend": f"{backend} {version(backend)}",
            "python": platform.python_version(),
            "processor": platform.machine(),
        }
        return {"parameters": parameters(weights), "runs": [*before, run]}

    weights = train(weights, shape, plan, drawn, watch)
    save(folder, shape, tokenizer, weights)
    return report(plan.last, mean)


def average(folder: Path, shape: Shape, first: Path, second: Path, share: float) -> dict[str, Any]:
    """Saves the average of two models' weights; the second model has the weight `share` (0 to 1).

    Uses the tokenizer of the first model. Returns the second model's report, with `share` added.
    """
    tokenizer, weights = load(first)
    _, others = load(second)
    mixed = {name: (1 - share) * array + share * others[name] for name, array in weights.items()}
    save(folder, shape, tokenizer, mixed)
    report: dict[str, Any] = json.loads((second / "training.json").read_text("utf-8"))
    return {**report, "share_of_last_run": share}


def configuration(shape: Shape) -> dict[str, Any]:
    """Returns config.json, as other programs that read Llama folders expect it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_base,
        "rms_norm_eps": shape.epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "float16",
    }


def save(folder: Path, shape: Shape, tokenizer: Tokenizer, weights: Weights) -> None:
    """Writes the model in the Hugging Face layout, its weights rounded to float16."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, weights)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "config.json", configuration(shape))
    write_json(folder / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def judged(folder: Path, shape: Shape, count: int, misses: int) -> dict[str, Any]:
    """Returns figures of the saved model; prints some of its wrong answers."""
    tokenizer, weights = load(folder)
    results, missed = judge(partial(expected, weights, shape), tokenizer, count, shape.context)
    for miss in missed[:: max(len(missed) // max(misses, 1), 1)][:misses]:
        say(
            f"{miss.kind}\n  user     {miss.user}\n"
            f"  wanted   {miss.wanted}\n  written  {miss.written}"
        )
    return {"conversations": count, "right_of": results}


CARD = """# mlxpool demo-chat

A chat model with {parameters:,} parameters in the Llama architecture that calls tools, thinks if it
is asked to, counts, repeats and remembers a name. It exists so that mlxpool's examples run without
a download. It copies from its prompt and knows nothing else.

- **Data**: conversations drawn by `examples/train_demo_chat.py`, mostly of invented words. No other
  text.
- **Sizes**: {layers} layers, hidden {hidden}, feed-forward {feed_forward}, {heads} heads of {head}
  over {kv_heads} key-value heads, context {context:,}, tied embeddings, float16. Byte-level BPE of
  {vocab:,} tokens.
- **Chat**: ChatML, tools and calls in the format of Hermes, thoughts between `<think>` and
  `</think>`.
- **Test**: share of answers that are right to the last token at temperature 0, in {conversations}
  conversations of each kind that are drawn with other words:

{table}
How it was made: `docs/demo-model.md` in the project's repository. `training.json` has every figure.
"""


def write_card(folder: Path, shape: Shape, report: dict[str, Any]) -> None:
    """Writes README.md of the folder."""
    text = CARD.format(**asdict(shape), **report, table=table(report["right_of"]))
    (folder / "README.md").write_text(text, "utf-8")


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def say(line: str) -> None:
    """Reports progress immediately."""
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    plan = Plan()
    parser = argparse.ArgumentParser(description="Train mlxpool's demo-chat.")
    parser.add_argument("--out", type=Path, default=DEMO, help="folder of the model")
    parser.add_argument("--start", type=Path, help="folder of a model that is trained on")
    parser.add_argument("--backend", choices=("mlx", "torch"), default="mlx")
    parser.add_argument("--steps", type=int, default=plan.steps)
    parser.add_argument("--end", type=int, default=0, help="end after this step of them")
    parser.add_argument("--tokens", type=int, default=plan.tokens, help="of a step")
    parser.add_argument("--peak", type=float, default=plan.peak, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--new-tokenizer", action="store_true", help="else that of the demo")
    parser.add_argument("--drawers", type=int, default=0, help="processes that draw conversations")
    parser.add_argument("--average-with", type=Path, help="average --start with it; train nothing")
    parser.add_argument("--share", type=float, default=0.5, help="weight of --average-with, 0 to 1")
    parser.add_argument("--judge-only", action="store_true", help="train nothing")
    parser.add_argument("--conversations", type=int, default=400, help="of each test; 0: none")
    parser.add_argument("--misses", type=int, default=10, help="wrong answers to print")
    options = parser.parse_args()
    if options.average_with and not options.start:
        parser.error("--average-with needs --start, the model that it is averaged with")
    return options


def main() -> None:
    """Trains the model, judges it, and writes the report beside it."""
    args = arguments()
    shape, report = Shape(), args.out / "training.json"
    plan = Plan(args.steps, args.end, args.tokens, peak=args.peak, seed=args.seed)
    if args.judge_only:
        figures = json.loads(report.read_text("utf-8"))
    elif args.average_with:
        figures = average(args.out, shape, args.start, args.average_with, args.share)
        write_json(report, figures)
    else:
        new = args.new_tokenizer
        tokenizer = tokenizer_of(shape) if new else Tokenizer.from_file(str(TOKENIZER))
        figures = make(args.out, shape, plan, args.backend, args.start, args.drawers, tokenizer)
        write_json(report, figures)
    if not args.conversations:
        return
    figures |= judged(args.out, shape, args.conversations, args.misses)
    write_json(report, figures)
    write_card(args.out, shape, figures)
    say((args.out / "README.md").read_text("utf-8"))


if __name__ == "__main__":
    main()
