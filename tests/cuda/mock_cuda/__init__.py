"""csrc/cuda/op and csrc/cuda/runtime on a machine without a GPU, on a mock CUDA runtime.

What only it proves: which launches and other calls of the runtime an operator makes, streams,
captures and errors included.

Calls of the operators take CPU tensors. Their launches are noted, and run as :meth:`Mock.runs` says
(in the PTX machine, as tests/ptx does); else results are whatever memory held. The runtime's
functions are in runtime.cpp, and ask :class:`Mock` what a GPU answers.
"""

import ctypes
import functools
import os
import re
import struct
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from sysconfig import get_paths

import torch
from triton.backends.nvidia import driver

import bahdanau_fast.backends.triton  # noqa: F401  else, loaded later, it would stand in front
from bahdanau_fast.ops.operator import operators
from ptx_machine import built

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCES = HERE / "runtime.cpp", *sorted((ROOT / "csrc/cuda/op").glob("*.c*"))
# Functions of torch that give memory: runtime.cpp says where.
WRAPPED = "aoti_torch_empty_strided", "torch_call_dispatcher"
ANSWERS = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64)
)
# Address, bytes, and which: new; something is written there.
MEMORY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
OF_TENSOR, FILLED = range(2)
PLAN = (
    "groups", "blocks", "rows", "sentences", "units", "hidden", "features", "resident", "bytes",
)  # fmt: skip
SHARED = 97  # an attribute of a device: bytes that a block can have
INVALID, TOO_LARGE, UNSUPPORTED, CLUSTER = 1, 720, 900, 912
UNNOTED = "cudaGetErrorString", "cuStreamGetGreenCtx"  # a word, and a call of the driver
WORDS = {
    35: b"CUDA driver version is insufficient for CUDA runtime version",
    209: b"no kernel image is available for execution on the device",
}


def library():
    """The mock's own library, with csrc/cuda in it; the toolkit's headers are those in Triton."""
    from torch.utils import cpp_extension

    csrc = ROOT / "csrc"
    includes = [f"-I{folder}" for folder in (HERE, csrc, csrc / "cuda" / "op")]
    headers = Path(driver.__file__).parent / "include", get_paths()["include"]
    includes += [f"-isystem{folder}" for folder in (*headers, *cpp_extension.include_paths())]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    command = [
        *("g++", "-std=c++17", "-O0", "-w", "-fpermissive", "-fPIC", "-shared", "-fno-gnu-unique"),
        *("-DTORCH_TARGET_VERSION=0x020a000000000000", "-DBAHDANAU_FAST_LAB"),
        # As one file, which reads each header once: half the time.
        *(*includes, *(word for source in SOURCES for word in ("-include", str(source)))),
        *("-x", "c++", os.devnull, "-x", "none"),
        *("-Wl,-Bsymbolic", *(f"-Wl,--wrap={name}" for name in WRAPPED)),
        *(*libraries, "-ltorch_cpu", "-ldl"),
    ]
    own = [path for folder in (csrc / "common", csrc / "cuda") for path in folder.rglob("*.h")]
    files = [*SOURCES, HERE / "cuda_runtime.h", *sorted(own)]
    return built("mock_cuda/library", files, command)


