"""Every instruction set the processor has keeps the parity rule, and they agree."""

from contextlib import contextmanager

import pytest
import torch
from beside import close
from contract import FORMS
from parity import DTYPES, attended, check, scored
from targets import CPU

from bahdanau_fast import parity, reference
from bahdanau_fast.ops.attention import NEED
from bahdanau_fast.ops.location import convolved

extension = pytest.importorskip("bahdanau_fast._C_cpu")


@contextmanager
def using(name):
    """Kernels for an instruction set, and then those of before."""
    before = extension.instruction_set()
    extension.set_instruction_set(name)
    try:
        yield
    finally:
        extension.set_instruction_set(before)


def sets():
    """The names this processor takes."""
    found = []
    for name in ("baseline", "avx2", "avx512"):
        try:
            with using(name):
                found.append(name)
        except ValueError:
            continue
    return found


ROWS = "no lens", "split keys", "whole vectors", "all in one operator, lens", "mask per query"
CASES = {row: CPU.case(row) for row in ROWS}
CASES |= {
    "in fp64": CPU.case("lens per row", H=61),
    "small keys": CPU.case("no lens", scale={"w_k": 1e-3}),  # the shifted table
    "clamped": CPU.case("lens per row", scale={"w_q": 4.0, "w_k": 4.0}),
    "direct": CPU.case("lens per row", scale={"w_q": 40.0}),
    "one query": CPU.case("no lens", B=40, Tq=1, H=131),  # tanh of the sums, in fp32
}
# Of the general operator; larger than what fp32 is computed in fp64 for.
FEATURES = "features", "whole vectors of features", "relu"
GENERAL = {form: CPU.case("lens per row", H=211, **FORMS[form]) for form in FEATURES}
GENERAL |= {
    "features of one query": CPU.case("no lens", B=40, Tq=1, H=131, C=10),
    "masked": CPU.case("mask per query", H=211, C=3),
}


def test_the_best_one_is_taken():
    assert sets()[0] == "baseline"
    assert extension.instruction_set() == sets()[-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sets())
@pytest.mark.parametrize("row", [*CASES, *GENERAL])
def test_parity(row, name, dtype):
    case = GENERAL.get(row) or CASES[row]
    with using(name):
        assert extension.instruction_set() == name
        check(case, dtype)
        check(case, dtype, scored if row in GENERAL else attended)


def keeps_the_rule(got, plain, tensors):
    exact, eager = (plain(*(x.to(d) for x in tensors)) for d in (torch.float64, torch.float32))
    limit = parity.allowed(parity.error(eager, exact), float(exact.abs().max()), torch.float32)
    assert parity.error(got, exact) <= limit


@pytest.mark.parametrize("name", sets())
def test_a_softmax_over_many_keys(name):
    # Numbers that are nearly the same are rounded in the same direction.
    q, k, w = torch.full((16, 1, 1), 0.3), 0.2 + torch.rand(16, 100_000, 1) / 999, torch.ones(1)
    with using(name):
        weights = torch.ops.bahdanau_fast.attention(q, k, k, w)[1]
    keeps_the_rule(weights, lambda *x: reference.projected_scores(*x).softmax(-1), (q, k, w))


SUMMED = "queries", "keys", "w_v", "features", "w_f"


@pytest.mark.parametrize(
    ("of", "activation", "Tq", "Tk", "C"),
    [
        ("keys", "tanh", 9_000, 2, 0),
        ("keys", "relu", 9_000, 2, 0),
        ("queries", "tanh", 2, 50_000, 0),
        ("queries", "relu", 2, 50_000, 0),
        ("w_f", "tanh", 1, 50_000, 16),
    ],
)
@pytest.mark.parametrize("name", sets())
def test_gradients_that_are_long_sums(name, of, activation, Tq, Tk, C):
    generator = torch.Generator().manual_seed(0)
    shapes = (1, Tq, 16), (1, Tk, 16), (16,), *(((1, Tk, C), (16, C)) if C else ())
    tensors = [torch.randn(s, generator=generator) for s in shapes]
    place, number = SUMMED.index(of), ["tanh", "relu"].index(activation)
    grad = torch.rand(1, Tq, Tk, generator=generator) + 0.5

    def plain(*tensors):
        terms = reference.ScoreTerms(*(tensors[3:] or (None, None)), activation)
        tensors[place].requires_grad_()
        scores = reference.projected_scores(*tensors[:3], terms)
        return torch.autograd.grad(scores, tensors[place], grad.to(scores.dtype))[0]

    with using(name):
        operator = torch.ops.bahdanau_fast.attend_scores_backward
        grads = operator(grad, NEED[of], *tensors, activation=number)
    keeps_the_rule(grads[place], plain, tensors)


@pytest.mark.parametrize("name", sets())
def test_gradients_of_layers_over_many_rows(name):
    generator = torch.Generator().manual_seed(0)
    location, w = (torch.rand(s, generator=generator) for s in ((1, 1, 100_000), (1, 1, 31)))
    grad = torch.rand(1, 100_000, 1, generator=generator) + 0.5

    def plain(location, w, grad):
        features = convolved(location, w.requires_grad_(), None)
        return torch.autograd.grad(features, w, grad)[0]

    with using(name):
        of_w = torch.ops.bahdanau_fast.convolution_backward(grad, location, w, 2)[1]
        of_bias = torch.ops.bahdanau_fast.project_backward(grad, None, None, True)[2]
    keeps_the_rule(of_w, plain, (location, w, grad))
    keeps_the_rule(of_bias, lambda grad: grad.sum((0, 1)), (grad,))


@pytest.mark.parametrize("name", ["", "sse9", "AVX2"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="name must be an instruction set this processor has"):
        extension.set_instruction_set(name)


def test_a_table_of_one_serves_another():
    # The layout of the table is the same everywhere.
    torch.manual_seed(0)
    keys, queries = torch.randn(2, 40, 50), torch.randn(2, 30, 50)
    values, w = torch.randn(2, 40, 9), torch.randn(50)
    with using("baseline"):
        table, keys_max = torch.ops.bahdanau_fast.exp_keys(keys)
    given = {"queries": queries, "keys": keys, "values": values, "w_v": w}
    given |= {"table": table, "keys_max": keys_max}
    with using("baseline"):
        want = torch.ops.bahdanau_fast.attention(**given)[0]
    for name in sets():
        with using(name):
            got = torch.ops.bahdanau_fast.attention(**given)[0]
        close(got, want)
