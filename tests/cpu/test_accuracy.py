"""The tanh without tanh: its error by magnitude of the inputs, and around every switch of path.

A query ``a`` and a key ``c`` of one hidden unit, next to a key whose tanh is known, weigh
exp(tanh(a + c) - known) against one another, and the weights go out through values that read them
back. So one call measures as many pairs (a, c) as it has batch rows.
"""

import math

import numpy as np
import pytest
import torch
from beside import close

import bahdanau_fast as bf
from bahdanau_fast._C_cpu import most_table_elements_in_fp64

FP64_CPU_ELEMENTS = most_table_elements_in_fp64(True)
# Pairs measured at a time; fp32 problems above FP64_CPU_ELEMENTS run in the fp32 kernels.
N = {torch.float32: FP64_CPU_ELEMENTS // 2 + 999, torch.float64: 2_000}
MAGNITUDES = (1e-6, 1e-4, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 50.0, 1e3, 1e4)


def attend(a, c, w=1.0, hidden=1):
    """Weights (n,1,Tk) for n queries (n,) and keys (n,Tk), each alike in all hidden units."""
    n, keys_len = c.shape
    assert a.dtype == torch.float64 or n * keys_len * hidden > FP64_CPU_ELEMENTS
    queries = a[:, None, None].expand(n, 1, hidden).contiguous().requires_grad_()
    keys = c[:, :, None].expand(n, keys_len, hidden).contiguous().requires_grad_()
    weight = torch.full((hidden,), w / hidden, dtype=a.dtype, requires_grad=True)
    values = torch.eye(keys_len, dtype=a.dtype).expand(n, -1, -1)
    context, weights, *_ = torch.ops.bahdanau_fast.attention(queries, keys, values, weight)
    return context, weights, (queries, keys, weight)


def pairs(size_a, size_c, dtype, n, keys_len=2):
    """n queries (n,) and keys (n,keys_len) of given magnitudes."""
    generator = torch.Generator().manual_seed(int(1e6 * (size_a + 7 * size_c)) % 2**31)
    a = (torch.rand(n, generator=generator, dtype=torch.float64) * 2 - 1) * size_a
    c = (torch.rand(n, keys_len, generator=generator, dtype=torch.float64) * 2 - 1) * size_c
    return a.to(dtype), c.to(dtype)


def finer(*tensors):
    """Arrays of a dtype whose roundings do not count: fp64 for fp32, long double for fp64."""
    dtype = np.float64 if tensors[0].dtype == torch.float32 else np.longdouble
    return (x.numpy().astype(dtype) for x in tensors)


def exact_weights(a, c, w=1.0):
    """Softmax of tanh(a + c)."""
    a, c = finer(a, c)
    scores = w * np.tanh(a[:, None] + c)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Error of a weight in roundings. A weight w errs by w (1 - w) times the error of a difference of
# scores, at most a quarter of it: exp(2a) and exp(2c) of 1.5 ulp make 3 roundings each
# of E, halved by d tanh / d log E <= 1/2; the quotient adds four roundings of tanh; twice over for
# two scores; then exp, sum and division of the softmax: four.
BOUND = 0.25 * 2 * (6 / 2 + 1 + 4) + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", MAGNITUDES)
def test_cancellation(size, dtype):
    # a = -c up to something small: tanh must see the small, not the rounding of exp(2a) exp(2c)
    # beyond the bound above.
    n = N[dtype]
    generator = torch.Generator().manual_seed(3)
    a = ((torch.rand(n, generator=generator, dtype=torch.float64) * 2 - 1) * size).to(dtype)
    c = torch.stack([-a, -a * (1 + 1e-3)], 1)
    _, weights, _ = attend(a, c)
    error = np.abs(weights[:, 0].detach().double().numpy() - exact_weights(a, c)).max()
    assert error <= BOUND * torch.finfo(dtype).eps / 2


def test_small_arguments_keep_their_relative_precision():
    # Scores of 1e-6: with a table of exp(2c) instead of expm1(2c) a whole 6 % would be lost.
    # Read back through w = 1e6, shared out over hidden units.
    # tanh(a + c) w itself is some units large, so the weights err by its relative error.
    n = N[torch.float32] // 32
    a, c = pairs(1e-6, 1e-6, torch.float32, n)
    _, weights, _ = attend(a, c, w=60.0, hidden=32)
    exact = exact_weights(a, c, w=60.0)
    difference = weights[:, 0, 0].detach().double().numpy() - 0.5
    wanted = exact[:, 0] - 0.5
    # 0.5 itself is rounded to 2^-24 by the dtype; the rest is relative.
    assert np.abs(difference - wanted).max() <= 2**-24 * 2
    a, c = pairs(1e-3, 1e-3, torch.float32, n)
    _, weights, _ = attend(a, c, w=60.0, hidden=32)
    exact = exact_weights(a, c, w=60.0)
    error = np.abs(weights[:, 0].detach().double().numpy() - exact)
    assert error.max() <= 4 * 2**-24


BORDERS = (0.5, 10.7, 43.0, 44.0, 88.0, 354.0, 355.0)
SIZES = sorted((*MAGNITUDES, *BORDERS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("border", BORDERS)
def test_around_the_switches(border, dtype):
    n = N[dtype]
    ramp = torch.linspace(0.98, 1.02, n, dtype=torch.float64)
    rounding = torch.finfo(dtype).eps / 2
    for share in (0.0, 0.25, 0.5, 0.999, 1.0):
        for sign in (1, -1):
            a = (border * share * ramp).to(dtype)
            c = torch.stack([sign * border * (1 - share) * ramp, -border * share * ramp + 0.3], 1)
            c = c.to(dtype)
            _, weights, _ = attend(a, c)
            error = np.abs(weights[:, 0].detach().double().numpy() - exact_weights(a, c)).max()
            assert error <= BOUND * rounding, (border, share, sign, float(error / rounding))


def exact_gradients(a, c, p):
    """d p[:, 0] / d a and / d c of weights p, summed as attend gets them."""
    a, c = finer(a, c)
    decay = np.exp(-2 * np.abs(a[:, None] + c))
    slope = 4 * decay / (1 + decay) ** 2
    ds = p * (np.eye(p.shape[1])[0] - p[:, :1])
    return (ds * slope).sum(-1), ds * slope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("place", range(len(SIZES)))
def test_errors_by_magnitude(place, dtype):
    # ds <= 1/4; slope = 1 - t^2 doubles the error of t (eight roundings); weights err by BOUND,
    # and are met three times.
    bound = 0.25 * (2 * 8 + 2) + 3 * BOUND
    rounding = torch.finfo(dtype).eps / 2
    keys_len = 8
    size_a = SIZES[place]
    for size_c in SIZES[place % 2 :: 2]:
        a, c = pairs(size_a, size_c, dtype, N[dtype] * 2 // keys_len, keys_len)
        context, weights, (queries, keys, _) = attend(a, c)
        exact = exact_weights(a, c)
        for got in (weights, context):
            error = np.abs(got[:, 0].detach().numpy() - exact).max()
            assert error <= BOUND * rounding, (size_a, size_c, float(error / rounding))
        chosen = torch.zeros_like(weights)
        chosen[:, :, 0] = 1
        da, dc = torch.autograd.grad(weights, (queries, keys), chosen)
        want_a, want_c = exact_gradients(a, c, exact)
        error_a = np.abs(da[:, 0, 0].numpy() - want_a).max()
        error_c = np.abs(dc[:, :, 0].numpy() - want_c).max()
        allowed = bound * rounding
        assert error_c <= allowed, (size_a, size_c, float(error_c / allowed))
        assert error_a <= 2 * allowed, (size_a, size_c, float(error_a / allowed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_infinite_and_nan_inputs(dtype):
    n, inf, nan = N[dtype], math.inf, math.nan
    a = torch.zeros(n, dtype=dtype)
    c = torch.zeros(n, 2, dtype=dtype)
    a[0], a[1] = inf, -inf
    c[2, 0], c[3, 1] = inf, -inf
    a[4], c[5, 0] = nan, nan
    a[6], c[6] = inf, torch.tensor([-inf, 0.0])
    _, weights, _ = attend(a, c)
    w = weights[:, 0].detach()
    high = math.e / (math.e + 1)  # tanh of 1 against 0
    want = torch.tensor([[0.5, 0.5], [0.5, 0.5], [high, 1 - high], [high, 1 - high]], dtype=dtype)
    close(w[:4], want)
    assert torch.isnan(w[4:7]).all()
    assert torch.equal(w[7:], torch.full_like(w[7:], 0.5))


@pytest.mark.parametrize("queries", [1, 2, 17])
def test_keys_of_minus_infinity_weigh_nothing(queries):
    keys = torch.zeros(1, 4096, 64)  # in chunks, some of which have no other keys
    keys[:, :2048] = -math.inf
    q, w = torch.zeros(1, queries, 64), torch.ones(64)
    leaky = {"activation": 2, "negative_slope": 0.1}
    weights = torch.ops.bahdanau_fast.attention(q, keys, keys[..., :0], w, **leaky)[1]
    close(weights[0, 0], torch.tensor([0.0, 1 / 2048]).repeat_interleave(2048))


@pytest.mark.parametrize("activation", [0, 1], ids=["tanh", "relu"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 127), (torch.float64, 1023)], ids=str)
def test_scores_of_the_largest_numbers(dtype, most, activation):
    size, w_v = (2.0 ** (most - 1), 2.0**-88) if activation else (0.0, 2.0**most)
    q, w = torch.full((1, 3, 8), size, dtype=dtype), torch.full((8,), w_v, dtype=dtype)
    scores = torch.ops.bahdanau_fast.attend_scores(q, torch.zeros_like(q), w, activation=activation)
    assert scores.double().unique().item() == size * w_v * 8


@pytest.mark.parametrize("hidden", [4, FP64_CPU_ELEMENTS], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 255), (torch.float16, 2047)], ids=str)
def test_results_are_rounded_to_nearest_and_ties_to_even(dtype, most, hidden):
    """Keys that are alike weigh a half each, and half of the sums of two integers are odd."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(-most, most + 1, (1, 2, 999), generator=generator).to(dtype)
    zeros = [torch.zeros(s, dtype=dtype) for s in ((1, 1, 1), (1, 2, 1), (hidden, 1), (1, hidden))]
    queries, keys, weight, w_v = zeros
    context, _ = bf.additive_attention(queries, keys, values, weight, weight, w_v, backend="cpu")
    assert torch.equal(context[0, 0], values[0].float().mean(0).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_key_is_found_in_any_unit(dtype):
    units = 133
    keys = torch.zeros(units, 16, units, dtype=dtype)  # large enough for the kernels of fp32
    for unit in range(units):
        keys[unit, unit % 16, unit] = (-1) ** unit * 50.0
    assert torch.equal(
        torch.ops.bahdanau_fast.exp_keys(keys)[1], torch.full((units,), 50.0).to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", MAGNITUDES)
@pytest.mark.parametrize("hidden", [1, 64], ids=["one division each", "four share a division"])
def test_the_tanh_of_the_general_operator(hidden, size, dtype):
    """4 ulp (csrc/cpu/kernels/general/activation.h); four alike add one rounding each, twice."""
    n = 2 * N[dtype] // hidden + 1
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(n, generator=generator, dtype=torch.float64) * 2 - 1) * size
    x = x.to(dtype)
    keys = x.reshape(1, n, 1).expand(1, n, hidden).contiguous()
    queries, w = torch.zeros(1, 1, hidden, dtype=dtype), torch.full((hidden,), 1 / hidden).to(dtype)
    features, w_f = torch.zeros(1, n, 1, dtype=dtype), torch.zeros(hidden, 1, dtype=dtype)
    scores = torch.ops.bahdanau_fast.attend_scores(queries, keys, w, features, w_f)
    (x,) = finer(x)
    exact = np.tanh(x)
    error = np.abs(scores[0, 0].numpy().astype(x.dtype) - exact)
    ulp = np.spacing(np.abs(exact.astype(scores.numpy().dtype)))
    assert float((error / ulp).max()) <= (4 if hidden == 1 else 6)
