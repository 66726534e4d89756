"""Checkpoints: written whole or not at all, read without running any code in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from bahdanau_fast import checks

__all__ = ["BEST", "LAST", "find", "load", "save"]

BEST, LAST = "best.pt", "last.pt"

_FORMAT = 1


def save(payload: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that a kill at any moment leaves the old or the new one.

    It is written beside ``path``, brought to the disk, then renamed over it.

    Args:
        payload: tensors, numbers, words, lists and dicts of them.
        path: its folder exists.
    """
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        torch.save({"format": _FORMAT, **payload}, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    if os.name == "posix":  # the rename too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint; nothing in the file can run code (``weights_only=True``).

    Args:
        path: of the file.
        device: where its tensors go.

    Raises:
        ValueError: there is none, or it is not one of ours.
    """
    try:
        payload = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        checks.reject(ValueError, "checkpoint", "exist", f"{path} (no such file)")
    except Exception as error:  # torch, zipfile and pickle raise a dozen kinds for a broken file
        lines = str(error).strip().splitlines()
        reason = f"{path} ({lines[0] if lines else type(error).__name__})"
        checks.reject(ValueError, "checkpoint", "be a whole one that train wrote", reason)
    if not isinstance(payload, dict) or payload.get("format") != _FORMAT:
        found = payload.get("format") if isinstance(payload, dict) else type(payload).__name__
        need = f"be one that train wrote, of format {_FORMAT}"
        checks.reject(ValueError, "checkpoint", need, f"{path} ({found})")
    return payload


def find(where: Path) -> Path:
    """The best checkpoint of a training's folder, or the last where no best one is there.

    Args:
        where: the folder, or a checkpoint itself.

    Raises:
        ValueError: there is none.
    """
    if where.is_file():
        return where
    for name in (BEST, LAST):
        if (where / name).is_file():
            return where / name
    need = f"hold a training ({BEST} or {LAST}, as train writes them)"
    checks.reject(ValueError, "DIR", need, f"{where}{'' if where.exists() else ' (not there)'}")
