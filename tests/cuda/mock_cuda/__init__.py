"""csrc/cuda/op and csrc/cuda/runtime on a machine without a GPU, on a mock CUDA runtime.

What only it proves: which launches and other calls of the runtime an operator makes, streams,
captures and errors included.

Calls of the operators take CPU tensors. Their launches are noted, and run as :meth:`Mock.runs` says
(in the PTX machine, as tests/ptx does); else results are whatever memory held.
:meth:`Mock.calls` gives the notes: call (the function), device, error, and of a launch kernel
(mangled), grid, block, cluster, cooperative, shared (bytes), stream, parameters (hex bytes).
"""

import ctypes
import functools
import json
import re
import struct
from contextlib import contextmanager
from pathlib import Path

import torch

import bahdanau_fast.backends.triton  # noqa: F401  else, loaded later, it would stand in front
from bahdanau_fast.ops.operator import operators
from ptx_machine import built

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCES = (
    *sorted(HERE.glob("*.cpp")),
    *(path for path in sorted((ROOT / "csrc/cuda/op").glob("*.cpp")) if path.stem != "module"),
)
KERNELS = sorted((ROOT / "csrc/cuda/op").glob("*.cu"))
# Functions of torch that give memory: torch_on_cpu.cpp says where.
WRAPPED = "aoti_torch_empty_strided", "torch_call_dispatcher"
# Kernel (mangled), blocks, threads, cluster, bytes of shared memory, whether it is cooperative,
# parameters and their bytes.
LAUNCH = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, *[ctypes.c_int64] * 5, ctypes.c_void_p, ctypes.c_int64
)
# Address, bytes, and which: new; something is written there.
MEMORY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
OF_TENSOR, FILLED = range(2)
PLAN = (
    "groups", "blocks", "rows", "sentences", "units", "hidden", "features", "resident", "bytes",
)  # fmt: skip
NON_BLOCKING = 1  # a flag of streams: the legacy stream does not wait for it


def library():
    """The mock's own library, with csrc/cuda in it."""
    from torch.utils import cpp_extension

    csrc = ROOT / "csrc"
    includes = [f"-I{folder}" for folder in (HERE, csrc, csrc / "cuda" / "op")]
    includes += [f"-isystem{folder}" for folder in cpp_extension.include_paths()]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    command = [
        *("g++", "-std=c++17", "-O2", "-w", "-fPIC", "-shared", "-fno-gnu-unique"),
        *("-DTORCH_TARGET_VERSION=0x020a000000000000", "-DBAHDANAU_FAST_LAB"),
        *(*includes, *map(str, SOURCES)),
        *("-x", "c++", *map(str, KERNELS), "-x", "none"),
        *("-Wl,-Bsymbolic", *(f"-Wl,--wrap={name}" for name in WRAPPED)),
        *(*libraries, "-ltorch_cpu", "-ldl"),
    ]
    folders = HERE, csrc / "common", csrc / "cuda"
    headers = [path for folder in folders for path in folder.rglob("*.h")]
    return built("mock_cuda/library", [*SOURCES, *KERNELS, *sorted(headers)], command)


