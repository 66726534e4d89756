"""Things that go wrong around a call: one clear message, nothing broken, the next call right."""

import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from fresh import copy_tree, python

import bahdanau_fast as bf

# ---- building and loading ------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    return copy_tree(tmp_path)


def build(tree, *command, **variables):
    skip = {"BAHDANAU_FAST_CUDA": "0", "BAHDANAU_FAST_CPU": ""}
    return python(*command, cwd=tree, **skip, **variables)


def test_without_a_compiler_the_build_says_so_and_goes_on(tree):
    command = ["setup.py", "-q", "build_ext", "--build-lib", str(tree / "lib")]
    done = build(tree, *command, CXX="no-such-compiler")
    said = [line for line in done.stderr.splitlines() if "_C_cpu not built" in line]
    assert len(said) == 1
    assert re.search(r"cannot run no-such-compiler \(No such file", said[0])
    assert "Traceback" not in done.stderr


# Makes every file that it is asked for, empty.
COMPILER = '#!/bin/sh\nwhile [ $# -gt 0 ]; do if [ "$1" = -o ]; then : >"$2"; fi; shift; done\n'


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_package_without_a_binary_holds_the_reason(tree, kind):
    compiler = tree / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)

    def built(**variables):
        call = f"import setuptools.build_meta as made; made.build_{kind}('dist')"
        build(tree, "-c", call, **variables)
        (wheel,) = (tree / "dist").glob("*.whl")
        found = {path.name: path.read_bytes() for path in tree.glob("bahdanau_fast/_C_*")}
        with zipfile.ZipFile(wheel) as packed:
            for path in map(Path, packed.namelist()):
                if path.match("bahdanau_fast/_C_*"):
                    found[path.name] = packed.read(str(path))
        wheel.unlink()
        assert found.pop("_C_cuda.why.txt") == b"BAHDANAU_FAST_CUDA=0"
        return found

    assert built(CXX=str(compiler)) == {"_C_cpu.abi3.so": b""}
    found = built(CXX="no-such-compiler")  # nothing is left of the build before
    assert b"cannot run no-such-compiler (No such file or" in found.pop("_C_cpu.why.txt")
    assert not found
    assert built(CXX=str(compiler)) == {"_C_cpu.abi3.so": b""}


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
want = ops.attend(*small, w)
grads = torch.zeros_like(want[0]), torch.zeros_like(want[1])
ops.attend_backward(want[1], *grads, 15, *small, w)
keys = problem(64, 1, 200_000, 64, 8)[1]     # a table of 3.2 GB
many = problem(40, 400, 9000, 8, 8)          # weights of 576 MB
split = problem(1, 1, 20_000_000, 1, 1)      # scores of 80 MB, for all threads
rows = problem(16, 1, 10_000_000, 1, 1)      # scores of 40 MB in each thread
wide = problem(3, 4000, 4001, 2, 2)          # weights of 192 MB to be copied
weights = torch.zeros(1).expand(3, 4000, 4001)
calls = {{
    "table": lambda: ops.exp_keys(keys),
    "result": lambda: ops.attend(*many, w[:, :8]),
    "scores": lambda: ops.attend(*split, w[:, :1], need_weights=False),
    "workspace": lambda: ops.attend(*rows, w[:, :1], need_weights=False),
    "backward": lambda: ops.attend_backward(
        weights, torch.zeros(1, 1, 1).expand(3, 4000, 2), None, 1, *wide, w[:, :2]
    ),
}}
for name, call in calls.items():
    error = bounded(call)
    print(name, "|", type(error).__name__, "|", str(error).strip().splitlines()[0])
    again = ops.attend(*small, w)
    assert all(torch.equal(x, y) for x, y in zip(again, want)), name
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("threads", [1, 2])
def test_out_of_memory_inside_an_operator(threads):
    done = python("-c", OUT_OF_MEMORY.format(threads=threads))
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
        torch.testing.assert_close(attention(query, keys, keys), want, rtol=1e-4, atol=1e-5)
    assert bf.backends._forced is None and torch.is_grad_enabled()
print(caught)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="alarms")
def test_an_interrupt_anywhere_leaves_the_next_call_right():
    assert int(python("-c", INTERRUPTED).stdout) >= 40


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
        for got, right in zip(gradients(), want, strict=True):
            torch.testing.assert_close(got, right)
        torch.testing.assert_close(step()[0], context)
