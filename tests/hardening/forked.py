"""Runs tests in forks of a process that has torch and pytest already: they start at once.

Reads a line of JSON for each run, pytest's arguments; writes one, [exit status, what was said].
"""

import json
import os
import signal
import sys
import tempfile

import hypothesis  # noqa: F401  these four are ready for every fork
import numpy  # noqa: F401
import pytest
import torch  # noqa: F401

LONGEST = 600  # seconds: a run that hangs is ended


def run(arguments):
    """The exit status, negative for a signal, and the output of pytest with these arguments."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = os.fork()
        if child == 0:
            signal.alarm(LONGEST)
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            status = pytest.main(arguments)
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read()


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
