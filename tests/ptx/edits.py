"""Mistakes planted in PTX: in the machine code of one line of the source, where it stands."""

from __future__ import annotations

import re

from machine import build

__all__ = ["edited", "line_of"]

_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+))?")


def line_of(file, after, word):
    """The line of the first ``word`` from a piece of text on, which a kernel's file has once."""
    text = (build.SOURCES / "cuda" / "kernels" / file).read_text()
    assert text.count(after) == 1, f"{file} has changed: plant the mistake elsewhere"
    return text[: text.index(word, text.index(after))].count("\n") + 1


def edited(file, line, old, new=""):
    """A function that puts ``new`` where ``old`` begins an instruction of a line of a file.

    The place of an instruction is where it stands, and where that was called.
    """

    def change(text):
        names = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"]*)"', text, re.MULTILINE))
        lines, here, count = text.splitlines(), False, 0
        for at, code in enumerate(lines):
            if place := _LOC.match(code):
                pairs = (place[1], place[2]), (place[3], place[4])
                here = any(f and names[f] == file and int(row) == line for f, row in pairs)
            elif here and code.strip().startswith(old):
                lines[at] = code.replace(old, new) if new else ""
                count += 1
        assert count, f"no {old} of {file}:{line}"
        return "\n".join(lines)

    return change
