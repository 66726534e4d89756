"""What `make dist` publishes: the source is complete, the wheels load where they say."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from fresh import ROOT, copy_tree, empty_compiler, program, python

NVCC = "#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n"


def built(folder, kind, **variables):
    """The package of a source tree, and what was printed."""
    call = f"import setuptools.build_meta as made; print(made.build_{kind}('dist'))"
    skip = {"BAHDANAU_FAST_CPU": "1", "BAHDANAU_FAST_CUDA": "0"}
    done = python("-c", call, cwd=folder, **{**skip, **variables})
    return folder / "dist" / done.stdout.split()[-1], done.stdout


def test_the_source_package_builds_the_same_wheel(tmp_path):
    compiler = empty_compiler(tmp_path / "c++")
    tree = copy_tree(tmp_path / "a tree")
    shutil.copy(ROOT / "MANIFEST.in", tree)
    with tarfile.open(built(tree, "sdist")[0]) as packed:
        packed.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("bahdanau_fast-*")
    files = [
        {path.relative_to(folder) for path in (folder / "csrc").rglob("*") if path.is_file()}
        for folder in (tree, unpacked)
    ]
    assert files[0] == files[1]
    names = []
    for folder in (tree, unpacked):
        wheel, printed = built(folder, "wheel", CXX=compiler)
        assert re.search(r"compiling .* (\d+) files.*\[\1/\1\]", printed, re.DOTALL)
        names.append(zipfile.ZipFile(wheel).namelist())
    assert set(names[0]) == set(names[1])
    assert {"bahdanau_fast/_C_cpu.abi3.so", "bahdanau_fast/py.typed"} < set(names[0])


def test_a_wheel_with_cuda_is_named_after_its_version(tmp_path):
    program(tmp_path / "bin/nvcc", NVCC)
    versions = [
        python("setup.py", "--version", cwd=ROOT, CUDA_HOME=str(tmp_path), BAHDANAU_FAST_CUDA=x)
        for x in ("", "1")
    ]
    plain, cuda = (done.stdout.split()[-1] for done in versions)
    assert cuda == f"{plain}+cu128"


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux wheels")
def test_the_binary_asks_for_nothing_newer_than_manylinux_2_28_has():
    binary = Path(sys.modules["bahdanau_fast._C_cpu"].__file__)
    command = ["readelf", "--wide", "--version-info", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    asked = set(re.findall(r"Name: (GLIBC|GLIBCXX)_([\d.]+)", text))
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24)}
    assert {library for library, _ in asked} == set(newest)
    for library, version in asked:
        assert tuple(map(int, version.split("."))) <= newest[library], (library, version)
