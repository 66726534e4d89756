"""Mistakes in machine code, planted where a line of the source is."""

import re
from collections.abc import Callable

from .parse import Module


def changed(opcode: str, file: str, line: int, new: str = "") -> Callable[[str], str]:
    """A function that puts ``new`` where instructions of a source line begin with ``opcode``.

    It takes and gives PTX. Without ``new`` the instructions go.
    """
    place = re.compile(rf"(?<!\w){re.escape(file)}:{line}(?!\d)")

    def change(text: str) -> str:
        module, lines = Module(text), text.splitlines()
        for entry in map(module.entry, module.names):
            for found, at, places in zip(entry.opcodes, entry.lines, entry.places, strict=True):
                if found.startswith(opcode.split(maxsplit=1)[0]) and place.search(places):
                    lines[at - 1] = lines[at - 1].replace(opcode, new) if new else ""
        assert lines != text.splitlines(), f"no {opcode} of {file}:{line}"
        return "\n".join(lines)

    return change
