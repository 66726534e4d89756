"""What `make dist` publishes: the source is complete, the wheels load where they say."""

import importlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from fresh import ROOT, build_package, copy_tree, empty_compiler, program

import bahdanau_fast as bf

NVCC = "#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n"


def test_the_source_package_builds_the_same_wheel(tmp_path):
    compiler = empty_compiler(tmp_path / "c++")
    tree = copy_tree(tmp_path / "a tree")
    shutil.copy(ROOT / "MANIFEST.in", tree)
    shutil.unpack_archive(build_package(tree, "build_sdist")[0], tmp_path)
    (unpacked,) = tmp_path.glob("bahdanau_fast-*")
    files = [
        {path.relative_to(folder) for path in (folder / "csrc").rglob("*") if path.is_file()}
        for folder in (tree, unpacked)
    ]
    assert files[0] == files[1]
    names = []
    for folder in (tree, unpacked):
        wheel, printed = build_package(folder, "build_wheel", CXX=compiler)
        assert re.search(r"compiling .* (\d+) files.*\[\1/\1\]", printed, re.DOTALL)
        names.append(zipfile.ZipFile(wheel).namelist())
    assert set(names[0]) == set(names[1])
    assert {"bahdanau_fast/_C_cpu.abi3.so", "bahdanau_fast/py.typed"} < set(names[0])


def test_a_wheel_with_cuda_is_named_after_its_version(tmp_path):
    program(tmp_path / "cuda/bin/nvcc", NVCC)
    demanded = {"BAHDANAU_FAST_CUDA": "1", "CUDA_HOME": "cuda"}
    found, _ = build_package(copy_tree(tmp_path), "prepare_metadata_for_build_wheel", **demanded)
    assert found.name == f"bahdanau_fast-{bf.__version__}+cu128.dist-info"


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux wheels")
def test_the_binary_asks_for_nothing_newer_than_manylinux_2_28_has():
    binary = importlib.import_module("bahdanau_fast._C_cpu").__file__
    command = ["readelf", "--wide", "--version-info", binary]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    asked = set(re.findall(r"Name: (GLIBC|GLIBCXX)_([\d.]+)", text))
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24)}
    assert {library for library, _ in asked} == set(newest)
    for library, version in asked:
        assert tuple(map(int, version.split("."))) <= newest[library], (library, version)
