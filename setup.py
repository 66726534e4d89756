"""Builds the compiled backends. Everything else about the package is in pyproject.toml.

A backend that cannot be built is left out and the package works without it, unless its variable
demands it: BAHDANAU_FAST_CPU=1 makes a failed build an error, =0 skips it, unset tries.
BAHDANAU_FAST_CUDA likewise; unset, it is tried where torch is a CUDA build.
CXX, CXXFLAGS and LDFLAGS are honoured, e.g. for a sanitizer build, and MAX_JOBS, the most compilers
that run at a time; nvcc reads NVCC_CCBIN and NVCC_APPEND_FLAGS itself.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import ClassVar

import setuptools
from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1 has it from the package `wheel`
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:
        bdist_wheel = None

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
# An editable install builds in a temporary folder: objects kept there would never be found again.
# Builds beside the usual one (tests/hardening) keep theirs in a folder of their own.
OBJECTS = Path(
    os.environ.get("BAHDANAU_FAST_OBJECTS")
    or ROOT / "build" / f"objects-{sysconfig.get_platform()}"
)

# The oldest torch and Python the binaries load in; both headers then hide whatever came later.
ABI_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030A0000"]

# errno and floating-point traps are never looked at here, and minding them stops vectorisation.
CPU_FLAGS = [
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wall"),
    # GCC 12 raises the first in torch's headers; clang does not know it, and of that the second.
    *("-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"),
]

# The instruction set is picked at run time, so only the files named for one are compiled for it.
# In this order the objects are linked: of an inline function that several files emit the linker
# keeps the first copy, and that must be the one every machine can run.
ISA_FLAGS = {
    "": [],
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": [
        *("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
        "-Wno-uninitialized",  # GCC 12 raises it inside its own intrinsics (its bug 105593)
    ],
}

NVCC_FLAGS = [
    *("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-Wall"),
]

# TORCH_CUDA_ARCH_LIST, as torch's own extensions read it: versions, "+PTX" for code that later
# GPUs compile at load; "all" is what a wheel for everybody holds. Unset: the GPUs that are there,
# else DEFAULT_ARCHS, which loads on everything from sm_80 on. What a GPU compiles from the PTX of
# 8.0 at load has no clusters. 10.0 and 12.0 serve 10.3 and 12.1, too; nvcc knows them from 12.8 on.
ALL_ARCHS = "8.0+PTX 8.6 8.9 9.0a 10.0 12.0+PTX"
DEFAULT_ARCHS = "8.0+PTX 9.0a 10.0 12.0"
NEWEST_ARCHS, NEWEST_NVCC = ("10.0", "12.0", "12.0+PTX"), (12, 8)


class BuildError(Exception):
    """Why a backend cannot be built: one line, and what the tools printed."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


def isa_of(source: Path) -> str:
    """The key of ISA_FLAGS that a file's name asks for."""
    return next((isa for isa in ISA_FLAGS if isa and source.stem.endswith(isa)), "")


def fault(output: str) -> str:
    """The line of a failed tool's output that says why: marked as an error, or a linker's first."""
    aside = r"warning:|note:|in function [`']|skipping incompatible"
    by_caller = r"ld returned|linker command failed"
    lines = [line.strip() for line in output.splitlines()]
    lines = [x for x in lines if x and not re.search(f"{aside}|{by_caller}", x, re.IGNORECASE)]
    marked = [line for line in lines if re.search(r"\b(error|fatal)\s*:", line, re.IGNORECASE)]
    return next(iter([*marked, *lines]), "no error text")


def run(command: list[str], doing: str, show: bool = True) -> str:
    """Run a compiler or linker; its warnings are shown, its failure is a BuildError."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{doing}: cannot run {command[0]} ({error.strerror})") from error
    output = result.stdout + result.stderr
    if result.returncode:
        whole = f"{shlex.join(command)}\n{output}"
        raise BuildError(f"{doing}: {command[0]} failed ({fault(output)})", whole)
    if show:
        print(output, end="", flush=True)
    return output


def cxx() -> list[str]:
    """The C++ compiler: $CXX, else the first found of the usual names."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise BuildError("no C++ compiler found (looked for c++, g++, clang++ and $CXX)")
    return [found]


