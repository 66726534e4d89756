"""A CUDA graph captures any call on a GPU: nothing waits for it, and nothing comes from the CPU.

Without a GPU, in support/captured.py. What csrc/cuda asks of the runtime is captured in
tests/cuda/mock; all of it on a GPU in tests/cuda/gpu.
"""

import numpy as np
import pytest
import torch
from captured import GPU, capturing

import bahdanau_fast as bf
from bahdanau_fast.seq2seq import Seq2SeqAttentionDecoder

B, DQ, DK, H, C = 2, 5, 4, 8, 3
# Tq and Tk: one launch, keys cut in parts, beams, more queries than those of a step.
SIZES = {"step": (1, 50), "split": (1, 2000), "beams": (3, 2000), "many queries": (40, 50)}
SEEN = {
    "all": lambda *_: {},
    "lens": lambda *_: {"valid_lens": drawn(B).long()},
    "a length per query": lambda Tq, _: {"valid_lens": drawn(B, Tq)},
    "mask": lambda _, Tk: {"mask": drawn(B, Tk) > 0},
    "mask per query": lambda Tq, Tk: {"mask": drawn(B, Tq, Tk) > 0},
}


def drawn(*shape):
    return torch.randn(shape, device=GPU)


def with_gradient(*shapes):
    return [drawn(*shape).requires_grad_() for shape in shapes]


def both_ways(call):
    """Runs a call without gradients, and with one and its backward."""
    with torch.no_grad():
        call()
    sum(x.float().sum() for x in call() if x is not None).backward()


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
    x, call = drawn(2, 3), REFUSED[what]
    with capturing("cuda", "triton"), pytest.raises((RuntimeError, TypeError)):
        call(x)


# A step on either backend, and what either does not serve: the reference's.
SERVES = {
    "cuda": {"step": "attend", "split": "attend", "beams": "attend", "many queries": ""},
    "triton": {
        "step": "decode_kernel",
        "split": "combine_kernel",
        "beams": "combine_kernel",
        "many queries": "softmax_kernel",
    },
    "reference": dict.fromkeys(SIZES, ""),
}
BACKWARD = {"attend": "attend_backward", "softmax_kernel": "grad_softmax_kernel"}


def check(backend, size, ran):
    """Forward and backward took the kernels of a backend."""
    forward = SERVES[backend][size]
    backward = BACKWARD.get(forward, "step_keys_kernel")
    assert {forward, backward} <= set(ran) if forward else not ran


@pytest.fixture(params=[(b, s) for b in SERVES for s in SIZES], ids="-".join)
def way(request):
    """A backend, and a size of SIZES."""
    return request.param


def there(backend):
    return () if backend == "reference" else (backend,)


@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize("seen", SEEN)
def test_the_function(way, seen, dropped):
    backend, size = way
    Tq, Tk = SIZES[size]
    shapes = (B, Tq, DQ), (B, Tk, DK), (B, Tk, DK), (H, DQ), (H, DK), (1, H), (H,)
    *inputs, bias = with_gradient(*shapes)
    given = {**SEEN[seen](Tq, Tk), "bias": bias, "dropout_p": dropped}
    with capturing(*there(backend)) as ran:
        both_ways(lambda: bf.additive_attention(*inputs, **given))
        with torch.no_grad():
            bf.additive_attention(*inputs, **given, need_weights=False)
    check(backend, size, ran)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("size", SIZES)
def test_features_and_scores(size, activation):
    """Triton's and the reference's."""
    Tq, Tk = SIZES[size]
    shapes = (B, Tq, DQ), (B, Tk, DK), (H, DQ), (H, DK), (H,), (B, Tk, C), (H, C)
    q, k, *weights, features, w_f = with_gradient(*shapes)
    inside = {"features": features, "w_f": w_f, "activation": activation}
    for backends in (["triton"], []):
        with capturing(*backends) as ran:
            both_ways(lambda: bf.additive_attention(q, k, k, *weights, **inside))
            both_ways(lambda: [bf.additive_scores(q, k, *weights, **inside, clip=10.0)])
        assert ("scores_kernel" in ran) == bool(backends)


@pytest.mark.parametrize("seen", SEEN)
def test_a_module_and_its_memory(way, seen):
    backend, size = way
    Tq, Tk = SIZES[size]
    queries, keys = with_gradient((B, Tq, DQ), (B, Tk, DK))
    module = bf.AdditiveAttention(DK, DQ, H, 0.1, bias=True, device=GPU)
    given, own = SEEN[seen](Tq, Tk), drawn(B, Tq, Tk) > 0
    with capturing(*there(backend)) as ran:
        both_ways(lambda: [module(queries, keys, keys, **given), module.attention_weights])

        def steps():
            memory = module.memory(keys, **given)
            some = memory[drawn(B).long()] if Tq == 1 else memory[:1]
            rows = queries[: len(some.values)]
            contexts = [module.attend(queries, memory) for _ in range(2)]
            return [*contexts, module.attend(queries, memory, mask=own), module.attend(rows, some)]

        both_ways(steps)
        with torch.no_grad():
            module.scores(queries, module.memory(keys))
        module.eval()
        both_ways(steps)
    check(backend, size, ran)


@pytest.mark.parametrize("backend", SERVES)
@pytest.mark.parametrize("kind", [{"channels": None}, {"channels": C, "kernel_size": 5}])
def test_location(kind, backend):
    module = bf.LocationAttention(DK, DQ, H, **kind, device=GPU)
    query, keys, location = with_gradient((B, 1, DQ), (B, 50, DK), (B, 1, 50))

    def steps():
        memory, seen, contexts = module.memory(keys), location, []
        for _ in range(2):
            contexts.append(module.attend(query, memory, seen))
            seen = module.attention_weights
        return contexts

    with capturing(*there(backend)) as ran:
        both_ways(steps)
    assert ("decode_kernel" in ran) == (backend == "triton")


@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize("backend", SERVES)
@pytest.mark.parametrize("cls", [bf.AttentionGRU, bf.AttentionLSTM])
def test_all_steps_of_a_decoder(cls, backend, dropped):
    sizes = {"key_size": DK, "value_size": DK, "dropout": dropped, "attention_dropout": dropped}
    module = cls(6, 7, 2, **sizes, device=GPU)
    inputs, keys = with_gradient((17, B, 6), (B, 50, DK))
    lens = drawn(B).long()
    with capturing(*there(backend)) as ran:
        both_ways(lambda: [module(inputs, None, keys, None, lens)[0], module.attention_weights])
    check(backend, "step", ran)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_greedy_decoding(backend):
    decoder = Seq2SeqAttentionDecoder(7, 4, 6, 2).to(GPU).eval()
    with capturing(*there(backend)) as ran, torch.no_grad():
        state = decoder.init_state((drawn(9, B, 6), drawn(2, B, 6)), drawn(B).long())
        tokens, weights = decoder.write(drawn(2, B, 6), decoder.memory(state), [0, 1], 20)
    assert tokens.shape == (B, 20)
    assert weights.shape == (B, 20, 9)
    assert ran == [SERVES[backend]["step"]] * 20
