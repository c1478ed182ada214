"""Reads a kernel's registers and stack from the machine code of NVIDIA's compiler."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

INFO = b".nv.info"  # the section with the attributes of all kernels
WITH_WORDS = 4  # format of an attribute whose value is a symbol and a number
FRAME_SIZE, REGISTERS = 0x11, 0x2F  # attributes


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """The `registers` of a thread, and the bytes of its `stack`, to which registers are spilled."""

    registers: int
    stack: int


def needs_of(code: bytes) -> KernelNeeds:
    """Returns the registers and the stack of the only kernel in an ELF file.

    Raises KeyError if the file lacks one of these numbers.
    """
    attributes: dict[int, int] = {}
    for name, content in _sections(code):
        if name == INFO:
            attributes.update(_attributes(content))
    return KernelNeeds(attributes[REGISTERS], attributes[FRAME_SIZE])


def _sections(code: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the name and the content of each section of an ELF file of 64 bits."""
    (headers,) = struct.unpack_from("<Q", code, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", code, headers + size * n) for n in range(count)]
    names = sections[of_names][4]
    for name, _, _, _, begin, length in sections:
        at = names + name
        yield code[at : code.index(b"\0", at)], code[begin : begin + length]


def _attributes(content: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(content):
        how, what, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if how == WITH_WORDS:
            if what in (FRAME_SIZE, REGISTERS):
                yield what, struct.unpack_from("<II", content, at)[1]
            at += size
