"""The projections equal ``F.linear`` whichever matrix product serves them, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast import limits
from bahdanau_fast.ops import few_rows, projection

ROWS, D, H = 40, 192, 160


def of(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def family():
    """The limits of AMD's Zen 5: on others nothing goes through oneDNN."""
    with of_family("zen5"):
        yield


def of_family(name):
    fields = ("onednn_work", "onednn_work_to_train", "turned_side", "few_rows")
    return limits.using(**{each: getattr(limits.FAMILIES[name], each) for each in fields})


@pytest.fixture(params=["as here", "without oneDNN", "transposed", "few rows"])
def onednn(request, monkeypatch):
    if request.param != "as here":
        monkeypatch.setattr(projection, "_onednn", None)
    if request.param == "few rows":
        for least in ("FEW_ROWS_FEATURES", "FEW_ROWS_HIDDEN", "FEW_ROWS_WEIGHT", "ONE_ROW_WEIGHT"):
            monkeypatch.setattr(projection, least, 0)
        with limits.using(few_rows=limits.NEVER):
            assert projection.way(of(3, D), of(H, D)) is few_rows.multiply
            yield None
    elif request.param == "transposed":
        monkeypatch.setattr(projection, "TURNED_ROWS", 0)
        monkeypatch.setattr(projection, "TURNED_ROWS_MOST", limits.NEVER)
        with limits.using(
            onednn_work=limits.NEVER, onednn_work_to_train=limits.NEVER, turned_side=0
        ):
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
        close(*(torch.autograd.grad(out, leaves, grad, retain_graph=True) for out in (got, want)))


@pytest.mark.parametrize(
    ("rows", "hidden", "turned"),
    [(15, 512, False), (16, 512, True), (48, 512, True), (49, 512, False), (32, 511, False)],
)
def test_some_rows_of_a_large_weight_are_transposed_on_intel(rows, hidden, turned):
    with of_family("intel"):
        found = projection.way(of(rows, 1, 512), of(hidden, 512))
        assert (found is projection.multiply_turned) == turned


@pytest.mark.parametrize(
    ("rows", "features", "hidden", "few"),
    [
        *((1, 512, 512, True), (1, 512, 511, False), (2, 512, 128, True), (2, 512, 127, False)),
        *((2, 256, 128, True), (2, 255, 512, False), (8, 512, 128, True), (9, 512, 128, False)),
        *((32, 512, 512, True), (33, 512, 512, False)),
    ],
)
def test_few_rows_of_a_large_weight_are_our_own_on_amd(rows, features, hidden, few):
    x, weight = of(rows, 1, features), of(hidden, features)
    with of_family("amd"):
        assert (projection.way(x, weight) is few_rows.multiply) == few
    for name in ("intel", "zen5"):
        with of_family(name):
            assert projection.way(x, weight) is not few_rows.multiply


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_reference_takes_torchs_own_products(monkeypatch, backend):
    asked, own = [], few_rows.multiply
    monkeypatch.setattr(limits, "LIMITS", limits.FAMILIES["amd"])
    monkeypatch.setattr(few_rows, "multiply", lambda *inputs: asked.append(1) or own(*inputs))
    attention = bf.AdditiveAttention(512, 512, 512).eval()
    features = bf.LocationAttention(512, 512, 512, channels=2, kernel_size=3).eval()
    q, k, location = of(2, 1, 512).requires_grad_(), of(2, 3, 512), of(2, 1, 3)
    weights = attention.W_q.weight, attention.W_k.weight, attention.w_v.weight
    with bf.backends.use(backend):
        attention(q, k, k)
        attention.attend(q, attention.memory(k, k))
        features.attend(q, features.memory(k, k), location)
        assert bool(asked) == (backend == "cpu")
    asked.clear()
    for activation in ("tanh", "relu"):
        bf.additive_attention(q, k, k, *weights, activation=activation, backend=backend)
        bf.additive_scores(q, k, *weights, activation=activation, backend=backend)
    assert bool(asked) == (backend == "cpu")


