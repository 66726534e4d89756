"""Data-parallel training on two processes: DDP, FSDP2, and DTensors sharded over the batch.

``python test_distributed.py RANK FILE`` is one of the two, which find each other by the file.
"""

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import bahdanau_fast as bf

RANK, RANKS = int(sys.argv[1]) if __name__ == "__main__" else 0, 2
MINE = slice(2 * RANK, 2 * RANK + 2)
LENS = torch.tensor([60, 3, 0, 50])


def close(got, want):
    # In fp32, of sums over ranks in another order; a rank that is left out moves a half of them.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Sent(TorchDispatchMode):
    """Counts what ranks send. CommDebugMode does so too, but sets hooks on all modules for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        self.count += "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def attention(size=32, hidden=48, **more):
    torch.manual_seed(0)
    return bf.AdditiveAttention(size, size, hidden, **more)


def data(size=32):
    generator = torch.Generator().manual_seed(1)
    shapes = (4, 3, size), (4, 60, size)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole(module, q, k):
    """The result and the gradients on one process."""
    out = module(q, k, k, LENS)
    return out.detach(), torch.autograd.grad(out.square().sum(), list(module.parameters()))


def ddp():
    q, k = data()
    want, grads = whole(attention(), q, k)
    module = DistributedDataParallel(attention())
    out = module(q[MINE], k[MINE], k[MINE], LENS[MINE])
    out.square().sum().backward()
    close(out, want[MINE])
    close([p.grad * RANKS for p in module.parameters()], grads)


def fsdp2(*names):
    """Layers of these names sharded by themselves, too: only calling one gathers its weight."""
    q, k = data()
    want, grads = whole(attention(), q, k)
    module, mesh = attention(), init_device_mesh("cpu", (RANKS,))
    for name in names:
        fully_shard(module.get_submodule(name), mesh=mesh)
    fully_shard(module, mesh=mesh)
    for _ in range(2):  # parameters are gathered anew: a projection of the last step is not reused
        first = module(q[MINE], k[MINE], k[MINE], LENS[MINE])
        out = module(q[MINE], k[MINE], k[MINE], LENS[MINE])
        out.square().sum().backward()
        close(first, want[MINE])
        close(out, want[MINE])
        close([p.grad.full_tensor() * RANKS for p in module.parameters()], grads)
        module.zero_grad()
    with torch.no_grad():  # a step of training, seen by the next call
        for parameter in module.parameters():
            parameter.mul_(0.5)
    halved = attention()
    with torch.no_grad():
        for parameter in halved.parameters():
            parameter.mul_(0.5)
    out = module(q[MINE], k[MINE], k[MINE], LENS[MINE])
    close(out, halved(q, k, k, LENS)[MINE])


def dtensor(size, hidden, way, hooked=False):
    """Nothing is sent, forward or backward: the gradients of weights stay parts of a sum."""
    q, k = data(size)
    want, grads = whole(attention(size, hidden), q, k)
    mesh = init_device_mesh("cpu", (RANKS,))
    module = distribute_module(attention(size, hidden), mesh)
    if hooked:  # plain operations on DTensors, then
        for layer in (module.W_q, module.W_k, module.w_v):
            layer.register_forward_hook(lambda *_: None)
    q, k, lens = (distribute_tensor(x, mesh, [Shard(0)]) for x in (q, k, LENS))
    q.requires_grad_()
    with Sent() as sent:
        if way == "call":
            out = module(q, k, k, lens)
        else:
            out = module.attend(q, module.memory(k, None, lens))
        out.square().sum().backward()
    assert sent.count == 0
    assert out.placements == module.attention_weights.placements == (Shard(0),)
    assert q.grad.placements == (Shard(0),)
    with Sent() as sent:  # what is sent is seen
        close(out.full_tensor(), want)
    assert sent.count > 0
    close([p.grad.full_tensor() for p in module.parameters()], grads)
    with torch.no_grad(), Sent() as sent:  # few queries are projected by their operator
        out = module.attend(q, module.memory(k, None, lens))
    assert sent.count == 0
    close(out.full_tensor(), want)


def dtensor_dropout():
    """Ranks drop weights of their own, though each counts its rows from zero."""
    mesh = init_device_mesh("cpu", (RANKS,))
    module = distribute_module(attention(dropout=0.5), mesh)
    q, k = (x[:1].repeat(4, 1, 1) for x in data())
    q, k = (distribute_tensor(x, mesh, [Shard(0)]) for x in (q, k))
    torch.manual_seed(5)
    out = module(q, k, k)
    assert isinstance(out, DTensor)
    out.sum().backward()
    rows = out.full_tensor()
    assert all(not torch.equal(rows[i], rows[j]) for i in range(4) for j in range(i))
    torch.manual_seed(5)
    assert torch.equal(module(q, k, k).full_tensor(), rows)


def scores():
    """Of the function, with features."""
    q, k = data()
    inputs = {"queries": q, "keys": k, "features": k[..., :4]}
    weights = [torch.linspace(-1, 1, 48 * n).view(48, n) for n in (32, 32, 4, 1)]
    weights = dict(zip(("w_q", "w_k", "w_f", "w_v"), weights, strict=True))
    weights["w_v"] = weights["w_v"].t()
    want, mesh = bf.additive_scores(**inputs, **weights), init_device_mesh("cpu", (RANKS,))
    inputs = {n: distribute_tensor(x, mesh, [Shard(0)]) for n, x in inputs.items()}
    weights = {n: distribute_tensor(x, mesh) for n, x in weights.items()}
    close(bf.additive_scores(**inputs, **weights).full_tensor(), want)


SHARDED = "W_q", "W_k", "w_v", "W_q W_k w_v"
THINGS = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    **{f"fsdp2 of {names}": partial(fsdp2, *names.split()) for names in SHARDED},
    "dtensor one operator": lambda: dtensor(4, 8, "call"),
    "dtensor": lambda: dtensor(32, 48, "call"),
    "dtensor memory": lambda: dtensor(32, 48, "attend"),
    "dtensor dropout": dtensor_dropout,
    "dtensor scores": scores,
    "dtensor called": lambda: dtensor(32, 48, "call", hooked=True),
    "dtensor memory called": lambda: dtensor(32, 48, "attend", hooked=True),
}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{sys.argv[2]}", rank=RANK, world_size=RANKS)
    for name, thing in THINGS.items():
        thing()
        print("right:", name, flush=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Output and errors of each of the ranks."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), meeting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        return [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("thing", THINGS)
def test_two_ranks(printed, thing):
    for out, err in printed:
        assert f"right: {thing}" in out.splitlines(), err[-3000:]


if __name__ == "__main__":
    main()
