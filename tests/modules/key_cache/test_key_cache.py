"""An unchanged decoder loop projects its keys once, and never sees a stale projection."""

import pytest
import torch
from remembered import DK, DQ, TK, B, H, agrees, held, projections, truth
from torch import nn

import bahdanau_fast as bf


@pytest.mark.parametrize("grad", [True, False])
def test_keys_are_projected_once(module, keys, query, grad):
    def loop():
        with torch.set_grad_enabled(grad):
            for step in range(10):
                module(query + step, keys, keys)

    assert projections(loop) == 1
    first = held(module)
    with torch.set_grad_enabled(grad):
        agrees(module, query, keys)
    assert held(module).keys is first.keys
    module.cache_keys = False
    assert projections(loop) == 10


def test_keys_that_come_once_are_not_remembered(module, query):
    def seen(keys, calls=1):
        for _ in range(calls):
            agrees(module, query, keys)
        entry = module._cache._entry
        return entry is not None and entry.storage() is keys.untyped_storage()

    sources = [torch.randn(B, TK, DK) for _ in range(6)]
    assert seen(sources[0], calls=3)
    assert seen(sources[1])  # in a loop, as the keys before them
    assert not seen(sources[2])
    assert not seen(sources[3])
    assert seen(sources[3])  # a loop again
    assert projections(lambda: [module(query, sources[3], sources[3]) for _ in range(5)]) == 0
    assert seen(sources[4])
    sources[4].mul_(2.0)
    assert seen(sources[4])


def test_without_cache_keys_nothing_is_held(keys, query):
    module = bf.AdditiveAttention(DK, DQ, H, cache_keys=False)
    agrees(module, query, keys)
    assert held(module) is None


def test_other_keys(module, keys, query):
    agrees(module, query, keys)
    agrees(module, query, keys + 1)
    agrees(module, query, keys.clone())
    agrees(module, query, keys)


def test_keys_changed_in_place(module, keys, query):
    agrees(module, query, keys)
    keys.mul_(-1.5)
    agrees(module, query, keys)
    keys[1, 3] = 7.0
    agrees(module, query, keys)
    view = keys[:, 2:4]
    view.zero_()
    agrees(module, query, keys)


def test_keys_given_other_memory(module, keys, query):
    agrees(module, query, keys)
    keys.data = torch.randn(B, TK, DK)
    agrees(module, query, keys)
    keys.set_(torch.randn(B, TK, DK))
    agrees(module, query, keys)


def test_weights_changed_in_place(module, keys, query):
    for name in ("W_k", "W_q", "w_v"):
        agrees(module, query, keys)
        with torch.no_grad():
            getattr(module, name).weight.mul_(-2)
        agrees(module, query, keys)


def test_weights_loaded(module, keys, query):
    agrees(module, query, keys)
    module.load_state_dict(bf.AdditiveAttention(DK, DQ, H).state_dict())
    agrees(module, query, keys)
    module.load_state_dict(bf.AdditiveAttention(DK, DQ, H).state_dict(), assign=True)
    agrees(module, query, keys)


def test_weights_replaced(module, keys, query):
    agrees(module, query, keys)
    module.W_k.weight = nn.Parameter(torch.randn(H, DK))
    agrees(module, query, keys)
    module.W_k.weight.data = torch.randn(H, DK)
    agrees(module, query, keys)
    module.W_k = nn.Linear(DK, H, bias=False)
    agrees(module, query, keys)


def test_bias_changed(keys, query):
    module = bf.AdditiveAttention(DK, DQ, H, bias=True)
    agrees(module, query, keys)
    with torch.no_grad():
        module.bias.add_(torch.linspace(-2, 2, H))
    agrees(module, query, keys)
    module.bias = nn.Parameter(torch.randn(H))
    agrees(module, query, keys)
    module.bias = None
    agrees(module, query, keys)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("kind", ["fused", "foreach", "plain"])
