"""Context, weights and every gradient keep the parity rule on the Triton backend."""

import re

import parity
import pytest
import torch
import triton
import triton.language as tl
from beside import as_exact
from contract import FORMS, scattered
from drawing import cases, drawn
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings
from parity import Case, attended, called, check, fused, scored
from targets import INTERPRETER, TABLE, without_gradients

import bahdanau_fast as bf
from bahdanau_fast import reference, run
from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.backends.triton import call, launch
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.masking import load_valid_len
from bahdanau_fast.ops.dropout import dropout_factors

DTYPES, SIZES = INTERPRETER.dtypes, INTERPRETER.sizes


def test_these_are_the_triton_kernels():
    assert bf.backends.resolve(torch.empty(0, device=parity.DEVICE).device) == "triton"
    assert SIZES["Tq"] > GPU_STEP_QUERIES


# The interpreter takes seconds for a small case: each row of the table in one dtype, turn by turn.
TURNS = [(row, DTYPES[i % len(DTYPES)]) for i, row in enumerate(TABLE)]
# A step sees how lengths and gradients are stored, and sizes around a CPU's vectors, as well.
STEP_ALONE = re.compile(r"lens (\w*int|bf|fp|of odd|expanded|just)|.*(whole vectors|t gradients)")
MANY = [turn for turn in TURNS if not STEP_ALONE.match(turn[0])]


@pytest.mark.parametrize(("row", "dtype"), MANY)
def test_contract(row, dtype):
    INTERPRETER.check(row, dtype)


@pytest.mark.parametrize(("row", "dtype"), TURNS[1:] + TURNS[:1])
def test_contract_of_a_step(row, dtype):
    INTERPRETER.check(row, dtype, attended, Tq=2)


# The interpreter takes both numbers of queries in turn, and both ways.
@pytest.mark.parametrize(
    ("form", "queries", "way", "dtype"),
    [
        (form, queries, way, DTYPES[(i + queries) % len(DTYPES)])
        for i, form in enumerate(("tanh", *FORMS))
        for queries in (2, 18)
        for way in (fused, scored)
    ],
)
def test_inside(form, queries, way, dtype):
    mask = scattered(2, 35, seed=3)
    sizes = {**SIZES, "Tq": queries, **FORMS.get(form, {})}
    case = Case(**sizes, lens=torch.tensor([35, 20]), mask=mask)
    INTERPRETER.check(case, dtype, way)


