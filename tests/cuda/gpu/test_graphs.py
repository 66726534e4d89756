"""A CUDA graph captures any call on a GPU, forward and backward.

On a GPU it is captured and replayed on new data. Without one, support/captured.py shows that
nothing waits for the GPU and nothing comes from the CPU, and tests/cuda/mock what csrc/cuda asks of
the runtime.
"""

import numpy as np
import pytest
import torch
from captured import GPU, captured, capturing

import bahdanau_fast as bf
from bahdanau_fast.seq2seq import Seq2SeqAttentionDecoder

pytestmark = [] if torch.cuda.is_available() else pytest.mark.thorough

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