def test_optimizer_steps(module, keys, query, make, kind):
    options = {"foreach": False} if kind == "plain" else {kind: True}
    optimizer = make(module.parameters(), lr=0.5, **options)
    for _ in range(3):
        optimizer.zero_grad()
        agrees(module, query, keys).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            agrees(module, query, keys)


def test_grad_mode_changed(module, keys, query):
    with torch.no_grad():
        assert not agrees(module, query, keys).requires_grad
    (got,) = torch.autograd.grad(agrees(module, query, keys).sum(), [module.W_k.weight])
    (want,) = torch.autograd.grad(truth(module, query, keys).sum(), [module.W_k.weight])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    agrees(module, query, keys)
    with torch.no_grad():
        assert not agrees(module, query, keys).requires_grad


def test_requires_grad_changed(module, keys, query):
    agrees(module, query, keys)
    keys.requires_grad_()
    agrees(module, query, keys).sum().backward()
    assert keys.grad.abs().max() > 1e-4
    module.W_k.weight.requires_grad_(False)
    agrees(module, query, keys)
    module.W_k.weight.requires_grad_(True)
    agrees(module, query, keys).sum().backward()
    assert module.W_k.weight.grad is not None


def test_autocast_changed(module, keys, query):
    want = agrees(module, query, keys)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(query, keys, keys).dtype == torch.bfloat16
        assert held(module).keys.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert module(query, keys, keys).dtype == torch.float16
        assert held(module).keys.dtype == torch.float16
    assert torch.equal(module(query, keys, keys), want)


def test_backend_changed(module, keys, query):
    agrees(module, query, keys)
    with bf.backends.use("reference"):
        agrees(module, query, keys)
    agrees(module, query, keys)


@pytest.mark.parametrize("of", ["keys", "W_k", "bias"])
def test_bytes_written_where_no_version_moves(of, keys, query):
    module = bf.AdditiveAttention(DK, DQ, H, bias=True)
    changed = {"keys": keys, "W_k": module.W_k.weight, "bias": module.bias}[of].detach()
    for step in range(3):
        agrees(module, query, keys)
        before = changed._version
        changed.numpy()[..., step] += 2.0
        assert changed._version == before
    agrees(module, query, keys)


def test_one_byte_in_many(query):
    """Every element of the keys counts, the last of a block and of the tensor too."""
    keys = torch.randn(2, 1100, DK)
    bits = keys.view(torch.int32).flatten()
    marks = set()
    for at in [0, 1, 1023, 1024, 16383, 16384, len(bits) - 2, len(bits) - 1]:
        bits[at] ^= 1
        marks.add(torch.ops.bahdanau_fast.fingerprint(keys, None, None))
        bits[at] ^= 1
    marks.add(torch.ops.bahdanau_fast.fingerprint(keys, None, None))
    assert len(marks) == 9
    assert torch.ops.bahdanau_fast.fingerprint(keys, None, None) in marks


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1),
    "columns": lambda x: x[..., ::2],
    "rows": lambda x: x[:, 1::3],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "turned": lambda x: x.transpose(1, 2),
    "empty": lambda x: x[:, :0],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_fingerprints_read_what_a_view_shows(name, dtype):
    whole = torch.randn(4, 60, 70).to(dtype)
    view = LAYOUTS[name](whole)
    mark = torch.ops.bahdanau_fast.fingerprint(view, None, None)
    shown = LAYOUTS[name](torch.arange(whole.numel()).view(whole.shape))
    outside = torch.ones(whole.numel(), dtype=torch.bool)
    outside[shown.flatten()] = False
    whole[outside.view(whole.shape)] += 1
    assert torch.ops.bahdanau_fast.fingerprint(view, None, None) == mark
    if view.numel():
        view[-1, -1, -1] += 1
        assert torch.ops.bahdanau_fast.fingerprint(view, None, None) != mark


def test_cache_keys_is_checked():
    with pytest.raises(ValueError, match="cache_keys must be True or False, got 'trust'"):
        bf.AdditiveAttention(DK, DQ, H, cache_keys="trust")