def test_a_location_is_convolved_in_front():
    module = bf.LocationAttention(5, 7, 6, 3, 9).to(parity.DEVICE)
    shapes = (2, 1, 7), (2, 21, 5), (2, 21, 4), (2, 1, 21)
    inputs = [torch.randn(s, device=parity.DEVICE, requires_grad=True) for s in shapes]
    leaves, found = [*inputs, *module.parameters()], []
    for backend in ("triton", "reference"):
        with bf.backends.use(backend):
            context = module(*inputs)
            found.append((context, *torch.autograd.grad(context.sin().sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splits_of_one_long_row(dtype):
    INTERPRETER.check(Case(B=2, Tq=1, Tk=497, H=20, Dv=33, lens=torch.tensor([351, 0])), dtype)
    INTERPRETER.check(Case(B=1, Tq=3, Tk=300, H=7, Dv=130), dtype, called)


def test_without_hidden_units_all_keys_weigh_alike():
    x, v = torch.zeros(1, 18, 0, device=parity.DEVICE), torch.rand(1, 18, 2, device=parity.DEVICE)
    context, weights = bf.additive_attention(x, x, v, None, None, x[0, 0], backend="triton")
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 18))
    torch.testing.assert_close(context, v.mean(1, keepdim=True).expand_as(context))


@triton.jit
def counted_kernel(lens, out, Tk):
    tl.store(out, load_valid_len(lens, 0, Tk))


@pytest.mark.parametrize(
    ("length", "dtype"), [(2**63, torch.uint64), (3e7, torch.float32)], ids=str
)
def test_lengths_that_another_dtype_does_not_have(length, dtype):
    lens, out = torch.tensor([length], dtype=dtype), torch.zeros(1, dtype=torch.int32)
    lens, out = lens.to(parity.DEVICE), out.to(parity.DEVICE)
    counted_kernel[1,](lens, out, 2**24 + 1)
    assert out.tolist() == [2**24 + 1]


def test_splits_of_rows_far_apart(monkeypatch):
    # Splits that are no power of two: behind a row's last maximum is the first of the next row.
    counts, real = [], plans.combine
    monkeypatch.setattr(plans, "combine", lambda n, *size: counts.append(n) or real(n, *size))
    keys = 0.1 * torch.randn(2, 384, 16, generator=torch.Generator().manual_seed(0)) - 1.0
    keys[1] += 2.0  # scores near 730, those of the row before near -730
    same, w_v = torch.eye(16), torch.full((16,), 60.0)
    inputs = [x.to(parity.DEVICE) for x in (torch.zeros(2, 1, 16), keys, keys, same, same, w_v)]
    got = bf.additive_attention(*inputs, backend="triton")
    assert counts == [6]
    eager = reference.additive_attention(*inputs)
    want = reference.additive_attention(*(x.double() for x in inputs))
    as_exact(got, eager, want, torch.float32)


@pytest.mark.parametrize(("queries", "scale"), [(1, 1.0), (18, 1.0), (18, 0.1), (18, 1e-3)])
def test_fp32_near_zero(queries, scale):
    # 1 - 2 r would lose what fp32 has.
    sizes = {"B": 1, "Tq": queries, "Tk": 21, "H": 131, "Dv": 17}
    case = Case(**sizes, bias=False, scale={"queries": scale, "keys": scale})
    INTERPRETER.check(case, torch.float32)


@pytest.mark.parametrize("lens", [None, (3,), (3, 45)], ids=["all", "rows", "queries"])
@pytest.mark.parametrize("masked", [False, True], ids=["lens", "mask"])
def test_without_weights_scores_take_bounded_memory(lens, masked, monkeypatch):
    drawn = Case(B=3, Tq=45, Tk=30, H=8).draw(torch.float32)
    x = [drawn[n].float().to(parity.DEVICE) for n in parity.INPUTS[:6]]
    if lens is not None:
        generator = torch.Generator().manual_seed(0)
        lens = torch.randint(0, 33, lens, generator=generator).to(parity.DEVICE)
    mask = scattered(3, 45, 30).to(parity.DEVICE) if masked else None
    whole, _ = bf.additive_attention(*x, lens, mask=mask, backend="triton")
    monkeypatch.setattr(plans, "_SCRATCH", 3 * 30 * 4 * 19)
    shapes = []
    real = launch.Steps.new

    def new(self, *shape, **kind):
        shapes.append(shape)
        return real(self, *shape, **kind)

    monkeypatch.setattr(launch.Steps, "new", new)
    parts, none = bf.additive_attention(*x, lens, mask=mask, need_weights=False, backend="triton")
    assert none is None
    assert torch.equal(parts, whole)
    assert (3, 19, 30) in shapes
    assert (3, 45, 30) not in shapes


@pytest.mark.parametrize("lens", [(5,), (5, 18)], ids=["rows", "queries"])
def test_terms_take_bounded_memory(lens, monkeypatch):
    drawn = Case(B=5, Tq=18, Tk=30, H=70).draw(torch.bfloat16)
    x = [drawn[n].bfloat16().to(parity.DEVICE) for n in parity.INPUTS[:6]]
    lens = torch.randint(0, 33, lens, generator=torch.Generator().manual_seed(0))
    lens = lens.to(parity.DEVICE)
    whole = bf.additive_attention(*x, lens, backend="triton")
    monkeypatch.setattr(plans, "_TERM_BYTES", 2 * 32 * 20 * (18 + 30))
    assert plans.rational_terms(5, 18, 30, 70, True).rows == 2
    parts = bf.additive_attention(*x, lens, backend="triton")
    assert all(map(torch.equal, parts, whole))


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("queries", [2, 18])
def test_dropout_draws_what_every_backend_draws(queries, p, monkeypatch):
    inputs = Case(B=2, Tq=queries, Tk=37, H=9, Dv=21, bias=False).draw(torch.float32)
    drawn = {n: x.float().to(parity.DEVICE) for n, x in inputs.items()}
    leaves = [drawn[n].requires_grad_() for n in parity.INPUTS[:6]]
    lens, seed = (torch.tensor(x, device=parity.DEVICE) for x in ([30, 37], [2**61 + 12345]))
    monkeypatch.setattr(run, "dropout_seed", lambda *_: seed)
    _, weights = bf.additive_attention(*leaves, lens, backend="reference")
    plain = weights * dropout_factors(seed, weights.shape, p) @ leaves[2], weights
    ours = bf.additive_attention(*leaves, lens, dropout_p=p, backend="triton")
    found = [
        (*outputs, *torch.autograd.grad(outputs, leaves, [drawn[n] for n in parity.OUTPUTS]))
        for outputs in (ours, plain)
    ]
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-6)
    assert p < 1.0 or not found[0][0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [2, 18])
def test_magnitudes_near_and_far_in_one_call(queries, dtype):
    # Rows whose exponentials can be multiplied stand beside rows whose cannot.
    case = Case(B=1, Tq=queries, Tk=40, H=40, scale={"queries": 8.0, "keys": 12.0})
    INTERPRETER.check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("queries", "layout"), [(1, "sliced"), (3, "transposed")])
@pytest.mark.parametrize("lens", [None, torch.tensor([0, 40, 7])], ids=["all", "some"])
def test_a_projection_inside_the_step(queries, layout, lens, dtype, monkeypatch):
    asked, real = [], call.KernelCall.project

    def project(self, *given, but_queries=False):
        asked.append((but_queries, self.w_q is not None, self.w_k is not None))
        real(self, *given, but_queries=but_queries)

    monkeypatch.setattr(call.KernelCall, "project", project)
    sizes = {"B": 3, "Tq": queries, "Tk": 67, "H": 37, "Dq": 33, "Dk": 90, "Dv": 20}
    way = without_gradients(INTERPRETER.way())
    check(Case(**sizes, lens=lens, layout={"w_q": layout}), dtype, way)
    assert asked == [(True, True, True)]


WAYS = fused, called, attended


@pytest.mark.parametrize(
    ("dtype", "way"), zip(DTYPES, WAYS, strict=True), ids=[way.__name__ for way in WAYS]
)
@hypothesis_settings(drawn, max_examples=10)
@given(data=strategies.data())
def test_drawn_cases(dtype, way, data):
    INTERPRETER.check(data.draw(cases(dtype, most=3_000)), dtype, way)
