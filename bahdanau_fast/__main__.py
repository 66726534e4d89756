"""``python -m bahdanau_fast``."""

import sys

from bahdanau_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
