"""Two processes of a module in this folder, and what they print."""

import os
import subprocess
import sys
from pathlib import Path


def two_ranks(module, folder, timeout=180):
    """Run ``python -m MODULE RANK FILE``, twice at once; (output, errors) of each.

    The two find each other by the file, which is in ``folder``.
    """
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), folder / "meeting"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