def python_include() -> Path:
    """The folder of Python.h."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        raise BuildError(f"Python.h is not in {folder} (on Debian and Ubuntu: python3-dev)")
    return folder


def torch_paths() -> tuple[str, list[str], list[str]]:
    """Torch's version, include folders and library folders."""
    try:
        with warnings.catch_warnings():  # of NumPy, which no build needs, if it is not there
            warnings.simplefilter("ignore")
            import torch
            from torch.utils.cpp_extension import include_paths, library_paths
    except Exception as error:  # a broken torch raises OSError, AttributeError and others
        raise BuildError(
            f"torch cannot be imported at build time ({error}); install torch first, "
            "then this package with --no-build-isolation"
        ) from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        raise BuildError(f"torch must be >= 2.10 to build against, got {torch.__version__}")
    return torch.__version__, include_paths(), library_paths()


def compile_object(source: Path, target: Path, command: list[str], stamp: str) -> None:
    """Compile one file unless its object is newer than all that went into it, and made alike."""
    stamp_file, rule = target.with_suffix(".stamp"), target.with_suffix(".d")
    stamp += shlex.join(command)
    if (
        all(path.exists() for path in (target, stamp_file, rule))
        and stamp_file.read_text() == stamp
    ):
        made = target.stat().st_mtime
        listed = rule.read_text().partition(":")[2].replace("\\\n", " ")
        inputs = [Path(name) for name in shlex.split(listed)]
        if inputs and all(path.exists() and path.stat().st_mtime < made for path in inputs):
            return
    stamp_file.unlink(missing_ok=True)
    start = time.time()
    out = ["-MMD", "-MF", str(rule), "-c", str(source), "-o", str(target)]
    printed = run([*command, *out], f"compiling {source.name}")
    target.with_suffix(".txt").write_text(printed)
    os.utime(target, (start, start))  # a file edited while the compiler ran is newer than this
    stamp_file.write_text(stamp)


def most_jobs() -> int:
    """How many compilers run at a time: $MAX_JOBS, else one for each core, and at least two."""
    asked = os.environ.get("MAX_JOBS", "")
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise BuildError(f"MAX_JOBS must be a number from 1 on, got {asked!r}")
        return int(asked)
    given = getattr(os, "sched_getaffinity", None)  # fewer than the machine has, in a container
    return max(2, len(given(0)) if given else os.cpu_count() or 1)


def compile_all(jobs: list[tuple[Path, Path, list[str]]], stamp: str) -> None:
    """Compile (source, object, command) side by side, and say how far it is."""
    at_once = most_jobs()
    what = f"what changed of {len(jobs)} files, {at_once} at a time"
    print(f"compiling {what}; all of them take minutes", flush=True)
    start = time.time()
    jobs = sorted(jobs, key=lambda job: not job[0].stem.startswith("kernels"))  # longest first
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(compile_object, *job, stamp): job[0].name for job in jobs}
        for count, job in enumerate(as_completed(running), 1):
            job.result()
            took = time.time() - start
            print(f"[{count}/{len(jobs)}] {running[job]} after {took:.0f} s", flush=True)


