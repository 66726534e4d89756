"""A CUDA graph captures any call on a GPU, forward and backward.

On a GPU it is captured and replayed on new data. Without one, all of it but the calls of the
runtime: nothing waits for the GPU and nothing comes from the CPU. Tensors on the meta device, which
have no data, stand for those of a GPU: as the GPU has computed nothing while a graph is captured,
nothing may look at what they hold, go by it, or copy it to the CPU. Nor may anything come from
there: a graph would read that memory at each replay. Launches of Triton are noted, and not made;
operators of csrc/cuda give results without data, and tests/cuda/mock shows what they ask of the
runtime.
"""

import importlib
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from unittest.mock import patch

import cells
import numpy as np
import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bahdanau_fast as bf
from bahdanau_fast import backends
from bahdanau_fast.backends import availability
from bahdanau_fast.backends.triton import TRITON
from bahdanau_fast.ops import decode_arguments
from bahdanau_fast.ops.operator import apart, operators
from bahdanau_fast.seq2seq import Seq2SeqAttentionDecoder
from benchmarks import measure

pytestmark = [] if torch.cuda.is_available() else pytest.mark.thorough

GPU = torch.device("cuda" if torch.cuda.is_available() else "meta")
if GPU.type == "cuda":
    backends.available()  # loads them, CUDA C++ first
else:
    importlib.import_module("bahdanau_fast.backends.triton.register")

B, DQ, DK, H, C = 2, 5, 4, 8, 3
# Tq and Tk: one launch, keys cut in parts, beams, more queries than those of a step.
SIZES = {"step": (1, 20), "split": (1, 2000), "beams": (3, 2000), "many queries": (40, 20)}
SEEN = {
    "all": lambda *_: {},
    "lens": lambda _, Tk: {"valid_lens": lengths(Tk)},
    "lens per query": lambda Tq, Tk: {"valid_lens": torch.rand(B, Tq, device=GPU) * Tk},
    "mask": lambda _, Tk: {"mask": drawn(B, Tk) > 0},
    "mask per query": lambda Tq, Tk: {"mask": drawn(B, Tq, Tk) > 0},
}
# What serves a size, by what runs forward and backward; nothing where it is the reference.
DECODE, COMBINE = ("decode_kernel", "step_keys_kernel"), ("combine_kernel", "step_keys_kernel")
MANY = ("softmax_kernel", "grad_softmax_kernel")
STEP = ("attention", "attention_backward")
SERVES = {
    "cuda": {"step": STEP, "split": STEP, "beams": STEP, "many queries": ()},
    "triton": {"step": DECODE, "split": COMBINE, "beams": COMBINE, "many queries": MANY},
    "reference": dict.fromkeys(SIZES, ()),
}


def drawn(*shape):
    return torch.randn(shape, device=GPU)


def lengths(Tk):
    return torch.randint(1, Tk + 1, (B,), device=GPU)


def with_gradient(*shapes):
    return [drawn(*shape).requires_grad_() for shape in shapes]


def captured(there, call, leaves, same=True, recorded=(False, True)):
    """Captures a call; replayed on new data, it gives what it gives without a graph.

    Args:
        there: the backends that are there, of "cuda" and "triton".
        call: gives tensors, or None among them.
        leaves: the tensors of GPU that it reads and that want a gradient.
        same: False where something is drawn, and no two calls give the same.
        recorded: without gradients, with backward, or both, one after the other.

    Returns the operators and Triton's kernels that ran, by name; None on a GPU, where kernels run.
    """
    if GPU.type == "meta":
        with capturing(*there) as ran:
            for records in recorded:
                results(call, leaves, records)
        return ran
    with patch.object(backends, "why_not", lambda name: None if name in there else "left out"):
        for records in recorded:
            replayed(partial(results, call, leaves, records), leaves, same)
    return None


def results(call, leaves, records):
    """Outputs and, of a recorded call, gradients."""
    with torch.set_grad_enabled(records):
        outputs = [x for x in call() if x is not None]
    if not records:
        return outputs
    loss = sum(x.float().square().sum() for x in outputs)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outputs, *(x for x in grads if x is not None)]


def replayed(function, leaves, same):
    replay = measure.captured(function)
    for _ in range(2):
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        got = replay()
        if same:  # sums in an order that atomics change: some hundred roundings of fp32
            torch.testing.assert_close(got, function(), rtol=1e-4, atol=1e-4)
        assert all(x.isfinite().all() for x in got)


def there(backend):
    """The backends that are there beside the reference."""
    if GPU.type == "cuda" and (problem := bf.backends.why_not(backend)):
        pytest.skip(problem)
    return () if backend == "reference" else (backend,)


