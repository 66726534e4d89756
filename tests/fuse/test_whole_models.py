"""``fuse`` on whole models: their training, and the ways in which models are used besides.

All of these ways are open to the plain models, but for torch.jit.script, which takes none of them.
"""

import copy
import functools
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from beside import ran, same
from torch.nn.parallel import DistributedDataParallel
from whole import MODELS

import bahdanau_fast as bf

close = torch.testing.assert_close
pytestmark = pytest.mark.filterwarnings("ignore")  # of exporters and tracers, about themselves


def names(entries):
    return tuple(dict.fromkeys(entry.name for entry in entries))


def fused(whole, model):
    """The model, fused by an example, and the report."""
    report = bf.fuse(model, whole.batch(0)[0])
    assert (names(report.fused), report.waiting) == (whole.fused, ())
    return model, report


@pytest.fixture(scope="module", params=MODELS)
def whole(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def case(whole):
    """A fused model in eval mode, its arguments, and what the plain one makes of them."""
    inputs, plain = whole.batch(0)[0], whole.make().eval()
    want, (model, report) = plain(*inputs), fused(whole, whole.make().eval())
    return SimpleNamespace(**locals())


# ---- training ------------------------------------------------------------------------------------


def train(whole, model, steps=50):
    """The losses; dropout is drawn from one seed."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = whole.loss(model, whole.batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@functools.cache
def eager(whole):
    return train(whole, whole.make())


def same_losses(ours, theirs):
    assert theirs[-1] < theirs[0]
    # Steps of 1e-2 by Adam, which divides by gradients, pass on what fp32 rounds in fifty of them.
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=False)) <= 1e-4


WITHOUT = pytest.param("call without gradients", marks=pytest.mark.thorough)


@pytest.mark.parametrize("by", ["example", "step of training", WITHOUT])
def test_the_same_losses(whole, by):
    model, inputs = whole.make(), whole.batch(0)[0]
    report = bf.fuse(model, inputs if by == "example" else None)
    if by != "example":
        assert report.fused == ()
        assert set(whole.fused) <= set(names(report.waiting))
    if by == "call without gradients":
        with torch.no_grad():
            close(model.eval()(*inputs), whole.make().eval()(*inputs))
    same_losses(train(whole, model.train()), eager(whole))
    assert (names(report.fused), report.waiting) == (whole.fused, ())


def test_data_parallel(whole, tmp_path):
    """A backward pass of ours through the model would be counted by DDP."""
    model = whole.make()
    report = bf.fuse(model)
    dist.init_process_group("gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        losses = train(whole, DistributedDataParallel(model), 5)
    finally:
        dist.destroy_process_group()
    same_losses(losses, eager(whole))
    assert names(report.fused) == whole.fused


# ---- other ways to use a model -------------------------------------------------------------------


def exported(case):
    program = torch.export.export(case.model, case.inputs, strict=False)
    assert "bahdanau" not in str(program.graph)
    return program.module()


def to_onnx(case):
    pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    program = torch.onnx.export(case.model, case.inputs, dynamo=True, verbose=False)
    found = program(*case.inputs)
    return lambda *_: tuple(found) if isinstance(case.want, tuple) else found[0]


def traced(case):
    found = torch.jit.trace(case.model, case.inputs)
    assert "bahdanau" not in str(found.inlined_graph)
    return found


def copied(case):
    with torch.no_grad():  # no plain module that keeps a tensor with its history can be copied
        case.model(*case.inputs)
    return pickle.loads(pickle.dumps(copy.deepcopy(case.model)))


def state_to_plain(case):
    other = case.whole.make(7).eval()
    other.load_state_dict(case.model.state_dict())
    return other


def state_from_plain(case):
    other, _ = fused(case.whole, case.whole.make(7).eval())
    other.load_state_dict(case.plain.state_dict())
    return other


WAYS = (traced, copied, state_to_plain, state_from_plain)
SLOW = {exported: ("pointer", "translator"), to_onnx: ("pointer",)}  # seconds each
PAIRS = [(name, way) for way in WAYS for name in MODELS]
PAIRS += [(name, way) for way, names in SLOW.items() for name in names]


@pytest.mark.parametrize(("whole", "way"), PAIRS, indirect=["whole"])
def test_a_way(case, way):
    call = way(case)
    close(call(*case.inputs), case.want)
    before = ran(case.report)
    close(case.model(*case.inputs), case.want)
    assert ran(case.report) > before  # still fused
    if way in {copied, state_from_plain}:
        close(call(*case.inputs), case.want)  # by itself
        assert bf.unfuse(call) == list(case.whole.fused)


def test_scripting_says_what_to_do(case):
    with pytest.raises(RuntimeError, match=r"bahdanau_fast\.unfuse\(model\): call that first"):
        torch.jit.script(case.model)


def test_unfuse_puts_everything_back(whole, case):
    model, _ = fused(whole, whole.make().eval())
    for part, other in zip(model.modules(), case.plain.modules(), strict=True):
        assert type(part).__name__ == type(other).__name__
        assert inspect.signature(part.forward) == inspect.signature(other.forward)
    assert list(model.state_dict()) == list(case.plain.state_dict())
    close(model(*case.inputs), case.want)
    assert bf.unfuse(model) == list(whole.fused)
    assert bf.unfuse(model) == []
    for part, other in zip(model.modules(), case.plain.modules(), strict=True):
        assert type(part) is type(other)
        assert vars(part).keys() == vars(other).keys()
    same(model(*case.inputs), case.want, 0.0)


@pytest.mark.parametrize("whole", ["pointer", "translator"], indirect=True)
@pytest.mark.parametrize("fused_first", [False, True])
def test_compile(whole, case, fused_first):
    """Neither the code of the plain model nor that of a waiting one is kept for the fused one."""
    torch.compiler.reset()
    model = whole.make().eval()
    call = torch.compile(model, backend="aot_eager")
    report = bf.fuse(model) if fused_first else None
    with torch.no_grad():
        close(call(*case.inputs), case.want)
        report = report or bf.fuse(model)
        for _ in range(3):
            close(model(*case.inputs), case.want)
    assert names(report.fused) == whole.fused
    ours, theirs = (whole.loss(each, whole.batch(0)) for each in (call, case.plain))
    close(
        torch.autograd.grad(ours, list(model.parameters())),
        torch.autograd.grad(theirs, list(case.plain.parameters())),
    )
