"""The projections equal ``F.linear`` whichever matrix product serves them, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bahdanau_fast import limits
from bahdanau_fast.ops import projection

ROWS, D, H = 40, 192, 160


def of(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def family():
    """The limits of AMD's processors: on Intel's nothing goes through oneDNN."""
    amd = limits.FAMILIES["amd"]
    with limits.using(onednn_work=amd.onednn_work, turned_side=amd.turned_side):
        yield


@pytest.fixture(params=["as here", "without oneDNN", "transposed"])
def onednn(request, monkeypatch):
    if request.param != "as here":
        monkeypatch.setattr(projection, "_onednn", None)
    if request.param == "transposed":
        turned = {"turned_side": 0, "turned_rows": 0, "turned_rows_most": limits.NEVER}
        with limits.using(onednn_work=limits.NEVER, **turned):
            assert projection.way(of(3, D), of(H, D)) is projection.multiply_turned
            yield None
    else:
        yield projection._onednn


LAYOUTS = {
    "plain": lambda x: x,
    "rows expanded": lambda x: x[:, :1].expand_as(x),
    "all expanded": lambda x: x[:1, :1, :1].expand_as(x),
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "off the alignment": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
    "empty": lambda x: x[:0],
}


def close(got, want):
    # Two orders of summing D (or ROWS) products of numbers of size one.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [None, of(H)], ids=["no bias", "bias"])
def test_values_and_gradients(onednn, layout, bias):
    x = LAYOUTS[layout](of(2, ROWS, D)).requires_grad_()
    weight = nn.Parameter(of(H, D))
    leaves = (x, weight) if bias is None else (x, weight, bias.requires_grad_())
    got, want = projection.linear(x, weight, bias), F.linear(x, weight, bias)
    close(got, want)
    with torch.no_grad():
        close(projection.linear(x, weight, bias), want)
    for grad in (of(*want.shape), torch.ones(()).expand(want.shape)):
        for ours, theirs in zip(
            torch.autograd.grad(got, leaves, grad, retain_graph=True),
            torch.autograd.grad(want, leaves, grad, retain_graph=True),
            strict=True,
        ):
            close(ours, theirs)


@pytest.mark.parametrize(
    ("rows", "hidden", "turned"),
    [(15, 512, False), (16, 512, True), (48, 512, True), (49, 512, False), (32, 511, False)],
)
def test_some_rows_of_a_large_weight_are_transposed_on_intel(rows, hidden, turned):
    intel = limits.FAMILIES["intel"]
    with limits.using(onednn_work=intel.onednn_work, turned_side=intel.turned_side):
        found = projection.way(of(rows, 1, 512), of(hidden, 512))
        assert (found is projection.multiply_turned) == turned


def test_only_what_needs_a_gradient_gets_one():
    x, weight = of(ROWS, D), nn.Parameter(of(H, D))
    assert projection.linear(x, weight.detach()).requires_grad is False
    product = projection.linear(x, weight)
    product.sum().backward()
    assert x.grad is None
    close(weight.grad, x.sum(0).expand(H, D))


def test_second_derivatives():
    x, weight = of(ROWS, D).requires_grad_(), of(H, D).requires_grad_()
    twice = []
    for linear in (projection.linear, F.linear):
        (grad,) = torch.autograd.grad(linear(x, weight).pow(2).sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(grad.pow(2).sum() / 1e6, (x, weight)))
    for ours, theirs in zip(*twice, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-2)


def test_the_same_bits_for_any_number_of_threads():
    x, weight = of(64, 512), of(512, 512)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, before):
            torch.set_num_threads(threads)
            results.append(projection.linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_what_oneDNN_is_not_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(projection, "_onednn", lambda x, w, *_: asked.append(1) or F.linear(x, w))
    x, weight = of(ROWS, D), of(H, D)
    projection.linear(x, weight)
    assert len(asked) == 1
    projection.linear(x.double(), weight.double())
    projection.linear(x.bfloat16(), weight.bfloat16())
    projection.linear(x, of(H, 2 * D)[:, :D])  # gaps between its rows
    projection.linear(x[:3], weight)  # few rows
    projection.linear(x[:, :8].contiguous(), weight[:, :8].contiguous())  # little work
    projection.linear(x.to("meta"), weight.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert projection.linear(x, weight).dtype == torch.bfloat16
    try:
        torch.backends.mkldnn.enabled = False
        projection.linear(x, weight)
    finally:
        torch.backends.mkldnn.enabled = True
    torch.func.grad(lambda w: projection.linear(x, w).sum())(weight)
    assert len(asked) == 1


@pytest.mark.parametrize(("rows", "size"), [(64, 512), (64, 2048), (1500, 192)], ids=str)
def test_long_sums_round_no_more_than_in_linear(onednn, rows, size):
    x, weight = of(rows, size).requires_grad_(), of(160, size).requires_grad_()
    errors = []
    exact = None
    for linear, dtype in (
        (F.linear, torch.float64),
        (F.linear, torch.float32),
        (projection.linear, torch.float32),
    ):
        out = linear(x.to(dtype), weight.to(dtype))
        grads = torch.autograd.grad(out, (x, weight), of(rows, 160).to(dtype))
        found = [t.detach().double() for t in (out, *grads)]
        exact = exact or found
        errors.append([float((a - b).norm()) for a, b in zip(found, exact, strict=True)])
    for ours, theirs in zip(errors[2], errors[1], strict=True):
        assert ours <= 2 * theirs
