"""The binary needs only what stays: torch's stable C shim, Python's limited API, the C library."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fresh import ROOT

extension = pytest.importorskip("bahdanau_fast._C_cpu")
BINARY = Path(extension.__file__)

# What is used of torch, in the sources and, through its headers, in the binary. Each name was found
# in 2.10.0, as a new one must be before it is put here: TORCH_TARGET_VERSION hides most of what
# came later, but not all (STABLE_TORCH_ERROR_CODE_CHECK, Tensor::layout).
OF_2_10 = re.compile(
    r"""<torch/csrc/stable/(accelerator|library|ops|tensor)\.h>
    | <torch/headeronly/(core/ScalarType|util/Exception|util/shim_utils)\.h>
    | AtenTensorHandle | StableIValue | STABLE_TORCH_LIBRARY_IMPL | STD_TORCH_CHECK
    | TORCH_(ABI_VERSION|BOX|ERROR_CODE_CHECK)
    | ScalarType::(Bool|Byte|Char|Int|UInt(16|32|64)|Short|Long|Half|BFloat16|Float|Double)
    | torch::headeronly::ScalarType | torch::stable::(Tensor|accelerator::DeviceGuard)
    | torch::stable::(clone|contiguous|detail::(from|to)|get_num_threads|matmul|narrow|parallel_for)
    | torch::stable::(sum|to|transpose|unsqueeze|zero_)
    | torch_(call_dispatcher|get_(const|mutable)_data_ptr|get_num_threads|library_impl|parallel_for)
    | aoti_torch_(abi_version|delete_(library|tensor)_object)
    | aoti_torch_device_type_(cpu|cuda|meta|mps|privateuse1|xpu)
    | aoti_torch_dtype_(bool|u?int(8|16|32|64)|b?float16|float(32|64)|complex(32|64|128))
    | aoti_torch_dtype_(float8_e(4m3fn|4m3fnuz|5m2|5m2fnuz)|element_size)
    | aoti_torch_(_reinterpret_tensor|cuda_(add)?mm_out|empty_strided)
    | aoti_torch_get_(current_cuda_stream|device_type|dim|dtype|layout|numel|sizes?|storage_offset)
    | aoti_torch_get_stride
    | aoti_torch_layout_(strided|sparse_(bs[cr]|coo|cs[cr])|_mkldnn|jagged)
    | aoti_torch_memory_format_(channels_last(_3d)?|(contiguous|preserve)_format)
    | aoti_torch_(is_contiguous|is_defined|library_init_impl)
    | aoti_torch_(new_tensor_handle|new_uninitialized_tensor)""",
    re.VERBOSE,
)
# How such a name looks in the sources: a header, a macro, a type, a function.
NAMES = re.compile(
    r"<torch/.+?>|\b(?:(?:STD|STABLE|TORCH)_\w+|(?:Aten|StableI)\w+|ScalarType::\w+|"
    r"torch(?:::\w+)+|aoti_torch_\w+|torch_\w+(?=\())"
)
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
            OF_2_10.fullmatch(name)
            or PYTHON.match(name)
            or RUNTIME.match(name)
            or re.match(r"(GLIBC|GLIBCXX|CXXABI|GCC)_", version)
        )
    ]
    assert unknown == []
    assert [name for name, _ in taken if FOREIGN.search(name)] == []


def test_the_sources_use_of_torch_what_2_10_has():
    code = "".join(path.read_text() for path in ROOT.glob("csrc/**/*.*"))
    used = set(NAMES.findall(re.sub("//.*", "", code)))
    assert {"STD_TORCH_CHECK", "torch::stable::matmul", "aoti_torch_empty_strided"} < used
    assert [name for name in sorted(used) if not OF_2_10.fullmatch(name)] == []


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
