"""Whether each backend can be loaded in this process, and if not, why in one line."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Literal

import torch

from bahdanau_fast import switches

# The stable ABI the extensions are built against.
TORCH = (2, 10)
# The kernels are compiled and interpreted in the tests with this and newer ones.
TRITON = (3, 6)
# CUDA C++ takes tensor cores for bf16, and 96 KB of shared memory for a block. CUDA 13 has nothing
# older than what Triton's kernels are compiled for.
CAPABILITY = {"cuda": (8, 0), "triton": (7, 5)}


def cpu_problem() -> str | None:
    """Import the C++ extension, which registers the CPU kernels; None or what went wrong."""
    if _is_below(torch.__version__, TORCH):
        return f"the C++ extension needs torch >= {_dotted(TORCH)}, got {torch.__version__}"
    return _load("_C_cpu", "C++", "a C++17 compiler")


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _is_below(version: str, least: tuple[int, int]) -> bool:
    """Whether a version is older; one that nobody can read is not."""
    numbers = version.partition("+")[0].split(".")[:2]
    return all(part.isdigit() for part in numbers) and (*map(int, numbers),) < least


def _load(extension: str, kind: str, needs: str) -> str | None:
    """Import an extension module; None or what went wrong."""
    module = f"bahdanau_fast.{extension}"
    try:
        _check_whole(module)
        importlib.import_module(module)
    except ModuleNotFoundError:
        return f"the {kind} extension is not built{_why_not_built(extension, needs)}"
    except (ImportError, OSError) as error:
        return f"the {kind} extension is present but does not load: {_first_line(error)}"
    return None


@functools.cache
def cuda_problem() -> str | None:
    """Import the CUDA C++ extension, which registers its kernels; None or what went wrong."""
    if switches.is_off("cuda"):
        return switches.why_off("cuda")
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    problem = _too_old("cuda") or _load("_C_cuda", "CUDA", "nvcc of torch's CUDA")
    return problem or _does_not_run()


def _does_not_run() -> str | None:
    """What keeps the CUDA extension, which is loaded, from running on a visible GPU, or None.

    It may be built for other GPUs, or for a newer driver. The current GPU is asked, and the first
    of each other compute capability: asking takes memory there. GPUs too old for all are not.
    """
    binary = importlib.import_module("bahdanau_fast._C_cuda")
    if switches.is_off("clusters"):
        binary.without_clusters()
    asked = set()
    for device in (torch.cuda.current_device(), *range(torch.cuda.device_count())):
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY["cuda"] or capability in asked:
            continue
        asked.add(capability)
        with torch.cuda.device(device):
            problem: str | None = binary.why_not()
        if problem is not None:
            gpu = f"cuda:{device} (compute capability {_dotted(capability)})"
            return f"the CUDA extension does not run on {gpu}: {problem}"
    return None


def one_launch_problem(
    device: torch.device, lstm: bool, backward: bool, sizes: tuple[int, ...]
) -> str | None:
    """What keeps all steps of a decoder from one launch on a GPU, with backward from two; or None.

    ``sizes`` are B, Tk, F, Dv and H, and where tokens are written how many there are, and the most
    for a row; the CUDA extension is loaded.
    """
    if switches.is_off("one-launch"):
        return switches.why_off("one-launch")
    why_not = importlib.import_module("bahdanau_fast._C_cuda").why_not_decode
    with torch.cuda.device(device):
        problem: str | None = why_not(lstm, False, *sizes)
        if problem is None and backward:
            problem = why_not(lstm, True, *sizes)
    return problem


def _too_old(backend: str, device: torch.device | None = None) -> str | None:
    """What a GPU, the current one unless given, is too old for; or None."""
    least, has = CAPABILITY[backend], torch.cuda.get_device_capability(device)
    if has >= least:
        return None
    return f"compute capability {_dotted(least)} is needed, this GPU has {_dotted(has)}"


def is_too_old(backend: str, device: torch.device) -> bool:
    """Whether a backend that is there cannot serve this GPU, which may not be the current one."""
    if torch.version.cuda is None or backend not in CAPABILITY:
        return False
    # Without an index it is the current one, which changes.
    return (_is_too_old if device.index is not None else _is_too_old.__wrapped__)(backend, device)


@functools.cache
def _is_too_old(backend: str, device: torch.device) -> bool:
    return _too_old(backend, device) is not None


# As of ``backends.why_not``.
is_too_old._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_not_built(extension: str, needs: str) -> str:
    """What is known of an extension that is not there, to follow "is not built"."""
    reason = Path(__file__).parents[1] / f"{extension}.why.txt"  # of setup.py
    if reason.is_file():
        return f": {' '.join(reason.read_text(encoding='utf-8').split())}"
    return f" (install with {needs} present, and --no-build-isolation)"


def _check_whole(module: str) -> None:
    """Refuse a cut-off ELF file: the loader maps it and dies of SIGBUS, which nothing can catch."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return
    with Path(spec.origin).open("rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return  # not 64-bit ELF: the loader itself has words for it
    order: Literal["little", "big"] = "little" if header[5] == 1 else "big"
    sections = int.from_bytes(header[40:48], order)
    entry, count = (int.from_bytes(header[at : at + 2], order) for at in (58, 60))
    if size < sections + entry * count:
        raise ImportError(f"{spec.origin} is cut off at {size} bytes")


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU: to test, not to be fast.

    It cuts fp32 off to bf16, where GPUs round.
    """
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _no_gpu_for_triton() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA or ROCm device is visible (TRITON_INTERPRET=1 runs it on the CPU)"
    return _too_old("triton") if torch.version.hip is None else None


@functools.cache
def triton_problem() -> str | None:
    """Import the Triton kernels and register them for CUDA tensors; None or what went wrong."""
    problem = switches.why_off("triton") or (None if interpreted() else _no_gpu_for_triton())
    if problem is not None:
        return problem
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if _is_below(version, TRITON):
        return f"Triton must be >= {_dotted(TRITON)}, got {version}"
    try:
        importlib.import_module("bahdanau_fast.backends.triton.register")
    except Exception as error:  # Triton raises errors of many kinds when it does not fit
        return f"the Triton kernels do not load: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
