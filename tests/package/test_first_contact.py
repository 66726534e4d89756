"""What somebody meets who has just cloned, installed or imported the package."""

import importlib
import inspect
import pydoc
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from fresh import HIDE, ROOT, copy_package, copy_tree, forked, python
from torch.nn.parameter import is_lazy

import bahdanau_fast as bf

# ---- a source tree in front of the installed package ---------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A source tree without its binary, and an installed package with one (on the path)."""
    source, site = copy_package(tmp_path / "source"), copy_package(tmp_path / "site")
    (source / "setup.py").touch()
    binary = Path(sys.modules["bahdanau_fast._C_cpu"].__file__)
    shutil.copy(binary, site / "bahdanau_fast")
    return source, site


def info(folder, site):
    return forked("-m", "bahdanau_fast", "info", cwd=folder, path=site)


def test_a_source_tree_gives_way_to_the_installed_package(tree):
    source, site = tree
    (source / "bahdanau_fast/_C_cuda.why.txt").write_text("no CUDA")  # is no build
    done = info(source, site)
    assert done.stderr == ""
    assert f"({site / 'bahdanau_fast'})" in done.stdout
    assert "auto takes 'cpu' for cpu tensors" in done.stdout
    code = "import bahdanau_fast as bf; print(bf.__file__, bf.ops.__file__)"
    found = forked("-c", code, cwd=source, path=site).stdout.split()
    assert found == [str(site / f"bahdanau_fast/{name}__init__.py") for name in ("", "ops/")]


def test_a_source_tree_built_in_place_is_what_is_installed(tree):
    source, site = tree
    (source / "bahdanau_fast/_C_cpu.why.txt").write_text("left out")
    assert f"({source / 'bahdanau_fast'})" in info(source, site).stdout


def test_a_source_tree_alone_asks_for_a_compiler(tree):
    source, site = tree
    shutil.rmtree(site / "bahdanau_fast")
    (site / "other/bahdanau_fast").mkdir(parents=True)  # a clone, beside which Python was started
    nowhere = "sys.path = [x for x in sys.path if not x or not Path(x, 'bahdanau_fast').exists()]"
    more = f"sys.path.append({str(site / 'other')!r})"
    hide = f"import sys\nfrom pathlib import Path\n{nowhere}\n{more}"
    (source / "sitecustomize.py").write_text(hide)
    said = info(source, site).stderr
    assert "not built (install with a C++17 compiler present, and --no-build-isolation)" in said


# ---- installing ----------------------------------------------------------------------------------


