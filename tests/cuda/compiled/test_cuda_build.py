"""The CUDA extension without a GPU: how it is built, what the compiler made of it, how it loads,
and whether ``auto`` may take it.
"""

import contextlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import machine_code
import pytest
import torch

from bahdanau_fast import switches
from bahdanau_fast.backends import availability

ROOT = Path(__file__).resolve().parents[3]
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on this machine")


@pytest.fixture
def setup(tmp_path, monkeypatch, caplog, capfd):
    """Runs setup.py with variables of the environment; what it says, or the error that ends it."""
    caplog.set_level("WARNING")  # setuptools sets another one, which this takes back

    def setup(**variables):
        for name in ("CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"BAHDANAU_FAST_CPU": "0", **variables}.items():
            monkeypatch.setenv(name, value)
        folders = f"--build-lib={tmp_path}", f"--build-temp={tmp_path}"
        monkeypatch.setattr(sys, "argv", ["setup.py", "build_ext", *folders])
        monkeypatch.chdir(ROOT)
        runpy.run_path("setup.py", run_name="__main__")
        return capfd.readouterr().err

    return setup


NOT_FOUND = r"bahdanau_fast._C_cuda: nvcc not found \(looked for .*/bin/nvcc"
UNKNOWN = "TORCH_CUDA_ARCH_LIST must name GPUs from 8.0 on, got '7.5'"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"CUDA_HOME": "gone"}, NOT_FOUND),
        pytest.param({"TORCH_CUDA_ARCH_LIST": "9.0a 7.5"}, UNKNOWN, marks=needs_nvcc),
    ],
)
def test_what_is_demanded_and_cannot_be_is_an_error(given, message, setup):
    with pytest.raises(SystemExit, match=message):  # Python prints it, and exits with 1
        setup(BAHDANAU_FAST_CUDA="1", **given)


def test_unset_it_says_in_a_line_why_not(setup):
    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    said = setup(BAHDANAU_FAST_CUDA="")
    assert re.findall(r"^bahdanau_fast._C_cuda not built: (.*)$", said, re.MULTILINE) == [
        f"torch {torch.__version__} is built without CUDA"
    ]


# ---- what the compiler made of the kernels -------------------------------------------------------


def built(test):
    """Of the extension, which few have; .ci/run demands it where nvcc is."""
    absent = pytest.mark.skipif(
        importlib.util.find_spec("bahdanau_fast._C_cuda") is None
        and not (NVCC and os.environ.get("CI")),
        reason="the CUDA extension is not built: BAHDANAU_FAST_CUDA=1 and nvcc make it",
    )
    return pytest.mark.thorough(absent(test))


@built
def test_no_kernel_spills():
    found = machine_code.kernels()
    archs = {kernel.arch for kernel in found}
    assert archs
    if not torch.cuda.is_available() or os.environ.get("CI"):
        assert {"80", "90a"} <= archs
    for kind in machine_code.KINDS:
        kernels = 13 if kind == "f32" else 17
        assert sum(kernel.kind == kind for kernel in found) == kernels * len(archs), kind
    assert [k for k in found if k.spills or k.stack or k.registers > 255] == []


@needs_nvcc
@pytest.mark.deep
@pytest.mark.parametrize("arch", ["86", "100"])
def test_no_kernel_spills_elsewhere(arch, tmp_path):
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Icsrc", "-Xptxas", "-v", "-cubin"]
    source = "csrc/cuda/op/kernels_bf16.cu"
    command = [NVCC, *flags, f"-arch=sm_{arch}", source, "-o", str(tmp_path / "made")]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)
    assert set(found) == {("0", "0")}
    assert len(found) == 17


@pytest.fixture(scope="module")
def listings():
    """Mangled name -> SASS of the bf16 kernels for the newest GPU that was compiled for."""
    newest = max((k.arch for k in machine_code.kernels()), key=lambda arch: int(arch.rstrip("af")))
    code = machine_code.sass("bf16", newest)
    if not code:
        pytest.skip("no disassembler: that of the CUDA toolkit, or the triton package")
    return code


def code_of(listings, name):
    (found,) = [text for entry, text in listings.items() if name in entry]
    return found


@built
def test_streams_are_read_16_bytes_at_a_time(listings):
    for name in ("14decode_forwardINS_4bf16ELi1ELi16E", "14decode_forwardINS_4bf16ELi4ELi16ELb1E"):
        assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", code_of(listings, name))) >= 12
    for name, rows in (("11grad_values", 4), ("9grad_keys", 3)):  # in flight
        backward = code_of(listings, f"{name}INS_4bf16ELi1ELb1E")
        for instruction in ("LDG", "STG"):
            assert len(re.findall(rf"{instruction}\.E\.128", backward)) >= rows


