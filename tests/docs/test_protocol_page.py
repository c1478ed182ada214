"""The worked example of docs/protocol.md: a broker answers its bytes as the page says."""

from __future__ import annotations

from pathlib import Path

from mlxpool.common.protocol.frames import Message
from support import kinds
from support.doc_blocks import blocks
from support.pool import Pool
from support.raw_peer import RawPeer

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")
PARTS = [bytes.fromhex(block.text) for block in blocks(PAGE) if block.kind == "hex"]
ID = bytes(range(16))


def test_a_broker_answers_the_bytes_of_the_page(tmp_path: Path) -> None:
    answers: list[Message] = []
    with Pool(tmp_path) as pool, RawPeer(pool.run_dir) as peer:
        peer.send(PARTS)
        while not answers or answers[-1].kind != kinds.DONE:
            answers.append(peer.receive())
    assert answers.pop(0).kind == kinds.ACCEPTED
    ids = [answer.blobs[0] for answer in answers if answer.blobs]
    assert b"".join(ids) == bytes.fromhex("504b0000fd1c0000")
    text = "".join(answer.body["text"] for answer in answers)
    assert text == "19280 7421 " and answers[-1].body["reason"] == "length"
    assert answers[-1].header.pos == 2 and {answer.header.id for answer in answers} == {ID}