class Mock:
    """The mock GPUs, one set of them in a process: :func:`mock`."""

    def __init__(self):
        self._library = ctypes.CDLL(str(library()))
        for name in ("mock_calls", "mock_why_not", "mock_why_not_decode"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self.devices = self.device = -1
        self._then = []  # kept while the library may call them

    def new_gpu(self, **like):
        """The number of a GPU that nothing was asked of; :meth:`set_gpu` has what it may be like.

        All tensors are there from now on, and it is the current one.
        """
        self.devices += 1
        self.device = self.devices
        self.set_gpu(**like)
        self.use_gpu()
        return self.device

    def use_gpu(self, device=None):
        """Make a GPU, that of the tensors unless given, the current one of this thread."""
        self.device = self.device if device is None else device
        self._library.mock_set_device(self.device)

    @contextmanager
    def runs(self, launch, memory):
        """Inside, launches are run by ``launch`` (LAUNCH), and ``memory`` (MEMORY) is told of any.

        What they raise is raised at the end; there are no more launches then.
        """
        failed = []

        def guarded(function, *arguments):
            try:
                if not failed:
                    function(*arguments)
            except BaseException as error:
                failed.append(error)

        held = (
            LAUNCH(functools.partial(guarded, launch)),
            MEMORY(functools.partial(guarded, memory)),
        )
        self._library.mock_runs(*held)
        try:
            yield
        except RuntimeError:  # of results that were never made
            if not failed:
                raise
        finally:
            self._library.mock_runs(None, None)
        if failed:
            raise failed[0]

    def note(self, calls):
        """Whether calls are noted; where they are not, a launch returns at once."""
        self._library.mock_noted(calls)

    def set_gpu(
        self, multiprocessors=132, largest_cluster=8, ptx_version=90, loads=0, shared=227 << 10
    ):
        """What the GPU of the tensors is like.

        Args:
            multiprocessors: how many it has.
            largest_cluster: blocks that fit.
            ptx_version: of the code that runs there.
            loads: the error that loading the code gives, or 0.
            shared: bytes of shared memory that a block can have.
        """
        what = self.device, multiprocessors, largest_cluster, ptx_version, loads, shared
        self._library.mock_set_gpu(*what)

    @contextmanager
    def without_clusters(self):
        """Inside, on GPUs that are new, as where a user has switched them off."""
        self._library.mock_clusters(0)
        try:
            yield
        finally:
            self._library.mock_clusters(1)

    def runtime(self, function, *arguments):
        """Call a function of the runtime; the error that it gives."""
        return getattr(self._library, function)(*arguments)

    def new_stream(self, flags=NON_BLOCKING):
        """The handle of a stream."""
        stream = ctypes.c_void_p()
        self.runtime("cudaStreamCreateWithFlags", ctypes.byref(stream), flags)
        return stream.value

    @contextmanager
    def capture(self, stream):
        """Inside, ``stream`` is the current one, and what is queued on it goes into a graph.

        Raises:
            RuntimeError: no graph comes of it, since a call could not be captured.
        """
        self._library.mock_begin_capture(ctypes.c_void_p(stream))
        try:
            yield
        finally:
            error = self._library.mock_end_capture(ctypes.c_void_p(stream))
        if error:
            raise RuntimeError(f"the capture ended with error {error}")

    @contextmanager
    def green_context(self, multiprocessors):
        """Inside, the current stream is of a green context with so many multiprocessors."""
        stream = ctypes.c_void_p(self.new_stream())
        self._library.mock_green_context(stream, multiprocessors)
        try:
            yield
        finally:
            self._library.mock_green_context(stream, 0)

    def fail(self, function, error):
        """The next call of a function of the runtime gives an error."""
        self._library.mock_fail(function.encode(), error)

    def after(self, function, then):
        """The next call of a function of the runtime runs ``then()`` before it returns."""
        self._then.append(ctypes.CFUNCTYPE(None)(then))
        self._library.mock_after(function.encode(), self._then[-1])

    def last_error(self):
        """The error left in this thread, which is taken away."""
        return self.runtime("cudaGetLastError")

    def why_not(self):
        """What keeps the kernels from running on the current device, in words, or None."""
        said = self._library.mock_why_not()
        return said and said.decode()

    def why_not_decode(self, lstm, backward, *sizes):
        """What keeps all steps of a decoder (B, Tk, F, Dv, H, V, T) from being one launch."""
        numbers = map(ctypes.c_int64, sizes)
        said = self._library.mock_why_not_decode(int(lstm), int(backward), *numbers)
        return said and said.decode()

    def plan(self, lstm, backward, sizes, blocks, shared):
        """How such a decoder is cut for a GPU of so many blocks and bytes: PLAN, by name."""
        found = (ctypes.c_int * len(PLAN))()
        numbers = map(ctypes.c_int64, (*sizes, blocks, shared))
        self._library.mock_plan(int(lstm), int(backward), *numbers, found)
        return dict(zip(PLAN, found, strict=True))

    def calls(self):
        """The runtime's calls since the last time: a list of dicts."""
        return json.loads(self._library.mock_calls())

    @staticmethod
    def operator(name, *args):
        """Call an operator of ``torch.ops.bahdanau_fast`` on CPU tensors, as if on CUDA tensors."""
        return operators[name].overload._op_dk(torch._C.DispatchKey.CUDA, *args)


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
    return struct.unpack_from(f"<{count}q", bytes.fromhex(launch["parameters"]), first)


@functools.cache
def mock():
    """The mock GPUs of this process."""
    return Mock()
