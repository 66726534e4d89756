"""Ceilings of what makes the code hard to read: ``make lint`` runs this, and they only come down.

Words that stand for a thing without naming it, in code and comments of the package, the kernels and
the C++; indices into tuples whose places have no names; classes of one name; long functions and
files of Python.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = {
    **{"given": 60, "own": 70, "found": 50, "kept": 40, "made": 60, "asked": 40, "known": 20},
    **{"each": 190, "there": 80, "place": 50},
}
INDICES = re.compile(r"tensors\[\d|\bnumbers\[|call\[:")
INDEXED, LONG_FUNCTIONS, LONG_FILES = 0, 2, 0
LINES_OF_A_FUNCTION, LINES_OF_A_FILE = 60, 400


def main() -> int:
    """Print what is above its ceiling; 1 if anything is."""
    command = ["git", "ls-files", "bahdanau_fast", "kernels", "csrc"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {name: (ROOT / name).read_text() for name in listed.split()}
    words = Counter(re.findall(r"\b\w+\b", " ".join(texts.values()).lower()))
    above = [f"{w!r} stands {words[w]} times" for w, most in WORDS.items() if words[w] > most]

    def limited(what: str, lines: list[str], most: int) -> None:
        if len(lines) > most:
            above.append("\n  ".join([f"{len(lines)} {what}, at most {most}:", *lines]))

    lines = [(name, line) for name, text in texts.items() for line in text.splitlines()]
    indices = [f"{name}: {line.strip()}" for name, line in lines if INDICES.search(line)]
    limited("indices into tuples without names", indices, INDEXED)
    python = {name: text for name, text in texts.items() if name.endswith(".py")}
    nodes = [(name, node) for name, text in python.items() for node in ast.walk(ast.parse(text))]
    classes = Counter(node.name for _, node in nodes if isinstance(node, ast.ClassDef))
    limited("names of several classes", [name for name, n in classes.items() if n > 1], 0)
    long = [
        f"{name}: {node.name}"
        for name, node in nodes
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno - node.lineno >= LINES_OF_A_FUNCTION
    ]
    limited(f"functions of more than {LINES_OF_A_FUNCTION} lines", long, LONG_FUNCTIONS)
    large = [name for name, text in python.items() if text.count("\n") > LINES_OF_A_FILE]
    limited(f"files of more than {LINES_OF_A_FILE} lines", large, LONG_FILES)
    print("\n".join(above) or "every ceiling holds")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
