"""Packages that only an extra of this package installs."""

import importlib
from typing import Any

__all__ = ["require"]


def require(module: str, what: str, extra: str) -> Any:
    """Import a module, or say which extra brings it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        need = f'{what} {module}: pip install "bahdanau_fast[{extra}]"'
        raise ModuleNotFoundError(need) from error
