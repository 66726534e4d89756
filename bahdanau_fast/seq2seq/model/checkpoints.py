"""Checkpoints: written atomically, read without running code from the file."""

from __future__ import annotations

import os
import pickle
import textwrap
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bahdanau_fast import checks

BEST, LAST = "best.pt", "last.pt"

_FORMAT = 1
_COMPLETE = "be a complete file written by train"


def save(payload: dict[str, Any], path: Path) -> None:
    """Write tensors, numbers, strings, lists and dicts; a kill leaves the old or the new file."""
    beside = path.with_name(path.name + ".tmp")
    try:
        with beside.open("wb") as file:
            torch.save({"format": _FORMAT, **payload}, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        beside.unlink(missing_ok=True)
        checks.reject(ValueError, "checkpoint", "be written", f"{path} ({error.strerror or error})")
    beside.replace(path)
    if os.name == "posix":  # sync the rename too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint; nothing in the file can run code (``weights_only=True``)."""
    try:
        payload = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        checks.reject(ValueError, "checkpoint", "exist", f"{path} (no such file)")
    except Exception as error:  # torch and zipfile raise a dozen kinds for a broken file
        checks.reject(ValueError, "checkpoint", _COMPLETE, f"{path} ({_fault(path, error)})")
    if not isinstance(payload, dict) or payload.get("format") != _FORMAT:
        actual = payload.get("format") if isinstance(payload, dict) else type(payload).__name__
        need = f"be written by train, in format {_FORMAT}"
        checks.reject(ValueError, "checkpoint", need, f"{path} ({actual})")
    return payload


def _fault(path: Path, error: Exception) -> str:
    """Why torch does not load a file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    with path.open("rb") as file:
        head = file.read(2)
    if head == b"PK" and not zipfile.is_zipfile(path):
        return "cut off"
    if head not in (b"PK", b"\x80\x02"):  # as files of torch begin, today and before 1.6
        return "another kind of file"
    if isinstance(error, pickle.UnpicklingError):  # its message tells how to run what is in there
        return "not of tensors, numbers, strings, lists and dicts alone; nothing in it was run"
    return textwrap.shorten(str(error), 100) or type(error).__name__


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Around the use of a checkpoint: a ValueError says what is missing or of another kind."""
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        lack = "without" if isinstance(error, KeyError) else "its contents do not fit:"
        reason = f"{path} ({lack} {textwrap.shorten(str(error), 200)})"
        checks.reject(ValueError, "checkpoint", _COMPLETE, reason)


def last_validation(path: Path) -> dict[str, Any] | None:
    """The validation of the last epoch in a checkpoint; None without the file."""
    with fitting(path):
        return load(path)["validations"][-1] if path.is_file() else None


def find(where: Path) -> Path:
    """The best checkpoint of a folder, or the last if there is no best one; or a file itself."""
    if where.is_file():
        return where
    for name in (BEST, LAST):
        if (where / name).is_file():
            return where / name
    need = f"hold {BEST} or {LAST}, as written by train"
    checks.reject(ValueError, "DIR", need, f"{where}{'' if where.exists() else ' (not there)'}")
