"""Mistakes in machine code, planted where a line of the source is."""

import re

from ptx_machine import build
from ptx_machine.parse import Module

__all__ = ["changed", "line_of"]


def line_of(file, after, word):
    """The line of the first ``word`` from a piece of text on, which a kernel's file has once."""
    text = (build.SOURCES / "cuda" / "kernels" / file).read_text()
    assert text.count(after) == 1, f"{file} has changed: plant the mistake elsewhere"
    return text[: text.index(word, text.index(after))].count("\n") + 1


def changed(opcode, file, line, new=""):
    """A function that puts ``new`` in the place of what instructions of a line of a file begin with
    in PTX; without it, they go."""
    place = re.compile(rf"(?<!\w){re.escape(file)}:{line}(?!\d)")

    def change(text):
        module, lines = Module(text), text.splitlines()
        for entry in map(module.entry, module.names):
            for found, at, places in zip(entry.opcodes, entry.lines, entry.places, strict=True):
                if found.startswith(opcode.split()[0]) and place.search(places):
                    lines[at - 1] = lines[at - 1].replace(opcode, new) if new else ""
        assert lines != text.splitlines(), f"no {opcode} of {file}:{line}"
        return "\n".join(lines)

    return change
