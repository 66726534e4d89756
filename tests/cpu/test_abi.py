"""The binary needs only what stays: torch's stable C shim, Python's limited API, the C library."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

extension = pytest.importorskip("bahdanau_fast._C_cpu")
BINARY = Path(extension.__file__)

TORCH = re.compile(r"^(aoti_torch_|torch_)\w+$")
PYTHON = re.compile(r"^_?Py\w+$")
# The C++ runtime: mangled names of std, its ABI, operator new and delete.
RUNTIME = re.compile(
    r"^(_ZNS?K?S[tabsiod]|_ZS[tabsiod]|_ZN[KV]?St|_ZNSt|_ZT[ISV]|_Zn[wa]|_Zd[la]|"
    r"__cxa_|__gxx_|_Unwind_|_ZN10__cxxabiv1|_ITM_|__gmon|_ZN9__gnu_cxx)"
)
FOREIGN = re.compile(r"c10|3c10|2at|N2at|5torch|caffe2|pybind11")


def read(*command):
    """What a tool of binutils says of a library; the build's compiler brings the tools."""
    if sys.platform != "linux" or shutil.which(command[0]) is None:
        pytest.fail(f"the audit needs Linux and {command[0]} (binutils)")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols():
    """(name, version or "") of what the binary takes from elsewhere."""
    lines = read("nm", "-D", "--undefined-only", str(BINARY)).splitlines()
    return [line.split()[-1].partition("@") for line in lines if line.strip()]


def test_only_stable_symbols_are_taken():
    taken = [(name, version.strip("@")) for name, _, version in symbols()]
    assert len(taken) > 20  # the audit sees something
    unknown = [
        name
        for name, version in taken
        if not (
            TORCH.match(name)
            or PYTHON.match(name)
            or RUNTIME.match(name)
            or re.match(r"(GLIBC|GLIBCXX|CXXABI|GCC)_", version)
        )
    ]
    assert unknown == []
    assert [name for name, _ in taken if FOREIGN.search(name)] == []


def test_only_the_entry_point_is_given():
    lines = read("nm", "-D", "--defined-only", str(BINARY)).splitlines()
    names = {line.split()[-1].partition("@")[0] for line in lines}
    assert "PyInit__C_cpu" in names
    strong = {line.split()[-1].partition("@")[0] for line in lines if line.split()[-2] in "TDBR"}
    markers = {"_end", "_edata", "__bss_start"}  # of the linker itself
    assert strong - markers == {"PyInit__C_cpu"}


def test_the_libraries_it_names():
    text = read("readelf", "-d", str(BINARY))
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", text)
    system = r"lib(stdc\+\+|m|gcc_s|c|pthread|dl)\.so|ld-linux"
    assert [x for x in needed if not re.match(system, x)] == ["libtorch_cpu.so"]
    assert "RPATH" not in text
    assert "RUNPATH" not in text


def test_one_binary_for_every_python():
    assert BINARY.name == "_C_cpu.abi3.so"
