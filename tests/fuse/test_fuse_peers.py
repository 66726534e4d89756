"""``fuse`` against the published code of others, in several decoder steps."""

import pytest
import torch
from beside import ran, results, same
from driving import PEERS, SOURCES, STEPS
from thorough import one_of_each

import bahdanau_fast as bf
from bahdanau_fast import parity


def run(module, drive, dtype, mode):
    """Outputs and, in training, gradients of inputs and parameters, by kind."""
    generator, drawn, kinds = torch.Generator().manual_seed(3), [], []

    def draw(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        drawn.append(x.requires_grad_(mode == "train"))
        return x

    def steps():
        for kind, result in drive(module, draw):
            kinds.append(kind)
            yield result.clone()

    module.to(dtype).train(mode == "train")
    with torch.set_grad_enabled(mode == "train"):
        outputs, grads = results(lambda: list(steps()), drawn, module)
    kinds += ["gradients of inputs"] * len(drawn)
    kinds += [f"gradient of {name}" for name, _ in module.named_parameters()]
    return list(zip(kinds, [*outputs, *grads], strict=mode == "train"))


def gaps(found, exact):
    """Largest error, and largest value, of each kind of result."""
    assert [kind for kind, _ in found] == [kind for kind, _ in exact]
    worst = {}
    for (kind, ours), (_, theirs) in zip(found, exact, strict=True):
        assert (ours is None) == (theirs is None), kind
        if theirs is not None:
            assert ours.shape == theirs.shape
            error, largest = worst.get(kind, (0.0, 0.0))
            size = float(theirs.double().abs().max())
            worst[kind] = max(error, parity.error(ours, theirs)), max(largest, size)
    return worst


MODES = ([(peer, mode) for mode in ("train", "eval")] for peer in PEERS)


@pytest.mark.parametrize(("name", "mode"), one_of_each(MODES))
def test_the_same_before_and_after(name, mode):
    torch.manual_seed(0)
    peer = PEERS[name]
    module = peer.make()

    def take(dtype=torch.float32):
        return run(module, peer.drive, dtype, mode)

    take()  # draws what is lazy
    eager, exact = take(), take(torch.float64)
    module.float()
    state = {name: each.clone() for name, each in module.state_dict().items()}
    report = bf.fuse(module)
    for _ in range(6):  # noted, and looked at: each of the ways that its steps take
        take()
    assert report.fused == report.entries != ()
    before = ran(report)
    ours, theirs = gaps(take(), exact), gaps(eager, exact)
    assert ran(report) - before >= len(SOURCES) * STEPS
    # One number is a sum over everything, whose rounding is luck: fp64, below, judges it.
    single = {f"gradient of {name}" for name, p in module.named_parameters() if p.numel() == 1}
    for kind, (error, largest) in ours.items():
        if kind not in single:
            assert error <= parity.allowed(theirs[kind][0], largest, torch.float32), kind
    # Both round some hundred times per element at most; AllenNLP adds 1e-13 to a sum of one.
    for kind, (error, largest) in gaps(take(torch.float64), exact).items():
        assert error <= 2.0**-40 * max(1.0, largest), kind

    module.float()
    same(dict(module.state_dict()), state, 0.0)
    assert bf.unfuse(module) == [""]
    same(take(), eager, 0.0)
