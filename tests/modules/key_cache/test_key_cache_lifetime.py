"""What a remembered projection holds alive, and who else may call: copies, layers, threads."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from remembered import DK, DQ, TK, TQ, B, H, agrees, held, projections, truth
from torch import nn
from torch.utils.checkpoint import checkpoint

import bahdanau_fast as bf


@pytest.mark.parametrize(("grad", "mode"), [(True, True), (False, True), (False, False)])
def test_keys_can_die(module, query, grad, mode):
    keys = torch.randn(B, TK, DK, requires_grad=grad)
    with torch.set_grad_enabled(mode):
        agrees(module, query, keys)
        agrees(module, query, keys)  # the second time there is a table too
    module.attention_weights = None
    projected, watched = weakref.ref(module._cache._entry.table), weakref.ref(keys)
    assert projected() is not None
    del keys
    gc.collect()
    assert watched() is None
    assert held(module) is None
    assert projected() is None


def test_no_cycle_keeps_the_graph(module, query):
    # Without the garbage collector: reference counts alone must free a step.
    gc.disable()
    try:
        keys = torch.randn(B, TK, DK, requires_grad=True)
        module(query, keys, keys).sum().backward()
        module.attention_weights = None
        watched = weakref.ref(keys)
        del keys
        assert watched() is None
    finally:
        gc.enable()


def test_keys_die_after_the_last_backward_though_a_result_lives(module, query):
    encoder, source = nn.Linear(4, DK), torch.randn(B, TK, 4)
    keys = encoder(source)
    context = module(query, keys, source)
    context.sum().backward()
    watched = weakref.ref(keys.untyped_storage())
    del keys
    assert watched() is None
    assert context.grad_fn is not None


def test_the_module_can_die(keys, query):
    module = bf.AdditiveAttention(DK, DQ, H)
    context = module(query, keys, keys)
    watched = weakref.ref(module._cache)
    del module
    gc.collect()
    assert watched() is None
    context.sum().backward()  # the hook finds nobody to tell


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_do_not_share(module, keys, query, how):
    agrees(module, query, keys)
    other = how(module)
    assert held(other) is None
    assert held(module) is not None
    with torch.no_grad():
        other.W_k.weight.neg_()
    agrees(other, query, keys)
    agrees(module, query, keys)


def test_inference_mode(module, keys, query):
    with torch.inference_mode():
        inner = keys.clone()
        assert projections(lambda: [module(query + i, inner, inner) for i in range(5)]) == 1
        agrees(module, query, inner)
        inner.mul_(3)  # inference tensors count no versions
        agrees(module, query, inner)
        agrees(module, query, keys)  # an ordinary tensor, in inference mode
        agrees(module, query, keys)
    agrees(module, query, keys).sum().backward()
    assert module.W_k.weight.grad is not None


def test_inference_mode_with_gradients_enabled(module, keys, query):
    with torch.inference_mode(), torch.enable_grad():
        assert not agrees(module, query, keys).requires_grad
        agrees(module, query, keys)
    agrees(module, query, keys).sum().backward()
    assert module.W_k.weight.grad is not None


class Low(nn.Module):
    """A low-rank addition around a layer, as LoRA libraries put in its place."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(DK, 2, bias=False), nn.Linear(2, H, bias=False)

    @property
    def weight(self):
        return self.layer.weight + self.up.weight @ self.down.weight

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def test_a_replaced_layer(module, keys, query):
    agrees(module, query, keys)
    module.W_k = Low(module.W_k)
    agrees(module, query, keys)
    with torch.no_grad():
        module.W_k.up.weight.add_(1.0)
    agrees(module, query, keys)


def test_a_parametrized_layer(module, keys, query):
    agrees(module, query, keys)
    nn.utils.parametrizations.weight_norm(module.W_k)
    agrees(module, query, keys)
    with torch.no_grad():
        module.W_k.parametrizations.weight.original0.mul_(3.0)
    agrees(module, query, keys)


def test_a_hook_runs_at_each_call(module, keys, query):
    agrees(module, query, keys)
    handle = module.W_k.register_forward_hook(lambda _, __, out: out * 0)
    changed = module(query, keys, keys)
    torch.testing.assert_close(changed, keys.mean(1, keepdim=True), rtol=1e-5, atol=1e-6)
    handle.remove()
    agrees(module, query, keys)


def test_threads_share_a_module(module):
    # Each thread its own keys: whoever's projection is in the slot, the result is one's own.
    failures = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(B, TK, DK, generator=generator)
        query = torch.randn(B, TQ, DQ, generator=generator)
        want = bf.additive_attention(
            query, keys, keys, module.W_q.weight, module.W_k.weight, module.w_v.weight
        )[0]
        for _ in range(150):
            if not torch.allclose(module(query, keys, keys), want, rtol=1e-5, atol=1e-6):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(module, keys, query, reentrant):
    keys.requires_grad_()
    want = torch.autograd.grad(truth(module, query, keys).square().sum(), (keys, module.W_k.weight))
    out = checkpoint(lambda q, k: module(q, k, k), query, keys, use_reentrant=reentrant)
    out.square().sum().backward()
    for a, b in zip((keys.grad, module.W_k.weight.grad), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_functional_call(module, keys, query):
    agrees(module, query, keys)
    other = {n: torch.randn_like(p) for n, p in module.named_parameters()}
    weights = (other["W_q.weight"], other["W_k.weight"], other["w_v.weight"])
    want = bf.reference.additive_attention(query, keys, keys, *weights)[0]
    got = torch.func.functional_call(module, other, (query, keys, keys))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    agrees(module, query, keys)


def test_tiny_keys(query):
    # Not remembered, hence right under the same changes.
    module = bf.AdditiveAttention(DK, DQ, H)
    keys = torch.randn(B, 2, DK)
    agrees(module, query, keys)
    keys.neg_()
    agrees(module, query, keys)
    with torch.no_grad():
        module.W_k.weight.neg_()
    agrees(module, query, keys)
