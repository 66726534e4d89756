"""``python -m benchmarks``: the same as ``python -m bahdanau_fast bench``."""

import sys

from bahdanau_fast.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
