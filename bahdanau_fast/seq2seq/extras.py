"""Packages that only an extra of this package installs."""

import importlib
from typing import Any


def require(module: str, what: str) -> Any:
    """Import a module, or say how it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(f"{what} {module}: pip install {module}") from error
