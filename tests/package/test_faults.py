"""Things that go wrong around a call: one clear message, nothing broken, the next call right.

Without the extension, or with a broken one, the package works on the reference and says why.
"""

import _ctypes
import ctypes
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from sysconfig import get_path

import pytest
import torch
from fresh import ROOT, build_package, copy_package, copy_tree, empty_compiler, forked, python

import bahdanau_fast as bf

# ---- building ------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    return copy_tree(tmp_path)


def build(tree, *command, **variables):
    skip = {"BAHDANAU_FAST_CUDA": "0", "BAHDANAU_FAST_CPU": ""}
    return forked("file", *command, cwd=tree, **skip, **variables)


def test_without_a_compiler_the_build_says_so_and_goes_on(tree):
    command = ["setup.py", "-q", "build_ext", "--build-lib", str(tree / "lib")]
    done = build(tree, *command, CXX="no-such-compiler")
    said = [line for line in done.stderr.splitlines() if "_C_cpu not built" in line]
    assert len(said) == 1
    assert re.search(r"cannot run no-such-compiler \(No such file", said[0])
    assert "Traceback" not in done.stderr


def replace_sources(tree, *sources):
    for path in tree.glob("csrc/cpu/*/*.cpp"):
        path.unlink()
    for number, text in enumerate(sources):
        (tree / f"csrc/cpu/op/part{number}.cpp").write_text(text)


@pytest.mark.parametrize("jobs", ["1", "3", "0", "all"])
def test_max_jobs_bounds_the_compilers(jobs, tree):
    # A compiler that notes how many of it there are.
    counts = "mkdir $0-$$; ls -d $0-* | wc -l >>$0.txt; sleep 0.1; rmdir $0-$$"
    compiler = empty_compiler(tree / "compiler", before=counts)
    replace_sources(tree, *[""] * 6)
    command = ["setup.py", "-q", "build_ext", "--build-lib", str(tree / "lib")]
    done = build(tree, *command, CXX=compiler, MAX_JOBS=jobs)
    if jobs in ("1", "3"):
        assert f", {jobs} at a time" in done.stdout
        most = max(map(int, (tree / "compiler.txt").read_text().split()))
        assert (most > 1) == (jobs != "1")
        assert most <= int(jobs)
    else:
        assert f"MAX_JOBS must be a number from 1 on, got '{jobs}'" in done.stderr


def linked(tree, flags, *sources):
    """The binary of these sources alone, linked with these flags, or why there is none."""
    replace_sources(tree, *sources)
    command = ["setup.py", "-q", "build_ext", "--build-lib", str(tree / "lib")]
    said = build(tree, *command, LDFLAGS=flags).stderr
    why = re.search(r"_C_cpu not built: (.*)", said)
    return why[1] if why else tree / "lib/bahdanau_fast/_C_cpu.abi3.so"


@pytest.mark.skipif(sys.platform != "linux", reason="the words of Linux's linkers")
@pytest.mark.parametrize(
    ("reason", "flags", "sources"),
    [
        (r"multiple definition of .f\(\)", "", ["int f() { return 1; }"] * 2),
        (r"undefined reference to .g\(\)", "-Wl,-z,defs", ["int g(); int f() { return g(); }"]),
        ("cannot find -lno_such_library", "-lno_such_library", [""]),
    ],
)
def test_the_reason_for_a_failed_link_is_the_linkers(tree, reason, flags, sources):
    assert re.search(f"^linking _C_cpu.abi3.so: .*{reason}", linked(tree, flags, *sources))


