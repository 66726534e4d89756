"""Two processes of a program, and what they print."""

import subprocess
import sys
from pathlib import Path


def two_ranks(program, folder, timeout=180):
    """Run ``python PROGRAM RANK FILE``, twice at once; (output, errors) of each.

    The two find each other by the file, which is in ``folder``.
    """
    path = Path(__file__).with_name(program)
    ranks = [
        subprocess.Popen(
            [sys.executable, path, str(rank), folder / "meeting"],
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