@built
def test_persistent_kernels_load_from_one_kind_of_memory_and_in_batches(listings):
    for direction in ("persistent_forward", "persistent_backward"):
        codes = [text for entry, text in listings.items() if direction in entry]
        assert len(codes) == 2
        for code in codes:
            assert not re.search(r"\bLD\.", code), "a generic load"
            if "backward" in direction:  # both weights are transposed, eight loads at a time
                moves = "".join(re.findall(r"\b(?:LD(?=G\.E\.U16\.CONSTANT)|ST(?=S\.U16))", code))
                assert moves.startswith(("LD" * 8 + "ST" * 8) * 2)
            else:
                assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", code)) >= 30


@built
def test_some_barriers_of_a_cluster_wait_for_no_store(listings):
    code = code_of(listings, "14decode_forwardINS_4bf16ELi1ELi16E")
    if "UCGABAR_ARV" not in code:
        pytest.skip("the newest GPU that was compiled for has no clusters")
    assert len(re.findall("UCGABAR_ARV", code)) >= 2 + len(re.findall(r"MEMBAR\.ALL\.GPU", code))


# ---- loading -------------------------------------------------------------------------------------


LOADED = """
import torch, bahdanau_fast, bahdanau_fast._C_cuda
from entry_points import BACKWARD, FORWARD, RECORDED
for name in (FORWARD, RECORDED, BACKWARD):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"bahdanau_fast::{name}", "CUDA"), name
"""


@built
def test_it_loads_where_there_is_no_gpu_either():
    places = [str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    subprocess.run([sys.executable, "-c", LOADED], env=env, check=True)


@built
def test_it_takes_only_the_stable_interface():
    binary = importlib.util.find_spec("bahdanau_fast._C_cuda").origin
    lines = subprocess.run(
        ["nm", "-D", "--undefined-only", binary], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    taken = [line.split()[-1].partition("@") for line in lines if line.strip()]
    unknown = [
        name
        for name, _, version in taken
        if not re.match(r"aoti_torch_|torch_|_?Py|_ITM_|__gmon|_Z|__cxa|_Unwind", name)
        and not re.match(r"@?(GLIBC|GLIBCXX|CXXABI|GCC)_", version)
    ]
    assert unknown == []
    assert [name for name, *_ in taken if re.search(r"3c10|2at|5torch", name)] == []


# ---- whether auto may take it, by what it says of the GPUs that are visible ----------------------

NO_IMAGE = "no kernel image is available for execution on the device"
OTHER = r"does not run on cuda:0 .*8\.6.*: no kernel image"
OLD = "compute capability 8.0 is needed, this GPU has 7.5"
# Compute capabilities, which GPU is the current one, which cannot run the binary; what is said, and
# which are asked: each kind once, and none that is too old.
VISIBLE = {
    "one": ([(9, 0)], 0, (), None, [0]),
    "one of another kind": ([(8, 6)], 0, (0,), OTHER, [0]),
    "two kinds": ([(9, 0), (9, 0), (8, 6), (9, 0)], 0, (), None, [0, 2]),
    "the last is current": ([(9, 0), (8, 6), (8, 6)], 2, (), None, [2, 0]),
    "another kind": ([(9, 0), (9, 0), (8, 6)], 0, (2,), "does not run on cuda:2", [0, 2]),
    "an old one": ([(9, 0), (7, 5)], 0, (), None, [0]),
    "the current one is old": ([(9, 0), (7, 5)], 1, (), OLD, []),
}


@pytest.mark.parametrize("gpus", VISIBLE)
def test_every_kind_of_gpu_is_asked_once(gpus, monkeypatch):
    capabilities, current, failing, why, kinds = VISIBLE[gpus]
    asked, device = [], [current]

    @contextlib.contextmanager
    def on(index):
        before, device[0] = device[0], index
        yield
        device[0] = before

    def why_not():
        asked.append(device[0])
        return NO_IMAGE if device[0] in failing else None

    binary = types.SimpleNamespace(why_not=why_not, without_clusters=lambda: asked.append("off"))
    monkeypatch.setitem(sys.modules, "bahdanau_fast._C_cuda", binary)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: len(capabilities),
        "current_device": lambda: device[0],
        "get_device_capability": lambda n=None: capabilities[device[0] if n is None else n],
        "device": on,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(availability, "_load", lambda *args: None)
    said = availability.cuda_problem.__wrapped__()
    assert said is None if why is None else re.search(why, said)
    assert asked == kinds
    asked.clear()
    monkeypatch.setattr(switches, "OFF", frozenset(["clusters"]))
    availability.cuda_problem.__wrapped__()
    assert asked == (["off", *kinds] if kinds else [])
