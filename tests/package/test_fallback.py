"""Without the extension, or with a broken one, the package works on the reference and says why."""

import _ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path
from sysconfig import get_path

import pytest
import torch
from fresh import ROOT, copy_package, python

import bahdanau_fast as bf
from bahdanau_fast import backends

WORKS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import bahdanau_fast as bf
import torch
ours = [w for w in caught if "bahdanau_fast" in str(w.message)]
assert len(ours) == 1, [str(w.message) for w in caught]
assert ours[0].category is RuntimeWarning
assert "using the slower reference backend" in str(ours[0].message)
assert bf.backends.available() == ("reference",)
torch.manual_seed(0)
q, k = torch.randn(2, 3, 4), torch.randn(2, 5, 6)
attention = bf.AdditiveAttention(8, 0.1)
with warnings.catch_warnings():
    warnings.simplefilter("error", RuntimeWarning)  # said once
    context = attention(q, k, k, torch.tensor([2, 5]))
    context.sum().backward()
    memory = attention.memory(k)
    attention.attend(q, memory)
weights = attention.W_q.weight, attention.W_k.weight, attention.w_v.weight
want, _ = bf.reference.additive_attention(q, k, k, *weights)
got, _ = bf.additive_attention(q, k, k, *weights)
assert torch.equal(got, want)
for ask in (lambda: bf.additive_attention(q, k, k, *weights, backend="cpu"),
            lambda: bf.backends.use("cpu").__enter__()):
    try:
        ask()
    except ValueError as error:
        refusal = str(error)
    else:
        raise SystemExit("asking for cpu was not refused")
print(ours[0].message)
print(refusal)
"""


@pytest.fixture
def copied(tmp_path):
    """A copy of the package without its binary."""
    return copy_package(tmp_path)


def missing(folder):
    del folder
    return r"the C\+\+ extension is not built"


def left_out(folder):
    reason = "torch cannot be imported at build time (No module named 'torch')\n  install it first"
    (folder / "bahdanau_fast/_C_cpu.why.txt").write_text(reason)
    return re.escape("the C++ extension is not built: " + " ".join(reason.split()))


def garbage(folder):
    (folder / "bahdanau_fast/_C_cpu.abi3.so").write_bytes(b"not a library" * 100)
    return r"the C\+\+ extension is there but does not load: .*invalid ELF header"


def truncated(folder):
    # As an interrupted copy leaves it; the loader maps it and dies on the missing pages (SIGBUS).
    real = Path(sys.modules["bahdanau_fast._C_cpu"].__file__).read_bytes()
    (folder / "bahdanau_fast/_C_cpu.abi3.so").write_bytes(real[: len(real) // 2])
    return r"the C\+\+ extension is there but does not load: "


def another(folder):
    # A module of that name that is none of ours: no PyInit__C_cpu in it.
    shutil.copy(_ctypes.__file__, folder / "bahdanau_fast/_C_cpu.abi3.so")
    return r"the C\+\+ extension is there but does not load: .*PyInit__C_cpu"


OTHER_ABI = """
#include <Python.h>
int aoti_torch_of_another_version(void);
PyMODINIT_FUNC PyInit__C_cpu(void) { return PyLong_FromLong(aoti_torch_of_another_version()); }
"""


def another_abi(folder):
    if shutil.which("gcc") is None:
        pytest.skip("makes a library with gcc")
    (folder / "other.c").write_text(OTHER_ABI)
    include, made = get_path("include"), folder / "bahdanau_fast/_C_cpu.abi3.so"
    command = ["gcc", "-shared", "-fPIC", f"-I{include}", str(folder / "other.c"), "-o", str(made)]
    subprocess.run(command, check=True)
    return r"is there but does not load: .*undefined symbol: aoti_torch_of_another_version"


def old_torch(folder):
    shutil.copy(sys.modules["bahdanau_fast._C_cpu"].__file__, folder / "bahdanau_fast")
    with (folder / "sitecustomize.py").open("a") as file:
        file.write("import torch; torch.__version__ = '2.9.1+cpu'")
    return r"the C\+\+ extension needs torch >= 2\.10, got 2\.9\.1\+cpu"


BREAKAGES = [missing, left_out, garbage, truncated, another, another_abi, old_torch]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__)
def test_the_package_works(copied, breakage):
    reason = breakage(copied)
    code = f"{WORKS}\nfrom bahdanau_fast.cli import main\nmain(['info'])"
    done = python("-c", code, cwd=copied, path=copied)
    warning, refusal, *info = done.stdout.strip().splitlines()
    assert re.search(reason, warning)
    assert "python -m bahdanau_fast info" in warning
    assert re.search(f"backend must be available here, got 'cpu': .*{reason}", refusal)
    info = "\n".join(info)
    assert re.search(f"cpu +not available: .*{reason}", info)
    assert "auto takes 'reference' for cpu tensors" in info
    assert str(copied) in info
    assert "Traceback" not in done.stderr


def test_the_whole_package_imports_without_a_warning_when_built():
    assert python("-W", "error", "-c", "import bahdanau_fast", path=ROOT).stderr == ""


# ---- choosing ------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_use_nests_and_restores():
    assert backends.resolve(CPU) == "cpu"
    with backends.use("reference"):
        assert backends.resolve(CPU) == "reference"
        with backends.use("cpu"):
            assert backends.resolve(CPU) == "cpu"
            with backends.use("auto"):
                assert backends.resolve(CPU) == "cpu"
        assert backends.resolve(CPU) == "reference"
        with backends.use("auto"):
            assert backends.resolve(CPU) == "cpu"
        assert backends.resolve(CPU, "cpu") == "cpu"
    assert backends.resolve(CPU) == "cpu"


def test_use_restores_after_an_error():
    def fail():
        with backends.use("reference"):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert backends.resolve(CPU) == "cpu"


def test_use_decides_who_computes(monkeypatch):
    asked = []
    real = bf.reference.attend
    monkeypatch.setattr(bf.reference, "attend", lambda *a: asked.append(1) or real(*a))
    q, w = torch.randn(2, 3, 4), torch.randn(5, 4)
    call = (q, q, q, w, w, torch.randn(5))
    results = [bf.additive_attention(*call)[0]]
    assert asked == []
    with backends.use("reference"):
        results.append(bf.additive_attention(*call)[0])
        assert len(asked) == 1
        results.append(bf.additive_attention(*call, backend="cpu")[0])
        assert len(asked) == 1
    results.append(bf.additive_attention(*call, backend="reference")[0])
    assert len(asked) == 2
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


def test_explain():
    text = backends.explain()
    lines = text.splitlines()
    assert lines[0] == "auto takes 'cpu' for cpu tensors"
    name = sys.modules["bahdanau_fast._C_cpu"].instruction_set()
    states = {line.split()[0]: line.split() for line in lines[1:]}
    assert states["cpu"] == [
        "cpu",
        "available:",
        *f"fused C++ for CPU tensors, {name} kernels".split(),
    ]
    assert states["reference"][:2] == ["reference", "available:"]
    with backends.use("reference"):
        assert "forced to 'reference'" in backends.explain()
    assert backends.explain("meta").startswith("auto takes 'reference' for meta tensors")
    assert backends.available() == ("cpu", "reference")
