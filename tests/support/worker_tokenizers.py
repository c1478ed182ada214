"""A small tokenizer of each family, with the components of released tokenizers."""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

TEXT = [
    "The quick brown fox jumps over the lazy dog. It doesn't, does it?",
    "né 𝄞 こんにちは, and the fox's dog; I'm here! They've gone.",
    "for i in range(10):\n    print(i)  # 3.14",
]
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>")
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"


def byte_level() -> Tokenizer:
    """Returns a tokenizer like Llama 3's, Qwen's and GPT's: bytes as printable characters."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, show_progress=False, special_tokens=list(SPECIAL)
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def sentencepiece(strip: bool = True) -> Tokenizer:
    """Returns a tokenizer like Llama 2's and Mistral's; without `strip` like Gemma's."""
    words = ["▁", "▁the", "▁fox", "The", "quick", "re", "▁▁", "n", "é", "▁do", "e", "h", "t", "T"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "▁")]
    tokenizer = Tokenizer(
        BPE(
            {piece: id for id, piece in enumerate(pieces)},
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if strip else spaces
    )
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        chain.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(chain)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def unigram() -> Tokenizer:
    """Returns a tokenizer like T5's: scores instead of merges, spaces by Metaspace."""
    words = ["▁", "▁the", "▁fox", "a", "b", "▁a▁b", "こ", "fox", "ing", "▁▁"]
    tokenizer = Tokenizer(Unigram([("<unk>", 0.0), *((word, -2.0) for word in words)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """Returns a tokenizer like BERT's: whole words, continuations with ##, cleaned-up text."""
    words = ["the", "fox", "##es", "##s", ".", ",", "!", "'", "n't", "'s", "do", "not", "##'re"]
    vocab = {word: id for id, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def words() -> Tokenizer:
    """Returns a tokenizer of whole words, without a decoder."""
    tokenizer = Tokenizer(WordLevel({"the": 0, "fox": 1, "dog": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