def setup(tree, hidden, *command, check=True):
    (copy_tree(tree) / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    skip = {"BAHDANAU_FAST_CPU": "0", "BAHDANAU_FAST_CUDA": "0"}
    return python("setup.py", "-q", *command, cwd=tree, path=tree, check=check, **skip)


# What a fresh environment of setuptools 65 lacks.
OLD = ["setuptools.command.bdist_wheel", "wheel", "wheel.bdist_wheel"]


def test_without_what_makes_wheels_it_says_what_to_install(tmp_path):
    done = setup(tmp_path, OLD, "bdist_wheel", check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"without the package wheel; install them first: pip install .*wheel$", last)
    assert "'setuptools>=77' wheel" in last


def test_without_what_makes_wheels_the_rest_works(tmp_path):
    setup(tmp_path, OLD, "build", "--build-lib", "lib")
    assert (tmp_path / "lib/bahdanau_fast/kernels").is_dir()


@pytest.fixture
def asked(monkeypatch):
    """What the setup.py of a tree asks of setuptools."""
    import setuptools

    def asked(tree):
        found = {}
        monkeypatch.setattr(setuptools, "setup", lambda **given: found.update(given))
        runpy.run_path(str(tree / "setup.py"))
        return found

    return asked


@pytest.mark.parametrize(
    ("version", "field"), [("65.5.0", "license"), ("77.0.3", "license_expression")]
)
def test_the_license_where_each_setuptools_looks_for_it(version, field, asked, monkeypatch):
    monkeypatch.setattr("setuptools.__version__", version)
    found = asked(ROOT)
    assert [name for name in found if name.startswith("license")] == [field]
    assert found[field] == "Apache-2.0"


@pytest.mark.parametrize("address", ["", "https://example.org/us/bahdanau_fast"])
def test_the_long_description_has_no_links_into_the_tree(address, tmp_path, asked):
    project = copy_tree(tmp_path) / "pyproject.toml"
    urls = "[project.urls]\n" + f'Repository = "{address}"\n' * bool(address)
    project.write_text(project.read_text().replace("[project.urls]\n", urls))
    shown, relative = asked(tmp_path)["long_description"], r"\]\((?!https?:)([^)]+)\)"
    paths = re.findall(relative, (ROOT / "README.md").read_text())
    assert {"LICENSE", "docs/images/speed.svg", "docs/course.md"} < set(paths)
    assert re.findall(relative, shown) == []
    for path in paths:
        kind = "raw" if path.startswith("docs/images/") else "blob"
        link = f"]({address}/{kind}/v{bf.__version__}/{path})"
        assert (link if address else f" ({path})") in shown


# ---- importing -----------------------------------------------------------------------------------


def test_dir_shows_public_names():
    assert dir(bf) == sorted(bf.__all__)
    assert all(hasattr(bf, name) for name in dir(bf))
    for name in ("seq2seq", "ops", "functional"):
        assert inspect.ismodule(importlib.import_module(f"bahdanau_fast.{name}"))
    assert bf.functional.additive_attention is bf.additive_attention


LAZY = """
import sys
import bahdanau_fast as bf
assert "seq2seq" in dir(bf)
assert not [name for name in sys.modules if name.startswith("bahdanau_fast.seq2seq")]
assert issubclass(bf.seq2seq.Seq2SeqAttentionDecoder, bf.seq2seq.Decoder)
assert callable(bf.seq2seq.show_heatmaps) and "matplotlib" not in sys.modules
from bahdanau_fast import *
assert seq2seq is bf.seq2seq and not hasattr(bf, "seq2sec")
"""


UNTOUCHED = """
import inspect, sys, torch
from torch import nn
import torch._functorch.eager_transforms, torch.utils.data  # else they have no functions yet

def functions():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch":
            for place in (module, *filter(inspect.isclass, vars(module).values())):
                for key, value in list(vars(place).items()):
                    if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                        found[getattr(place, "__module__", ""), place.__name__, key] = value
    return found

def check(when):
    now = functions()
    changed = [key for key, value in before.items() if now[key] is not value]
    assert not changed, (when, changed)

before = functions()
import bahdanau_fast as bf
check("imported")
class Own(nn.Module):
    def forward(self, x): return torch.tanh(x)
fused = Own(), Own()
for each in fused: bf.fuse(each)
for each in fused: bf.unfuse(each)
check("unfused")
"""


def test_importing_changes_nothing_of_torch():
    """Nor does fuse once unfuse has taken it back: every function of torch is the same object."""
    forked("-c", UNTOUCHED, cwd=ROOT)


def test_the_translator_is_imported_when_it_is_asked_for():
    forked("-c", LAZY, cwd=ROOT)


def test_the_signature_that_help_and_notebooks_show():
    signature = inspect.signature(bf.AdditiveAttention)
    names = ["num_hiddens", "dropout", "key_size", "query_size"]
    assert list(signature.parameters)[:4] == names
    assert list(inspect.signature(bf.AdditiveAttention.__init__).parameters)[:2] == [
        "self",
        names[0],
    ]
    # From Python 3.13 on a long signature has a line for each argument.
    shown = " ".join(pydoc.plain(pydoc.render_doc(bf.AdditiveAttention)).split())
    assert "num_hiddens: 'int', dropout: 'float' = 0.0, *, key_size: 'int | None' = None" in shown
    assert "AdditiveAttention(key_size, query_size, num_hiddens, dropout)" in shown
    # What is shown can be called as it is shown, with the defaults it shows.
    given = {
        name: p.default for name, p in signature.parameters.items() if p.default is not p.empty
    }
    assert is_lazy(bf.AdditiveAttention(8, **given).W_k.weight)


@pytest.mark.parametrize(
    ("arguments", "named", "said"),
    [
        ((8, 0.1), {"key_size": 2}, "'key_size' twice"),
        ((8,), {"query_size": 2}, "'num_hiddens' is missing"),
        ((2, 20, 8), {"key_size": 2, "query_size": 20}, "'key_size' twice"),
        ((20, 2, 0.5), {}, "num_hiddens must be an integer, got float"),
    ],
)
def test_calls_that_fit_neither_form(arguments, named, said):
    with pytest.raises(TypeError, match=said):
        bf.AdditiveAttention(*arguments, **named)


@pytest.mark.parametrize(
    ("sizes", "named", "said"),
    [
        ((), {}, "missing a required argument: 'key_size'"),
        ((2, 20), {}, "missing a required argument: 'num_hiddens'"),
        ((2, 20, 8), {"size": 3}, "got an unexpected keyword argument 'size'"),
    ],
)
def test_calls_that_do_not_fit_location_attention(sizes, named, said):
    taken = r"LocationAttention takes \(key_size, query_size, num_hiddens, \.\.\.\)"
    with pytest.raises(TypeError, match=f"^{taken}, {said}$"):
        bf.LocationAttention(*sizes, **named)