@pytest.mark.parametrize("wanted", range(1, 8))
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_gradients_that_are_wanted_and_no_others(rows, wanted):
    x, weight, grad = of(2, rows, 19), of(21, 19), of(2, rows, 21)
    leaves = [x, weight, of(21)]
    asked = [leaf.requires_grad_() for k, leaf in enumerate(leaves) if wanted >> k & 1]
    given = x if wanted & 2 else None, weight if wanted & 1 else None
    with torch.no_grad():
        found = few_rows.gradients(grad, *given, bool(wanted & 4))
    assert [each is not None for each in found] == [bool(wanted >> k & 1) for k in range(3)]
    expected = torch.autograd.grad(F.linear(*leaves), asked, grad)
    close([each for each in found if each is not None], expected)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (5,), (0, 5), (3, 0), (2, 1, 3, 40)], ids=str)
@pytest.mark.parametrize("hidden", [6, 0, 70])
def test_the_operators_of_few_rows(dtype, shape, hidden):
    x, weight, bias = (of(*s).to(dtype) for s in (shape, (hidden, shape[-1]), (hidden,)))
    grad = of(*shape[:-1], hidden).to(dtype)
    ops = torch.ops.bahdanau_fast
    found = [ops.project(x, weight, bias), *ops.project_backward(grad, x, weight, True)]
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    out = F.linear(*exact)
    want = [out, *torch.autograd.grad(out, exact, grad.double())]
    torch.testing.assert_close(found, [x.detach().to(dtype) for x in want])


def test_opcheck_of_few_rows():
    x, weight, grad, ops = of(2, 3, 5), of(6, 5), of(2, 3, 6), torch.ops.bahdanau_fast
    for bias in (None, of(6)):
        torch.library.opcheck(ops.project.default, (x, weight, bias))
    for inputs in ((x, weight, True), (x, None, False), (None, weight, True), (None, None, True)):
        torch.library.opcheck(ops.project_backward.default, (grad, *inputs))


def test_what_the_operators_of_few_rows_refuse():
    x, weight, grad, ops = of(2, 3, 5), of(6, 5), of(2, 3, 6), torch.ops.bahdanau_fast
    with pytest.raises(RuntimeError, match="weight must have shape"):
        ops.project(x, of(6, 4), None)
    with pytest.raises(RuntimeError, match="bias must have shape"):
        ops.project(x, weight, of(5))
    with pytest.raises(RuntimeError, match="x must have shape"):
        ops.project_backward(grad, x[:1], weight, False)
    with pytest.raises(RuntimeError, match="weight must have shape"):
        ops.project_backward(grad, x, weight.double(), False)
    with pytest.raises(RuntimeError, match="grad must have a dimension"):
        ops.project_backward(grad.sum(), None, weight, False)


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
    # Gradients of some 1e3 are sums of as many products of sums.
    torch.testing.assert_close(*twice, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("rows", [8, 64])
def test_the_same_bits_for_any_number_of_threads(rows, threads):
    x, weight = of(rows, 512).requires_grad_(), of(512, 512).requires_grad_()
    results = []
    for count in (1, 2, torch.get_num_threads()):
        threads(count)
        out = projection.linear(x, weight)
        results.append((out, *torch.autograd.grad(out, (x, weight), of(rows, 512))))
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize(("rows", "evaluated"), [(1024, True), (1023, False)])
def test_zen_4_takes_onednn_without_gradients_alone(rows, evaluated, monkeypatch):
    asked = []
    monkeypatch.setattr(projection, "_onednn", lambda x, w, *_: asked.append(1) or F.linear(x, w))
    x, weight = of(rows, 256), of(128, 256).requires_grad_()
    with of_family("amd"):
        projection.linear(x, weight).sum().backward()
        assert not asked
        with torch.no_grad():
            projection.linear(x, weight)
    assert bool(asked) == evaluated


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
