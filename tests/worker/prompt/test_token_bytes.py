"""Tests the bytes of tokens against the tokenizer's own decoder, in each family of tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.prompt.token_bytes import TokenBytes
from support import worker_tokenizers as zoo

FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte level": zoo.byte_level,
    "sentencepiece": zoo.sentencepiece,
    "sentencepiece as gemma": lambda: zoo.sentencepiece(strip=False),
    "unigram": zoo.unigram,
    "word piece": zoo.word_piece,
    "words without a decoder": zoo.words,
}
TOKENIZERS = {name: make() for name, make in FAMILIES.items()}
PIECES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
CHARACTERS = ("é", "こ", "𝄞", "A", "\n")


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    token = tokenizer.token_to_id(piece)
    assert token is not None, piece
    return token


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Returns a strategy for random ids.

    Ids of byte tokens occur only in groups that form a whole character.
    """
    tokenizer = TOKENIZERS[name]
    ids = range(tokenizer.get_vocab_size())
    plain = [id for id in ids if not str(tokenizer.id_to_token(id)).startswith("<0x")]
    groups = [[id] for id in plain]
    if len(plain) < len(ids):
        spelled = ([f"<0x{byte:02X}>" for byte in char.encode()] for char in CHARACTERS)
        groups += [[id_of(tokenizer, piece) for piece in group] for group in spelled] * 5
    return st.lists(st.sampled_from(groups), max_size=12).map(lambda parts: list(chain(*parts)))


def own(name: str, ids: list[int]) -> str:
    return str(TOKENIZERS[name].decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whole_equals_the_tokenizers_decode(name: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(name))
    assert PIECES[name].whole(ids) == own(name, ids)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_streamed_completion_equals_the_decode_after_its_prompt(
    name: str, data: st.DataObject
) -> None:
    prompt = TOKENIZERS[name].encode("the fox", add_special_tokens=False).ids
    ids = data.draw(ids_of(name))
    completion = Detokenizer(PIECES[name].__getitem__, ())
    streamed = "".join([completion.push(token) for token in ids]) + completion.finish()
    assert PIECES[name].whole(prompt) + streamed == own(name, prompt + ids)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", ["the fox", "the", " the  fox", "", "née"])
def test_text_there_and_back(name: str, text: str) -> None:
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    assert PIECES[name].whole(ids) == own(name, ids)


def test_the_first_space_is_stripped_from_a_text_but_not_a_completion() -> None:
    tokenizer, pieces = TOKENIZERS["sentencepiece"], PIECES["sentencepiece"]
    the, space = id_of(tokenizer, "▁the"), id_of(tokenizer, "▁")
    assert pieces.whole([the, the]) == "the the"
    assert pieces.whole([space, the]) == " the", "one space only"
    assert pieces[the] == b" the"
    assert PIECES["sentencepiece as gemma"].whole([the]) == " the"


def test_word_piece_joins_and_cleans_up() -> None:
    tokenizer, pieces = TOKENIZERS["word piece"], PIECES["word piece"]
    ids = tokenizer.encode("The foxes don't, the fox's.", add_special_tokens=False).ids
    assert pieces.whole(ids) == own("word piece", ids)
    fox, plural = id_of(tokenizer, "fox"), id_of(tokenizer, "##es")
    assert pieces.whole([plural, fox, plural]) == "##es foxes"


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_every_byte_has_a_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "sentencepiece":
        ids = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in range(256)]
        assert [PIECES[name][id] for id in ids] == [bytes([byte]) for byte in range(256)]
    else:
        chars = set(pre_tokenizers.ByteLevel.alphabet())
        pieces = [PIECES[name][id_of(tokenizer, char)] for char in chars]
        assert sorted(pieces) == [bytes([byte]) for byte in range(256)]


def test_bytes_that_are_no_text() -> None:
    tokenizer, pieces = TOKENIZERS["sentencepiece"], PIECES["sentencepiece"]
    broken = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in (0x41, 0xE3, 0x81)]
    assert pieces.whole(broken) == "A\ufffd", "the character beside them stays"
    assert own("sentencepiece", broken) == "\ufffd" * 3


def test_added_tokens_stand_for_their_text() -> None:
    tokenizer = zoo.sentencepiece()
    tokenizer.add_tokens(["a▁b", "<0x4A>x"])
    tokenizer.add_special_tokens(["<|end▁of▁turn|>"])
    pieces = TokenBytes(tokenizer)
    for text in ("a▁b", "<0x4A>x", "<|end▁of▁turn|>"):
        assert pieces[id_of(tokenizer, text)] == text.encode()


def test_unknown_ids_have_no_text() -> None:
    for pieces in PIECES.values():
        assert [pieces[id] for id in (-1, 10**6, 2**31, 2**40)] == [b""] * 4
        assert pieces.whole([10**6]) == pieces.whole([]) == ""


def test_byte_level_is_inferred_from_the_pre_tokenizer() -> None:
    tokenizer = zoo.byte_level()
    tokenizer.decoder = None
    ids = tokenizer.encode("né").ids
    assert TokenBytes(tokenizer).whole(ids) == "né"


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (decoders.CTC(), "not supported.*CTC"),
        (decoders.BPEDecoder(), "not supported.*BPEDecoder"),
        (decoders.Replace(Regex("a+"), "b"), "only plain text.*Regex"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "not supported.*Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "supported.*Replace"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_named(decoder: object, words: str) -> None:
    tokenizer = zoo.words()
    tokenizer.decoder = decoder  # type: ignore[assignment]
    with pytest.raises(ModelLoadFailed, match=words):
        TokenBytes(tokenizer)