def build_cpu(sources: list[Path], target: Path) -> None:
    """Compile csrc/cpu and link the extension `_C_cpu`."""
    if os.name == "nt":
        raise BuildError("building on Windows is not supported")
    compiler = cxx()
    # Not this machine's: the compiler may be one for another.
    built_for = run([*compiler, "-dumpmachine"], "asking the compiler's target", show=False)
    if not built_for.startswith(("x86_64", "amd64")):
        sources = [source for source in sources if not isa_of(source)]
    if not sources:
        raise BuildError("no C++ sources in csrc/cpu")
    version, includes, libraries = torch_paths()
    system = [f"-isystem{path}" for path in (*includes, python_include())]
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))
    base = [*compiler, *CPU_FLAGS, *ABI_FLAGS, f"-I{CSRC}", *system, *extra]

    folder = OBJECTS / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(sources, key=lambda path: (list(ISA_FLAGS).index(isa_of(path)), path.name))
    objects = [folder / f"{source.stem}.o" for source in sources]
    compile_all(
        [
            (source, made, [*base, *ISA_FLAGS[isa_of(source)]])
            for source, made in zip(sources, objects, strict=True)
        ],
        version,
    )
    link([*compiler, "-shared", *map(str, objects), *extra], target, libraries)


def link(command: list[str], target: Path, libraries: list[str]) -> None:
    """Link an extension; whatever of torch it needs lives in the C shim of libtorch_cpu."""
    # No rpath: torch is imported first, so its libraries are already loaded under these names.
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    else:
        # Seen by others, a static libstdc++ mixes with torch's shared one and writes no numbers.
        command += ["-Wl,--exclude-libs,ALL", *(f"-L{path}" for path in libraries)]
        command += ["-Wl,--as-needed", "-ltorch_cpu"]
    target.parent.mkdir(parents=True, exist_ok=True)
    last = shlex.split(os.environ.get("LDFLAGS", ""))
    run([*command, *last, "-o", str(target)], f"linking {target.name}")