def tool(*command):
    """What a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


WRITES = """
#include <sstream>
#include <vector>
int throws(const std::vector<int>& x) { return x.at(7); }
extern "C" __attribute__((visibility("default"))) int digits(int number) {
  std::ostringstream text;
  text << number;
  return text.str().size();
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of GCC's runtime")
def test_a_static_runtime_links_and_works_beside_the_shared_one_of_torch(tree):
    if not Path(tool("c++", "-print-file-name=libstdc++.a").strip()).is_absolute():
        pytest.skip("the compiler has no static libstdc++")
    binary = linked(tree, "-static-libstdc++", WRITES)
    assert "libstdc++" not in tool("readelf", "-d", binary)
    assert ctypes.CDLL(str(binary)).digits(1234) == 4


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_package_without_a_binary_holds_the_reason(tree, kind):
    compiler = empty_compiler(tree / "compiler")

    def built(**variables):
        wheel, _ = build_package(tree, f"build_{kind}", **{"BAHDANAU_FAST_CPU": "", **variables})
        found = {path.name: path.read_bytes() for path in tree.glob("bahdanau_fast/_C_*")}
        with zipfile.ZipFile(wheel) as packed:
            for path in map(Path, packed.namelist()):
                if path.match("bahdanau_fast/_C_*"):
                    found[path.name] = packed.read(str(path))
        wheel.unlink()
        if kind == "editable":  # a wheel may be for another machine
            assert b"BAHDANAU_FAST_CUDA=0" in found.pop("_C_cuda.why.txt")
        return found

    assert built(CXX=compiler) == {"_C_cpu.abi3.so": b""}
    found = built(CXX="no-such-compiler")  # nothing is left of the build before
    assert b"cannot run no-such-compiler (No such file or" in found.pop("_C_cpu.why.txt")
    assert not found
    assert built(CXX=compiler) == {"_C_cpu.abi3.so": b""}


# ---- loading: without the extension, or with a broken one, on the reference ----------------------

WORKS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import bahdanau_fast as bf
import torch
ours = [w for w in caught if "bahdanau_fast" in str(w.message)]
assert len(ours) == 1, [str(w.message) for w in caught]
assert ours[0].category is RuntimeWarning
assert "using the slower reference backend" in str(ours[0].message)
assert bf.backends.available() == ("reference",)
torch.manual_seed(0)
q, k = torch.randn(2, 3, 4), torch.randn(2, 5, 6)
attention = bf.AdditiveAttention(8, 0.1)
with warnings.catch_warnings():
    warnings.simplefilter("error", RuntimeWarning)  # said once
    context = attention(q, k, k, torch.tensor([2, 5]))
    context.sum().backward()
    memory = attention.memory(k)
    attention.attend(q, memory)
weights = attention.W_q.weight, attention.W_k.weight, attention.w_v.weight
want, _ = bf.reference.additive_attention(q, k, k, *weights)
got, _ = bf.additive_attention(q, k, k, *weights)
assert torch.equal(got, want)
for ask in (lambda: bf.additive_attention(q, k, k, *weights, backend="cpu"),
            lambda: bf.backends.use("cpu").__enter__()):
    try:
        ask()
    except ValueError as error:
        refusal = str(error)
    else:
        raise SystemExit("asking for cpu was not refused")
print(ours[0].message)
print(refusal)
"""


@pytest.fixture
def copied(tmp_path):
    """A copy of the package without its binary."""
    return copy_package(tmp_path)


def missing(folder):
    del folder
    return r"the C\+\+ extension is not built"


def left_out(folder):
    reason = "torch cannot be imported at build time (No module named 'torch')\n  install it first"
    (folder / "bahdanau_fast/_C_cpu.why.txt").write_text(reason)
    return re.escape("the C++ extension is not built: " + " ".join(reason.split()))


def garbage(folder):
    (folder / "bahdanau_fast/_C_cpu.abi3.so").write_bytes(b"not a library" * 100)
    return r"the C\+\+ extension is present but does not load: .*invalid ELF header"


def truncated(folder):
    # As an interrupted copy leaves it; the loader maps it and dies on the missing pages (SIGBUS).
    real = Path(sys.modules["bahdanau_fast._C_cpu"].__file__).read_bytes()
    (folder / "bahdanau_fast/_C_cpu.abi3.so").write_bytes(real[: len(real) // 2])
    return r"the C\+\+ extension is present but does not load: "


def another(folder):
    # A module of that name that is none of ours: no PyInit__C_cpu in it.
    shutil.copy(_ctypes.__file__, folder / "bahdanau_fast/_C_cpu.abi3.so")
    return r"the C\+\+ extension is present but does not load: .*PyInit__C_cpu"


OTHER_ABI = """
#include <Python.h>
int aoti_torch_of_another_version(void);
PyMODINIT_FUNC PyInit__C_cpu(void) { return PyLong_FromLong(aoti_torch_of_another_version()); }
"""


def another_abi(folder):
    if shutil.which("gcc") is None:
        pytest.skip("makes a library with gcc")
    (folder / "other.c").write_text(OTHER_ABI)
    include, made = get_path("include"), folder / "bahdanau_fast/_C_cpu.abi3.so"
    command = ["gcc", "-shared", "-fPIC", f"-I{include}", str(folder / "other.c"), "-o", str(made)]
    subprocess.run(command, check=True)
    return r"is present but does not load: .*undefined symbol: aoti_torch_of_another_version"


def old_torch(folder):
    shutil.copy(sys.modules["bahdanau_fast._C_cpu"].__file__, folder / "bahdanau_fast")
    with (folder / "sitecustomize.py").open("a") as file:
        file.write("import torch; torch.__version__ = '2.9.1+cpu'")
    return r"the C\+\+ extension needs torch >= 2\.10, got 2\.9\.1\+cpu"


BREAKAGES = [missing, left_out, garbage, truncated, another, another_abi, old_torch]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__)
def test_the_package_works(copied, breakage):
    reason = breakage(copied)
    code = f"{WORKS}\nfrom bahdanau_fast.cli import main\nmain(['info'])"
    done = forked("-c", code, cwd=copied, path=copied)
    warning, refusal, *info = done.stdout.strip().splitlines()
    assert re.search(reason, warning)
    assert "python -m bahdanau_fast info" in warning
    assert re.search(f"backend must be available here, got 'cpu': .*{reason}", refusal)
    info = "\n".join(info)
    assert re.search(f"cpu +not available: .*{reason}", info)
    assert "auto takes 'reference' for cpu tensors" in info
    assert str(copied) in info
    assert "Traceback" not in done.stderr


def test_the_whole_package_imports_without_a_warning_when_built():
    assert python("-W", "error", "-c", "import bahdanau_fast", path=ROOT).stderr == ""


# ---- in the middle of a call ---------------------------------------------------------------------

OUT_OF_MEMORY = """
import resource, torch, bahdanau_fast as bf
torch.set_num_threads({threads})
ops = torch.ops.bahdanau_fast
def problem(B, Tq, Tk, H, Dv):
    # Queries, keys, values: sizes without memory.
    return [torch.zeros(1, 1, 1).expand(B, n, m) for n, m in ((Tq, H), (Tk, H), (Tk, Dv))]
def bounded(call):
    # Room for what is there, threads and their stacks, and little more.
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), before[1]))
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    raise SystemExit("there was memory enough")
w = torch.ones(1, 64)
small = [torch.randn(2, n, 64) for n in (3, 5, 5)]
want = ops.attention(*small, w)
grads = torch.zeros_like(want[0]), torch.zeros_like(want[1])
ops.attention_backward(want[1], None, None, *grads, 15, *small, w)
keys = problem(64, 1, 200_000, 64, 8)[1]     # a table of 3.2 GB
many = problem(40, 400, 9000, 8, 8)          # weights of 576 MB
split = problem(1, 1, 20_000_000, 1, 1)      # scores of 80 MB, for all threads
rows = problem(16, 1, 10_000_000, 1, 1)      # scores of 40 MB in each thread
wide = problem(3, 4000, 4001, 2, 2)          # weights of 192 MB to be copied
weights = torch.zeros(1).expand(3, 4000, 4001)
calls = {{
    "table": lambda: ops.exp_keys(keys),
    "result": lambda: ops.attention(*many, w[:, :8]),
    "scores": lambda: ops.attention(*split, w[:, :1], need_weights=False),
    "workspace": lambda: ops.attention(*rows, w[:, :1], need_weights=False),
    "backward": lambda: ops.attention_backward(
        weights, None, None, torch.zeros(1, 1, 1).expand(3, 4000, 2), None, 1, *wide, w[:, :2]
    ),
}}
for name, call in calls.items():
    error = bounded(call)
    print(name, "|", type(error).__name__, "|", str(error).strip().splitlines()[0])
    again = ops.attention(*small, w)
    assert all(torch.equal(x, y) for x, y in zip(again, want)), name
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("threads", [1, 2])
def test_out_of_memory_inside_an_operator(threads):
    done = forked("-c", OUT_OF_MEMORY.format(threads=threads))
    lines = [line.split(" | ", 2) for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["table", "result", "scores", "workspace", "backward"]
    for name, kind, message in lines:
        assert kind == "RuntimeError", name
        assert re.search("not enough memory for a ", message), (name, message)


INTERRUPTED = """
import random, signal, torch, bahdanau_fast as bf
random.seed(0)
torch.manual_seed(0)
attention = bf.AdditiveAttention(32, 32, 64)
sources = [torch.randn(4, 80, 32, requires_grad=True) for _ in range(3)]
query = torch.randn(4, 1, 32)
def truth(keys):
    with bf.backends.use("reference"):
        return attention(query, keys, keys)
signal.signal(signal.SIGALRM, signal.default_int_handler)
with torch.no_grad():
    wants = [truth(keys) for keys in sources]
caught = 0
for round in range(60):
    signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-5, 4e-3))
    try:
        for step in range(1000):
            keys = sources[step // 3 % 3]
            attention(query, keys, keys).sum().backward()
            memory = attention.memory(keys)
            attention.attend(query, memory)
    except KeyboardInterrupt:
        caught += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    for keys, want in zip(sources, wants):
        # In fp32, of one route or another; what an interrupt tore is far off.
        torch.testing.assert_close(attention(query, keys, keys), want, rtol=1e-4, atol=1e-5)
    assert bf.backends._forced is None and torch.is_grad_enabled()
print(caught)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="alarms")
def test_an_interrupt_anywhere_leaves_the_next_call_right():
    assert int(forked("-c", INTERRUPTED).stdout) >= 40


@pytest.mark.parametrize("where", ["keys", "W_k", "context", "weights"])
@pytest.mark.parametrize("hidden", [2, 64])
def test_an_exception_in_a_backward_hook(where, hidden):
    torch.manual_seed(0)
    attention = bf.AdditiveAttention(16, 16, hidden)
    keys, query = torch.randn(2, 70, 16, requires_grad=True), torch.randn(2, 1, 16)

    def step():
        context = attention(query, keys, keys)
        return context, context.square().sum() + attention.attention_weights.square().sum()

    def gradients():
        return torch.autograd.grad(step()[1], (keys, *attention.parameters()))

    want = gradients()

    def fail(_):
        raise ArithmeticError("from the hook")

    for _ in range(2):
        context, loss = step()
        hooked = {"keys": keys, "context": context, "weights": attention.attention_weights}
        handle = hooked.get(where, attention.W_k.weight).register_hook(fail)
        with pytest.raises(ArithmeticError, match="from the hook"):
            loss.backward()
        handle.remove()
        keys.grad = None
        torch.testing.assert_close(gradients(), want)
        torch.testing.assert_close(step()[0], context)