@dataclass
class Gpu:
    """What a mock GPU is like."""

    multiprocessors: int = 132
    largest_cluster: int = 8  # blocks that fit; 0: no cluster, not even of one block
    ptx_version: int = 90  # of the code that runs there
    loads: int = 0  # the error that loading the code gives, or 0
    shared: int = 227 << 10  # bytes of shared memory that a block can have
    # The same, by kernel, where another number than usual was asked for.
    allowed: dict = field(default_factory=dict)

    def has(self, kernel, shared):
        """Whether a block of a kernel may have so many bytes."""
        return shared <= self.allowed.get(kernel, 48 << 10)

    def resident(self, kernel, threads, shared):
        """How many blocks a multiprocessor has room for; each takes 1 KB more than it asks for."""
        fit = min(2048 // threads, (self.shared + 1024) // (shared + 1024))
        return fit if self.has(kernel, shared) else 0


class Mock:
    """The mock GPUs, one set of them in a process: :func:`mock`."""

    def __init__(self):
        path = str(library())
        loader = ExtensionFileLoader("_C_cuda", path)
        #: What is imported where there is a GPU.
        self.binary = module_from_spec(spec_from_file_location("_C_cuda", loader=loader))
        loader.exec_module(self.binary)
        self._library = ctypes.CDLL(path)
        self._held = ANSWERS(self._answer), None
        ctypes.c_void_p.in_dll(self._library, "mock_answers").value = _address(self._held[0])
        self.gpus, self.device = [], -1
        self._calls, self.noted = [], True
        #: By function of the runtime, for its next call: the error, what runs before it returns.
        self.failing, self.after = {}, {}
        self._green = {}  # multiprocessors by stream, of green contexts
        self._captures, self._streams = set(), 0
        self._runs, self._failed = None, []
        self.why_not, self.why_not_decode = self.binary.why_not, self.binary.why_not_decode

    def new_gpu(self, **like):
        """The number of a GPU that nothing was asked of, with the attributes of :class:`Gpu`.

        All tensors are there from now on, and it is the current one.
        """
        self.gpus.append(Gpu(**like))
        self.use_gpu(len(self.gpus) - 1)
        return self.device

    def use_gpu(self, device):
        """Make a GPU, that of the tensors from now on, the current one of this thread."""
        self.device = device
        self._library.mock_set_device(device)

    def set_gpu(self, **like):
        """Change what the GPU of the tensors is like."""
        vars(self.gpus[self.device]).update(like)

    @contextmanager
    def runs(self, launch, memory):
        """Inside, ``launch`` runs launches, by the notes of each, and ``memory`` is told as MEMORY.

        What they raise is raised at the end; there are no more launches then.
        """
        self._failed = failed = []
        self._runs = functools.partial(self._guarded, launch)
        self._held = self._held[0], MEMORY(functools.partial(self._guarded, memory))
        place = ctypes.c_void_p.in_dll(self._library, "mock_memory")
        place.value = _address(self._held[1])
        try:
            yield
        except RuntimeError:  # of results that were never made
            if not failed:
                raise
        finally:
            self._runs = place.value = None
        if failed:
            raise failed[0]

    def _guarded(self, function, *arguments):
        try:
            if not self._failed:
                function(*arguments)
        except BaseException as error:
            self._failed.append(error)

    def note(self, calls):
        """Whether calls are noted; where they are not, a launch returns at once."""
        self.noted = calls
        ctypes.c_int.in_dll(self._library, "mock_launches").value = calls

    @contextmanager
    def without_clusters(self):
        """Inside, on GPUs that are new, as where a user has switched them off."""
        self.binary.without_clusters()
        try:
            yield
        finally:
            name = "_ZN13bahdanau_fast3gpu11clusters_onE"
            ctypes.c_bool.in_dll(self._library, name).value = True

    def new_stream(self):
        """The handle of a stream."""
        self._streams += 1
        return 64 * (16 + self._streams)

    @contextmanager
    def capture(self, stream):
        """Inside, ``stream`` is the current one, and what is queued on it does not run."""
        self._captures.add(stream)
        try:
            with self._current(stream):
                yield
        finally:
            self._captures.remove(stream)

    @contextmanager
    def green_context(self, multiprocessors):
        """Inside, the current stream is of a green context with so many multiprocessors."""
        stream = self.new_stream()
        self._green[stream] = multiprocessors
        with self._current(stream):
            yield

    @contextmanager
    def _current(self, stream):
        self._library.mock_set_stream(ctypes.c_void_p(stream))
        try:
            yield
        finally:
            self._library.mock_set_stream(None)

    def last_error(self):
        """The error left in this thread, which is taken away."""
        return self._library.cudaGetLastError()

    def plan(self, lstm, backward, sizes, blocks, shared):
        """How such a decoder is cut for a GPU of so many blocks and bytes: PLAN, by name."""
        found = (ctypes.c_int * len(PLAN))()
        numbers = map(ctypes.c_int64, (*sizes, blocks, shared))
        self._library.mock_plan(int(lstm), int(backward), *numbers, found)
        return dict(zip(PLAN, found, strict=True))

    def calls(self):
        """The runtime's calls since the last time: call (the function), device, error, by name.

        A launch has kernel (mangled), grid, block, cluster, shared (bytes), cooperative, parameters
        (bytes) and stream.
        """
        found, self._calls = self._calls, []
        return found

    @staticmethod
    def operator(name, *args):
        """Call an operator of ``torch.ops.bahdanau_fast`` on CPU tensors, as if on CUDA tensors."""
        return operators[name].overload._op_dk(torch._C.DispatchKey.CUDA, *args)

    # ---- what a GPU answers

    def _answer(self, function, device, kernel, numbers):
        """The error of a call of the runtime; its result is the first of its numbers."""
        name, kernel, gpu = function.decode(), kernel.decode(), self.gpus[device]
        call = {"call": name, "device": device}
        if name == "cudaLaunchKernelEx":
            keys = "grid", "block", "cluster", "shared", "cooperative"
            call |= dict(zip(keys, numbers[:5], strict=True), kernel=kernel, stream=numbers[7])
            call["parameters"] = ctypes.string_at(numbers[5], numbers[6])
        error = self.failing.pop(name, None)
        if error is None:
            error = self._error(gpu, kernel, numbers, call)
        if self.noted and name not in UNNOTED:
            self._calls.append(call | {"error": error})
        self.after.pop(name, int)()
        return error

    def _error(self, gpu, kernel, numbers, call):  # noqa: PLR0912
        match call["call"]:
            case "cudaGetErrorString":
                said = ctypes.c_char_p(WORDS.get(numbers[0], b"another error"))  # which stays
                numbers[0] = ctypes.cast(said, ctypes.c_void_p).value
            case "cuStreamGetGreenCtx":
                numbers[0] = self._green.get(numbers[0], 0)
            case "cudaDeviceGetAttribute":
                numbers[0] = gpu.shared if numbers[0] == SHARED else gpu.multiprocessors
            case "cudaStreamIsCapturing":
                numbers[0] = int(numbers[0] in self._captures)
            case "cudaStreamSynchronize":  # a graph would miss it; captures are global, as torch's
                return UNSUPPORTED if self._captures else 0
            case "cudaMemsetAsync":
                memory, value, call["bytes"], call["stream"] = numbers[:4]
                if call["stream"] not in self._captures:
                    ctypes.memset(memory, value, call["bytes"])
                    if self._runs:
                        self._held[1](memory, call["bytes"], FILLED)
            case "cudaMemcpyAsync":
                to, source, size, stream = numbers[:4]
                if stream not in self._captures:
                    ctypes.memmove(to, source, size)
            case "cudaFuncGetAttributes":
                numbers[0] = gpu.ptx_version
                return gpu.loads
            case "cudaFuncSetAttribute":
                call["value"] = numbers[0]
                if call["value"] > gpu.shared:
                    return INVALID
                gpu.allowed[kernel] = call["value"]
            case "cudaOccupancyMaxActiveClusters":
                cluster, shared = numbers[:2]
                numbers[0] = gpu.multiprocessors // cluster * (cluster <= gpu.largest_cluster)
                if gpu.ptx_version < 90 or not gpu.has(kernel, shared):
                    return CLUSTER if gpu.ptx_version < 90 else INVALID
            case "cudaOccupancyMaxActiveBlocksPerMultiprocessor":
                numbers[0] = gpu.resident(kernel, *numbers[:2])
            case "cudaLaunchKernelEx":
                return self._launch(gpu, kernel, call)
        return 0

    def _launch(self, gpu, kernel, launch):
        grid, block, cluster, shared = (launch[x] for x in ("grid", "block", "cluster", "shared"))
        if gpu.loads:
            return gpu.loads
        if grid == 0 or not 0 < block <= 1024 or not gpu.has(kernel, shared):
            return INVALID
        room = gpu.ptx_version >= 90 and cluster <= gpu.largest_cluster
        if cluster > 1 and (not room or grid % cluster):
            return CLUSTER
        multiprocessors = self._green.get(launch["stream"], gpu.multiprocessors)
        if launch["cooperative"] and grid > gpu.resident(kernel, block, shared) * multiprocessors:
            return TOO_LARGE
        if self._runs and launch["stream"] not in self._captures:
            self._runs(launch)
        return 0


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


def of(calls, function):
    """Those of a function of the runtime."""
    return [call for call in calls if call["call"] == function]


def launches(calls):
    """Those that launch a kernel."""
    return of(calls, "cudaLaunchKernelEx")


def kernel_of(launch):
    """The name of the kernel without its template's arguments."""
    return re.match(r"_ZN13bahdanau_fast3gpu\d+([a-z_]+)I", launch["kernel"])[1]


def numbers(launch, first, count):
    """int64 numbers of a launch's parameters, from the byte ``first`` on."""
    return struct.unpack_from(f"<{count}q", launch["parameters"], first)


@functools.cache
def mock():
    """The mock GPUs of this process."""
    return Mock()