def find_nvcc() -> tuple[Path, str]:
    """The CUDA compiler, of $CUDA_HOME, on the path or in the usual place; its release, "13.0"."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    name = str(Path(home) / "bin" / "nvcc") if home else "nvcc"
    found = shutil.which(name) or (None if home else shutil.which("/usr/local/cuda/bin/nvcc"))
    if found is None:
        raise BuildError(f"nvcc not found (looked for {name})")
    release = re.search(
        r"release (\d+\.\d+)", run([found, "--version"], "asking nvcc's version", show=False)
    )
    if release is None:
        raise BuildError(f"{found} --version names no release")
    return Path(found), release[1]


def cuda_folder(nvcc: Path) -> Path:
    """The toolkit's folder; nvcc may be a link or a script that calls the real one."""
    command = [str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    told = run(command, "asking nvcc's folder", show=False)
    top = re.search(r"^#\$ TOP=(.*)$", told, re.MULTILINE)
    if top is None:
        raise BuildError(f"{nvcc} does not tell where its toolkit is")
    return Path(top[1].strip()).resolve()


def gencodes(release: str) -> list[str]:
    """The -gencode flags for TORCH_CUDA_ARCH_LIST, of an nvcc of this release."""
    import torch

    def known_to_nvcc(archs: str) -> str:
        old = tuple(map(int, release.split("."))) < NEWEST_NVCC
        return " ".join(a for a in archs.split() if not (old and a in NEWEST_ARCHS))

    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if wanted.lower() == "all":
        wanted = known_to_nvcc(ALL_ARCHS)
    elif not wanted and torch.cuda.is_available():
        there = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        wanted = " ".join(f"{a}.{b}{'a' if a == 9 else ''}" for a, b in sorted(set(there)))
    flags = []
    for arch in re.split(r"[ ;,]+", wanted.strip() or known_to_nvcc(DEFAULT_ARCHS)):
        known = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
        if known is None or int(known[1]) < 8:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST must name GPUs from 8.0 on, got {arch!r}")
        number = known[1] + known[2] + known[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if known[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def build_cuda(sources: list[Path], target: Path) -> None:
    """Compile csrc/cuda and link the extension `_C_cuda`; no GPU is needed for that."""
    version, includes, libraries = torch_paths()
    import torch

    built_for = torch.version.cuda
    if built_for is None and wanted("BAHDANAU_FAST_CUDA") != "1":
        raise BuildError(f"torch {version} is built without CUDA")
    nvcc, release = find_nvcc()
    if built_for is not None and built_for.partition(".")[0] != release.partition(".")[0]:
        raise BuildError(f"torch {version} is built for CUDA {built_for}, nvcc is of {release}")
    toolkit = cuda_folder(nvcc)
    compiler = cxx()
    system = [f"-isystem{path}" for path in (*includes, python_include(), toolkit / "include")]
    by_cxx = [*compiler, *CPU_FLAGS, *ABI_FLAGS, f"-I{CSRC}", *system]
    by_nvcc = [str(nvcc), *NVCC_FLAGS, f"-I{CSRC}", *gencodes(release)]
    folder = OBJECTS / "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        (source, folder / f"{source.stem}.o", by_nvcc if source.suffix == ".cu" else by_cxx)
        for source in sources
    ]
    compile_all(jobs, f"{version} {nvcc}")
    objects = [str(made) for _, made, _ in jobs]
    # The static runtime: torch's own, which it shares the device's context with, may lie anywhere.
    runtime = [f"-L{toolkit / folder}" for folder in ("lib64", "lib")]
    runtime += ["-lcudart_static", "-ldl", "-lpthread", "-lrt"]
    link([*compiler, "-shared", *objects, *runtime], target, libraries)


# Extension module -> how to build it, from what, and the variable that demands (1) or skips (0) it.
BACKENDS = {
    "bahdanau_fast._C_cpu": (build_cpu, "cpu/*/*.cpp", "BAHDANAU_FAST_CPU"),
    "bahdanau_fast._C_cuda": (build_cuda, "cuda/*/*.c*", "BAHDANAU_FAST_CUDA"),
}


def wanted(variable: str) -> str:
    """The setting of a backend's variable: "0", "1" or "" (try)."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{variable} must be 0, 1 or unset, got {value!r}")
    return value


class BuildExt(build_ext):
    """Builds what can be built, with flags per file, where setuptools' own has them per module."""

    def build_extensions(self) -> None:
        for ext in list(self.extensions):
            build, _, variable = BACKENDS[ext.name]
            target = Path(self.get_ext_fullpath(ext.name)).resolve()
            short = ext.name.rpartition(".")[2]
            log = ROOT / "build" / f"{short}.log"
            # What the package says of a missing backend, beside where its binary would be.
            folders = [target.parent, *([ROOT / "bahdanau_fast"] if self.editable_mode else [])]
            reasons = [folder / f"{short}.why.txt" for folder in folders]
            for path in (log, *reasons):
                path.unlink(missing_ok=True)
            try:
                if wanted(variable) == "0":
                    raise BuildError(f"left out of this build ({variable}=0)")
                build([ROOT / source for source in ext.sources], target)
            except BuildError as error:
                if wanted(variable) == "1":
                    raise CompileError(f"{ext.name}: {error}\n{error.output}") from error
                line = f"{ext.name} not built: {error}"
                print(f"{line}\nmore in {log}", file=sys.stderr, flush=True)
                log.parent.mkdir(exist_ok=True)
                log.write_text(f"{line}\n{error.output}")
                for path in reasons:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(str(error), encoding="utf-8")
                    # A binary of older sources must not pass for this one.
                    path.with_name(target.name).unlink(missing_ok=True)
                self.extensions.remove(ext)


if bdist_wheel is None:

    class BdistWheel(Command):
        """Says what to install; `setup.py build_ext` works without."""

        user_options: ClassVar[list[tuple[str, str, str]]] = []

        def initialize_options(self) -> None:
            raise SetupError(
                f"setuptools {setuptools.__version__} makes no wheels without the package wheel; "
                "install them first: pip install -U 'setuptools>=77' wheel"
            )

else:

    class BdistWheel(bdist_wheel):
        """Tags the wheel by what was built: cp310-abi3 with a binary, py3-none-any without."""

        def run(self) -> None:
            self.run_command("build")
            # Why there is no CUDA here says nothing of where the wheel will be.
            package = Path(self.get_finalized_command("build").build_lib, "bahdanau_fast")
            (package / "_C_cuda.why.txt").unlink(missing_ok=True)
            if not self.get_finalized_command("build_ext").extensions:
                self.root_is_pure = True
            super().run()


def license_metadata() -> dict[str, str]:
    """As an SPDX expression of its own field (PEP 639) where setuptools knows that field."""
    known = int(setuptools.__version__.partition(".")[0]) >= 77
    return {"license_expression" if known else "license": "Apache-2.0"}


def long_description() -> str:
    """README for where it stands alone: links into this tree lead to the release, by its tag.

    Where that is says ``Repository`` in project.urls; without it they are text.
    """

    def text_of(name: str) -> str:
        return (ROOT / name).read_text(encoding="utf-8")

    def outside(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not address:
            return f"{text} ({path})"
        kind = "raw" if path.endswith((".png", ".svg")) else "blob"
        return link[0].replace(f"]({path})", f"]({address[0]}/{kind}/v{version}/{path})")

    address = re.findall(r'^Repository = "(.+?)/?"$', text_of("pyproject.toml"), re.MULTILINE)
    (version,) = re.findall(r'^__version__ = "(.+)"$', text_of("bahdanau_fast/__init__.py"), re.M)
    link = r"!?\[(!\[[^]]+\]\([^)]+\)|[^][]+)\]\((?!https?:)([^)]+)\)"  # of text, or of a picture
    return re.sub(link, outside, text_of("README.md"))


def local_version() -> str:
    """What follows the version: "+cu130" where CUDA C++ is demanded, so that wheels differ."""
    if wanted("BAHDANAU_FAST_CUDA") != "1":
        return ""
    try:
        return f"+cu{find_nvcc()[1].replace('.', '')}"
    except BuildError:  # the build itself will say so
        return ""


def package_dirs() -> dict[str, str]:
    """Where the packages lie; kernels/ is not below the one that it is a part of.

    An editable install has links instead: ``build/editable`` holds one to the package, which has
    one to kernels/. That folder is put on the path, so type checkers and editors, which know
    nothing of import hooks, find the package, and nothing else of this tree can be imported. Where
    no links can be made, setuptools writes a hook, which Python alone follows.
    """
    package, folder = ROOT / "bahdanau_fast", ROOT / "build" / "editable"
    links = {package / "kernels": ROOT / "kernels", folder / package.name: package}
    if "editable_wheel" in sys.argv:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for link, target in links.items():
                if not link.is_symlink():
                    relative = os.path.relpath(target, link.parent)
                    link.symlink_to(relative, target_is_directory=True)
        except OSError as error:
            print(f"an editable install that type checkers do not see: {error}", file=sys.stderr)
        else:
            return {"": "build/editable"}
    return {"bahdanau_fast.kernels": "kernels"}


if sys.platform == "darwin":
    # One architecture is compiled for, also by a Python that holds two: the wheel names that one.
    macos = os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "11.0")
    os.environ.setdefault("_PYTHON_HOST_PLATFORM", f"macosx-{macos}-{platform.machine()}")

setup(
    **license_metadata(),
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=[
        *setuptools.find_packages(
            include=["bahdanau_fast", "bahdanau_fast.*"], exclude=["bahdanau_fast.kernels"]
        ),
        "bahdanau_fast.kernels",
    ],
    package_dir=package_dirs(),
    package_data={"bahdanau_fast": ["py.typed", "seq2seq/attention.html"]},
    include_package_data=False,  # else an in-place binary listed by the VCS could enter the wheel
    ext_modules=[
        Extension(
            name,
            sources=sorted(
                str(path.relative_to(ROOT))
                for path in (*CSRC.glob(pattern), *CSRC.glob("common/*.cpp"))
            ),
            py_limited_api=True,
        )
        for name, (_, pattern, _) in BACKENDS.items()
    ],
    cmdclass={"build_ext": BuildExt, "bdist_wheel": BdistWheel},
    options={
        "bdist_wheel": {"py_limited_api": "cp310"},
        "egg_info": {"tag_build": local_version()},
    },
)
