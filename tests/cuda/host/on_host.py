"""The CUDA kernels of csrc/cuda, compiled for the host, with AddressSanitizer and UBSan.

What only it proves: the whole contract table and drawn cases in seconds, with the source of
kernels, launchers and operators under sanitizers. The machine code, in tests/ptx, is the judge of
everything else.

A process of its own, which has the sanitizers' runtime, runs the operators on the mock CUDA
runtime, and that runs their launches on fibers.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import suppress

import torch
from calls import CudaCalls
from mock_cuda import Mock, library

__all__ = ["OnHost"]

OPTIONS = {
    # What is allocated begins as NaN: what is left unwritten shows.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:malloc_fill_byte=255:"
    "max_malloc_fill_size=1000000000",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "CUDA_VISIBLE_DEVICES": "",  # with a GPU, the extension would define the operators
}


class OnHost(CudaCalls):
    """The kernels on the host, in a process that starts now.

    Args:
        less_shared: bytes of shared memory that launches lack, to plant a mistake.
    """

    def __init__(self, less_shared=0):
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  for as long as the process
        self._process = subprocess.Popen(
            [sys.executable, __file__, library(sanitized=True), str(less_shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **OPTIONS, "LD_PRELOAD": ":".join(map(_where_is, RUNTIMES))},
        )

    def close(self):
        """End the process; fails when it ended itself, with what a sanitizer said."""
        with suppress(BrokenPipeError):  # what it no longer reads
            self._process.stdin.close()
        self._process.stdout.close()
        if self._process.wait(60) != 0:
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")
            raise AssertionError(f"ended with {self._process.returncode}\n{said}")

    def operator(self, name, *arguments):
        alone = {id(x): _alone(x) for x in arguments if isinstance(x, torch.Tensor)}
        call = self.multiprocessors, name, [alone.get(id(x), x) for x in arguments]
        try:
            pickle.dump(call, self._process.stdin)
            self._process.stdin.flush()
            result = pickle.load(self._process.stdout)
        except (BrokenPipeError, EOFError):
            self.close()
            raise
        if isinstance(result, Exception):
            raise result
        return result


# libstdc++ too: the runtime looks for its throw when it starts, before Python loads it.
RUNTIMES = "libasan.so", "libstdc++.so.6"


def _where_is(name):
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _alone(x):
    """A tensor in memory of its own, no larger than it takes, and as misaligned as it was."""
    if x.numel() == 0:
        return x.detach()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = x.storage_offset() % (16 // x.element_size())
    memory = x.new_zeros(first + last + 1)
    memory[first:] = x.detach().as_strided((last + 1,), (1,), x.storage_offset())
    return memory.as_strided(x.shape, x.stride(), first)


def serve():
    """Answer calls from standard input until it ends."""
    calls, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no result
    gpu = Mock(sys.argv[1])
    gpu.new_gpu()
    gpu.run_on_fibers(int(sys.argv[2]))
    while True:
        try:
            multiprocessors, name, arguments = pickle.load(calls)
        except EOFError:
            os._exit(0)  # nothing is left to be told
        gpu.set_gpu(multiprocessors=multiprocessors)
        gpu.calls()
        try:
            result = gpu.operator(name, *arguments)
        except RuntimeError as error:
            result = error
        pickle.dump(result, results)
        results.flush()


if __name__ == "__main__":
    serve()
