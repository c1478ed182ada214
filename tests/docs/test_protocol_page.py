"""The worked example of docs/protocol.md: a broker answers its bytes as the page says."""

from __future__ import annotations

from pathlib import Path

from mlxpool.common.protocol import frames
from mlxpool.common.protocol.frames import Header, Message
from support import kinds
from support.doc_blocks import blocks
from support.pool import Pool
from support.raw_peer import RawPeer

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")
PARTS = [bytes.fromhex(block.text) for block in blocks(PAGE) if block.kind == "hex"]
ID = bytes(range(16))
BOOT = 0x0010E1F0A1B2C3D4


def test_a_broker_answers_the_bytes_of_the_page(tmp_path: Path) -> None:
    answers: list[Message] = []
    with Pool(tmp_path) as pool, RawPeer(pool.run_dir) as peer:
        peer.send(PARTS[:2])
        while not answers or answers[-1].kind != kinds.DONE:
            answers.append(peer.receive())
    assert answers.pop(0).kind == kinds.ACCEPTED
    ids = [answer.blobs[0] for answer in answers if answer.blobs]
    assert b"".join(ids) == bytes.fromhex("504b0000fd1c0000")
    text = "".join(answer.body["text"] for answer in answers)
    assert text == "19280 7421 " and answers[-1].body["reason"] == "length"
    assert answers[-1].header.pos == 2 and {answer.header.id for answer in answers} == {ID}


def test_the_other_bytes_of_the_page_are_a_delta() -> None:
    """The example: a delta of the first token, without facts."""
    header = Header(kinds.DELTA, ID, BOOT, 1, 0)
    assert frames.encode(header, {"text": "19280 ", "n": 1}, [PARTS[4]]) == PARTS[2:]
    assert PARTS[4] == (19280).to_bytes(4, "little")
