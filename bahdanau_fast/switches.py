"""What can be switched off on a GPU, where it is wrong or hangs: something else computes then.

``BAHDANAU_FAST_OFF=one-launch,waves`` is read once, when the package is imported.
``bahdanau-fast check`` says what to switch off, ``backends.explain`` what is.
"""

from __future__ import annotations

import os
import warnings

VARIABLE = "BAHDANAU_FAST_OFF"
#: What each is, and what computes in its place.
SWITCHES = {
    "cuda": ("CUDA C++", "Triton"),
    "clusters": ("parts of a step of CUDA C++ that meet in a cluster", "a second launch"),
    "one-launch": ("all steps of a decoder in one launch", "launches for each step"),
    "triton": ("Triton", "plain PyTorch"),
    "terms": ("scores of many queries in 16 bits on tensor cores", "tanh, one by one"),
    "waves": ("gradients of many queries in 16 bits on tensor cores", "tanh, one by one"),
    "kept-launches": ("launches of Triton kept for the next call", "new ones at each call"),
}


def _read() -> frozenset[str]:
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    for name in sorted(names - set(SWITCHES)):
        warnings.warn(
            f"bahdanau_fast: {VARIABLE} must name some of {', '.join(SWITCHES)}, got {name!r}, "
            "which switches nothing off",
            RuntimeWarning,
            stacklevel=2,
        )
    return frozenset(names & set(SWITCHES))


#: The names that are off.
OFF = _read()


def is_off(name: str) -> bool:
    """Whether one of :data:`SWITCHES` is off."""
    return name in OFF


def why_off(name: str) -> str | None:
    """What is said of one that is off; None of one that is on."""
    return f"switched off by {VARIABLE}={name}" if is_off(name) else None
