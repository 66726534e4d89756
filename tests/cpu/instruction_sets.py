"""The instruction sets that CPU kernels are compiled for."""

from contextlib import contextmanager

import pytest

extension = pytest.importorskip("bahdanau_fast._C_cpu")


@contextmanager
def using(name):
    """Kernels for an instruction set, and then those of before."""
    before = extension.instruction_set()
    extension.set_instruction_set(name)
    try:
        yield
    finally:
        extension.set_instruction_set(before)


def sets():
    """The names this processor takes."""
    found = []
    for name in ("baseline", "avx2", "avx512"):
        try:
            with using(name):
                found.append(name)
        except ValueError:
            continue
    return found
