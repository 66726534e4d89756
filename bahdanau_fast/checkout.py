"""Lets an installed package take the place of a source tree that was never built.

Python looks into the current folder first, so in a checkout it finds the sources, which have no
binary and no kernels/, before what was installed from them. Built in place (``pip install -e``) the
sources are what is installed. The package imports this module before all others.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def _installed() -> ModuleSpec | None:
    """The package that this one hides, where this one is a source tree without a build."""
    package = Path(__file__).resolve().parent
    # Built in place it holds the binary for the CPU, or why there is none.
    if not (package.parent / "setup.py").is_file() or any(package.glob("_C_cpu.*")):
        return None
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != package.parent]
    return PathFinder.find_spec(package.name, others)


_spec = _installed()
if _spec is not None and _spec.loader is not None:
    # The import in progress gives whoever asked for it what is here now.
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])