def check(ran, backend, size):
    if ran is not None:
        served = SERVES[backend][size]
        assert set(served) <= set(ran)
        assert served or not ran


# ---- without a GPU ----


class _Capture(TorchDispatchMode):
    """Notes operators of this package, and refuses what is on the CPU."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        refuse_cpu(func, args, kwargs, results)
        if func.namespace == "bahdanau_fast":
            self.ran.append(func._opname)
        return results


def launch(kernel, ran, *args, **kwargs):
    refuse_cpu(kernel, args, kwargs)
    ran.append(kernel.__name__)


def by_triton(operator, *args, **kwargs):
    return apart(operator.in_python["triton"](*operator.named(*args, **kwargs).values()))


def refuse_cpu(function, *given):
    for x in tree_leaves(given):
        if isinstance(x, torch.Tensor) and x.device.type == "cpu":
            raise RuntimeError(f"a graph cannot capture {function}: a tensor is on the CPU")


def of_numbers(*_, **__):
    raise RuntimeError("a graph cannot capture a tensor that is made of numbers in Python")


@contextmanager
def capturing(*there):
    """Inside, calls with tensors of "meta" take the way of an H100, and what is refused raises.

    Gives the operators and Triton's kernels that ran, by name; ``there`` as for ``captured``.
    """
    there = tuple(map(backends.BACKENDS.get, (*there, "reference")))
    by, decoder, choose = backends.route, backends.route_decoder, backends.choose_backend

    def route(facts, step):
        return by(facts._replace(device="cuda"), step)

    def choose_backend(requested, _, *rest):
        return choose(requested, "cuda", *rest)

    capture = _Capture()
    on_gpu = torch.library.Library("bahdanau_fast", "IMPL")
    with ExitStack() as stack:
        stack.callback(on_gpu._destroy)
        for name, operator in operators.items():
            if TRITON in there and "triton" in operator.in_python:
                on_gpu.impl(name, partial(by_triton, operator), "Meta", allow_override=True)
        for change in (
            (backends, "_routes", {}),
            (backends, "_available", lambda *_: there),
            (backends, "route", route),
            (backends, "route_decoder", lambda facts: decoder(facts._replace(device="cuda"))),
            (backends, "choose_backend", choose_backend),
            (availability, "one_launch_problem", lambda *_: None),
            (triton.JITFunction, "run", partialmethod(launch, capture.ran)),
            (torch.cuda, "is_current_stream_capturing", lambda: True),
            *((torch, name, of_numbers) for name in ("tensor", "as_tensor")),
        ):
            stack.enter_context(patch.object(*change))
        stack.enter_context(patch.dict(decode_arguments.MULTIPLES, meta=32))
        stack.enter_context(cells.on_the_cpu("Meta"))
        stack.enter_context(capture)
        yield capture.ran


# ---- calls ----


@pytest.fixture(params=[(b, s) for b in SERVES for s in SIZES], ids="-".join)
def way(request):
    """A backend, and a size of SIZES."""
    return request.param


# Where a query may look, and the probability of dropping a weight.
LOOKS = [*((seen, 0.0) for seen in SEEN), ("all", 0.3)]


@pytest.mark.parametrize(("seen", "dropped"), LOOKS)
def test_the_function(way, seen, dropped):
    backend, size = way
    Tq, Tk = SIZES[size]
    shapes = (B, Tq, DQ), (B, Tk, DK), (B, Tk, DK), (H, DQ), (H, DK), (1, H), (H,)
    *inputs, bias = leaves = with_gradient(*shapes)
    given = {**SEEN[seen](Tq, Tk), "bias": bias, "dropout_p": dropped}

    def call():
        alone = bf.additive_attention(*inputs, **given, need_weights=False)
        return [*bf.additive_attention(*inputs, **given), *alone]

    check(captured(there(backend), call, leaves, not dropped), backend, size)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_features_and_scores(backend, size, activation):
    Tq, Tk = SIZES[size]
    shapes = (B, Tq, DQ), (B, Tk, DK), (H, DQ), (H, DK), (H,), (B, Tk, C), (H, C)
    q, k, *weights, features, w_f = leaves = with_gradient(*shapes)
    inside = {"features": features, "w_f": w_f, "activation": activation}

    def call():
        scores = bf.additive_scores(q, k, *weights, **inside, clip=10.0)
        return [*bf.additive_attention(q, k, k, *weights, **inside), scores]

    ran = captured(there(backend), call, leaves)
    check(ran, backend, size)
    assert ran is None or ("scores_kernel" in ran) == (backend == "triton")


@pytest.mark.parametrize(("seen", "dropped"), LOOKS)
def test_a_module_and_its_memory(way, seen, dropped):
    backend, size = way
    Tq, Tk = SIZES[size]
    queries, keys = with_gradient((B, Tq, DQ), (B, Tk, DK))
    module = bf.AdditiveAttention(DK, DQ, H, dropped, bias=True, device=GPU)
    given, own, rows = SEEN[seen](Tq, Tk), drawn(B, Tq, Tk) > 0, torch.arange(B, device=GPU)

    def call():
        memory = module.memory(keys, **given)
        found = [module(queries, keys, keys, **given), module.attention_weights]
        found += [module.attend(queries, memory) for _ in range(2)]
        some = memory[slice(None) if torch.is_grad_enabled() else rows]
        found += [module.attend(queries, memory, mask=own), module.attend(queries, some)]
        return [*found, module.scores(queries, memory)]

    leaves = [queries, keys, *module.parameters()]
    check(captured(there(backend), call, leaves, not dropped), backend, size)


@pytest.mark.parametrize("kind", [{"channels": None}, {"channels": C, "kernel_size": 5}])
@pytest.mark.parametrize("backend", SERVES)
def test_location(backend, kind):
    module = bf.LocationAttention(DK, DQ, H, **kind, device=GPU)
    query, keys, location = with_gradient((B, 1, DQ), (B, 50, DK), (B, 1, 50))

    def call():
        memory, seen, contexts = module.memory(keys), location, []
        for _ in range(2):
            contexts.append(module.attend(query, memory, seen))
            seen = module.attention_weights
        return contexts

    ran = captured(there(backend), call, [query, keys, location, *module.parameters()])
    assert ran is None or ("decode_kernel" in ran) == (backend == "triton")


@pytest.mark.parametrize("cls", [bf.AttentionGRU, bf.AttentionLSTM])
@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize("by", [*SERVES, "one launch"])
def test_all_steps_of_a_decoder(by, dropped, cls):
    one = by == "one launch"
    sizes = {"key_size": DK, "value_size": DK, "attention_dropout": dropped}
    kind = {"device": GPU, "dtype": torch.bfloat16 if one else torch.float32}
    module = cls(6, 7, **sizes, **kind) if one else cls(6, 7, 2, dropout=dropped, **sizes, **kind)
    shapes = (17, B, 6), (B, 20, DK)
    inputs, keys = (torch.randn(s, **kind).requires_grad_() for s in shapes)
    lens = lengths(20)

    def call():
        return [module(inputs, None, keys, None, lens)[0], module.attention_weights]

    leaves = [inputs, keys, *module.parameters()]
    ran = captured(there("cuda" if one else by), call, leaves, not dropped)
    if not one:
        check(ran, by, "step")
    elif ran is not None:
        assert ran == ["decode", "decode", "decode_backward", "attend_backward_keys"]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_greedy_decoding(backend):
    decoder = Seq2SeqAttentionDecoder(7, 4, 6, 2).to(GPU).eval()
    outputs, hidden, lens = drawn(9, B, 6), drawn(2, B, 6), lengths(9)

    def call():
        memory = decoder.memory(decoder.init_state((outputs, hidden), lens))
        return [decoder.write(hidden, memory, [0, 1], 20)[1]]

    # A graph takes all 20 steps; without one, they end with the sentences.
    ran = captured(there(backend), call, [], same=False, recorded=[False])
    assert ran is None or ran == [SERVES[backend]["step"][0]] * 20


# ---- what a capture refuses, without a GPU ----

REFUSED = {
    "a number": lambda x: x.sum().item(),
    "a decision": lambda x: x.sum() > 0 or None,
    "a comparison": lambda x: torch.equal(x, x),
    "a shape": lambda x: x[x > 0],
    "a copy to the CPU": lambda x: x.cpu(),
    "a list": lambda x: x.tolist(),
    "NumPy": np.asarray,
    "a copy from the CPU": lambda x: torch.ones(2).to(x.device),
    "numbers": lambda x: torch.tensor([1, 2], device=x.device),
    "a list of lengths": lambda x: torch.as_tensor([1, 2], device=x.device),
    "a tensor of the CPU": lambda x: x + torch.ones(2, 1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_waits_or_comes_from_the_cpu_is_refused(what):
    x, call = torch.zeros(2, 3, device="meta"), REFUSED[what]
    with capturing("cuda", "triton"), pytest.raises((RuntimeError, TypeError)):
        call(x)
