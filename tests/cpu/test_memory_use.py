"""Peak memory: nothing of size (B,Tq,Tk,H) is ever made, and a loop does not grow."""

import math
import sys

import pytest
from fresh import forked, python

STATUS = """
import gc, torch, bahdanau_fast as bf
def status(field):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024
"""
MEASURE = """
torch.set_num_threads(2)

def op(B, Tq, Tk, H):
    # The operator on projected queries and keys.
    q, k, v = (torch.randn(B, n, H, requires_grad=True) for n in (Tq, Tk, Tk))
    w = torch.randn(1, H, requires_grad=True)
    def run():
        table, keys_max = torch.ops.bahdanau_fast.exp_keys(k.detach())
        return torch.ops.bahdanau_fast.attention(q, k, v, w, table=table, keys_max=keys_max)[:2]
    # its input besides the tensors above is the table
    return run, (q, k, v, w), B * Tk * H * 4

def module(B, Tq, Tk, H):
    q, k = (torch.randn(B, n, H, requires_grad=True) for n in (Tq, Tk))
    attention = bf.AdditiveAttention(H, H, H)
    def run():
        return attention(q, k, k), attention.attention_weights
    # between its input and its output: both projections with their gradients, and the table
    return run, (q, k, *attention.parameters()), (2 * B * (Tq + Tk) + B * Tk) * H * 4

def both(make, *sizes):
    B, Tq, Tk, H = sizes
    grads = [torch.randn(B, Tq, H), torch.randn(B, Tq, Tk)]
    run, *_ = make(*sizes)
    torch.autograd.backward(run(), grads)  # the scratch of BLAS and the thread pools
    del run, _
    run, inputs, between = make(*sizes)
    gc.collect()
    base = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    outs = run()
    torch.autograd.backward(outs, grads)
    peak = status("VmHWM") - base
    made = sum(x.nbytes for x in outs) + sum(x.grad.nbytes for x in inputs) + between
    given = sum(x.nbytes for x in (*inputs, *grads))
    return peak, given, made

for make in (op, module):
    both(make, 2, 20, 70, 128)  # everything is loaded and warmed up, the fp32 kernels too
    print(*both(make, *{sizes}))
"""


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize(
    "sizes",
    [(4, 128, 128, 512), pytest.param((8, 256, 256, 512), marks=pytest.mark.deep)],
)
def test_peak_of_forward_and_backward(sizes):
    """Of the operator, and of the module."""
    # Freed memory goes back at once, so that the peak is what is held.
    held = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found = python("-c", STATUS + MEASURE.format(sizes=sizes), **held).stdout.splitlines()
    assert len(found) == 2
    for line in found:
        peak, given, made = map(int, line.split())
        assert (given + peak) / (given + made) <= 1.2
        assert peak < math.prod(sizes) * 4 / 2  # far from one (B,Tq,Tk,H)


GROWTH = """
torch.set_num_threads(1)
attention = bf.AdditiveAttention(64, 64, 64, 0.1)
query = torch.randn(8, 1, 64)
def decode(steps, grad):
    for step in range(steps):
        if step % 20 == 0:
            keys = torch.randn(8, 100, 64, requires_grad=grad)
            memory = attention.memory(keys)
        with torch.set_grad_enabled(grad):
            context = attention(query, keys, keys) + attention.attend(query, memory)
        if grad and step % 20 == 19:
            context.sum().backward()
for grad in (False, True):
    decode(400, grad)
    before = status("VmRSS")
    decode(4000, grad)
    print(status("VmRSS") - before)
"""


@linux
def test_a_decoder_loop_does_not_grow():
    # A leaked context or weight a step would be 4000 * (2 to 200) KB; the heap moves by 2 MB.
    for grown in map(int, forked("-c", STATUS + GROWTH).stdout.split()):
        assert grown < 4000 * 1024, f"{grown} bytes more after 4000 steps"
