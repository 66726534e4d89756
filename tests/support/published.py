"""Attention modules of other packages, from their published files, which stay out of this tree.

Their wheels are downloaded once, without what they ask for, into ``build/peers``. Of a package only
the modules that its attention file imports are run, not the ``__init__`` files; whatever those
import and is not installed is replaced by a stub.
"""

import builtins
import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import tempfile
import types
import zipfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torch import nn

WHEELS = Path(__file__).parents[2] / "build" / "peers"
SECONDS = 120

RELEASES = {
    "d2l": "d2l==1.0.3",
    "speechbrain": "speechbrain==1.1.2",
    "espnet": "espnet==202511",
    "joeynmt": "joeynmt==2.3.0",
    "onmt": "OpenNMT-py==3.5.1",
    "allennlp": "allennlp==2.10.1",
    "rl4co": "rl4co==0.7.0",
    "TTS": "coqui-tts==0.28.0",
}


class UnavailableError(Exception):
    """A package that cannot be downloaded here; the message says why."""


class _Meta(type):
    """A class whose attributes are stubs too."""

    def __getattr__(cls, name):
        return _stub_of(name)


def _stub_of(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Meta(name, (), {"__init__": lambda self, *args, **kwargs: None})


def _stub(name):
    module = types.ModuleType(name)
    module.__getattr__ = _stub_of
    return module


class _Bare(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the folders of a wheel as packages without their ``__init__``."""

    def __init__(self, wheel):
        with zipfile.ZipFile(wheel) as archive:
            files = archive.namelist()
        self.wheel, self.folders = wheel, {str(Path(file).parent) for file in files}

    def find_spec(self, name, path=None, target=None):
        folder = name.replace(".", "/")
        if folder not in self.folders:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [f"{self.wheel}/{folder}"]
        return spec

    def create_module(self, spec):
        return _stub(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def _importing(wheel, top):
    """Imports from a wheel: what its modules import and is not there is a stub."""
    original = builtins.__import__

    def forgiving(name, importer=None, *rest, **named):
        try:
            return original(name, importer, *rest, **named)
        except ImportError:
            if (importer or {}).get("__name__", "").split(".")[0] != top:
                raise
            return _stub(name)

    def own():
        return {name: m for name, m in sys.modules.items() if name.split(".")[0] == top}

    known, path, meta = own(), list(sys.path), list(sys.meta_path)
    for name in known:
        del sys.modules[name]
    sys.path.append(str(wheel))
    sys.meta_path.insert(0, _Bare(wheel))
    builtins.__import__ = forgiving
    try:
        yield
    finally:
        builtins.__import__ = original
        sys.path[:], sys.meta_path[:] = path, meta
        sys.modules.update(known)  # a compiler looks the others up, too


def _download(top):
    """The wheel of a package: all are asked for at once, and alone what did not come with them."""
    start = RELEASES[top].partition("==")[0].replace("-", "_").lower()
    problem = ""
    for releases in ([*RELEASES.values()], [RELEASES[top]], []):
        found = [x for x in WHEELS.glob("*.whl") if x.name.lower().startswith(f"{start}-")]
        if found:
            return found[0]
        problem = _ask_for(releases) if releases else problem
    raise UnavailableError(f"{RELEASES[top]} could not be downloaded: {problem}")


def _ask_for(releases):
    """Download wheels; what pip says last, where it fails."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WHEELS) as folder:  # others may download them too
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, *releases]
        how = {"capture_output": True, "text": True, "timeout": SECONDS}
        try:
            ran = subprocess.run(command, check=False, **how)
            problem = (ran.stderr.strip().splitlines() or ["no reason given"])[-1]
        except subprocess.TimeoutExpired:
            problem = f"no answer in {SECONDS} s"
        for wheel in Path(folder).glob("*.whl"):
            wheel.replace(WHEELS / wheel.name)
    return problem


def load(module, name):
    """A class of another package, or UnavailableError: no wheel is there or can be downloaded."""
    return getattr(_module(module), name)


@cache
def _module(module):
    top = module.split(".")[0]
    with _importing(_download(top), top):
        found = importlib.import_module(module)
        loaded = [m for key, m in sys.modules.items() if key.split(".")[0] == top]
    for each in loaded:  # to be found again by pickle, which imports by name
        for own in vars(each).values():
            is_module = isinstance(own, type) and issubclass(own, nn.Module)
            if is_module and own.__module__ == each.__name__:
                own.__module__ = __name__
                own.__qualname__ = f"{own.__name__}_{len(globals())}"  # one may be loaded twice
                globals()[own.__qualname__] = own
    return found
