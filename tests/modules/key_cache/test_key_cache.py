"""An unchanged decoder loop projects its keys once, and never sees a stale projection."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from course import CourseAttention
from torch import nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import bahdanau_fast as bf
from bahdanau_fast.memory import TINY, ProjectedKeys

B, TQ, TK, DK, DQ, H = 3, 1, 53, 17, 5, 19
# Keys that are faster projected than remembered are not in question here.
assert min(B * TK * DK, B * TK * H) > TINY


@pytest.fixture
def module():
    torch.manual_seed(0)
    return bf.AdditiveAttention(DK, DQ, H)


@pytest.fixture
def keys():
    return torch.randn(B, TK, DK, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def query():
    return torch.randn(B, TQ, DQ, generator=torch.Generator().manual_seed(2))


def held(module):
    """The projection that is remembered, or None."""
    entry = module._cache._entry
    if entry is None or entry.projected() is None:
        return None
    return ProjectedKeys(entry.projected(), entry.table, entry.keys_max)


def truth(module, query, keys, lens=None):
    bias = module.bias
    with bf.backends.use("reference"):
        return bf.additive_attention(
            query,
            keys,
            keys,
            module.W_q.weight,
            module.W_k.weight,
            module.w_v.weight,
            lens,
            bias=bias,
        )[0]


def agrees(module, query, keys):
    got = module(query, keys, keys)
    torch.testing.assert_close(got, truth(module, query, keys), rtol=1e-5, atol=1e-6)
    return got


def projections(run):
    """How many products of the key weight a run makes."""
    with profile(record_shapes=True) as record:
        run()
    return sum(
        event.name == "aten::linear" and [B, TK, DK] in event.input_shapes
        for event in record.events()
    )


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


def test_trusted_versions(keys, query):
    """``cache_keys="trust"`` says what it cannot see; what moves versions it does see."""
    module = bf.AdditiveAttention(DK, DQ, H, cache_keys="trust")
    first = agrees(module, query, keys)
    keys.numpy()[:] *= 2
    assert torch.equal(module(query, keys, keys.clone())[..., :0], first[..., :0])
    assert held(module) is not None
    keys.add_(1)
    agrees(module, query, keys)
    with torch.no_grad():
        module.W_k.weight.mul_(2)
    agrees(module, query, keys)
    with torch.inference_mode():
        inner = keys.clone()
        agrees(module, query, inner)
        inner.mul_(3)
        agrees(module, query, inner)


def test_cache_keys_is_checked():
    with pytest.raises(ValueError, match="cache_keys must be True, False or 'trust', got 'yes'"):
        bf.AdditiveAttention(DK, DQ, H, cache_keys="yes")


def grads_of(run, module):
    module.zero_grad()
    run()
    return [p.grad.clone() for p in module.parameters()]


def same_gradients(module, ours, plain):
    for a, b in zip(grads_of(ours, module), grads_of(plain, module), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_two_backwards_over_the_same_keys(module, keys, query):
    def steps(function):
        for i in range(2):  # no optimizer step in between: gradients add up
            function(module, query + i, keys).square().sum().backward()

    def ours(module, query, keys):
        return module(query, keys, keys)

    same_gradients(module, lambda: steps(ours), lambda: steps(truth))
    module(query, keys, keys).sum().backward()
    assert held(module) is None


def test_calls_have_a_backward_each(module, keys, query):
    def run(function):
        calls = [function(module, query + i, keys) for i in range(4)]
        for i, call in enumerate(calls):
            ((i + 1) * call.square()).sum().backward()

    same_gradients(module, lambda: run(lambda m, q, k: m(q, k, k)), lambda: run(truth))
    assert held(module) is None


def test_gradients_step_by_step(module, keys, query):
    keys.requires_grad_()

    def run(function):
        calls = [function(module, query + i, keys) for i in range(4)]
        inputs = [keys, module.W_k.weight, module.w_v.weight]
        return [g for call in calls for g in torch.autograd.grad(call.square().sum(), inputs)]

    ours, plain = run(lambda m, q, k: m(q, k, k)), run(truth)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_second_backward_needs_the_graph(module, keys, query):
    loss = sum(module(query + i, keys, keys).sum() for i in range(3))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_of_a_loop(module, keys, query):
    keys.requires_grad_()

    def run(function):
        loss = sum(function(module, query + i, keys).square().sum() for i in range(3))
        (grad,) = torch.autograd.grad(loss, keys, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [keys, module.W_k.weight])

    for a, b in zip(run(lambda m, q, k: m(q, k, k)), run(truth), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_lengths_counted_up_between_steps(module, keys, query):
    def run(function):
        lens = torch.tensor([1, 20, 50])
        calls = []
        for i in range(4):
            calls.append(function(query + i, lens))
            lens.add_(1)
        torch.cat(calls, 1).square().sum().backward()

    same_gradients(
        module,
        lambda: run(lambda q, lens: module(q, keys, keys, lens)),
        lambda: run(lambda q, lens: truth(module, q, keys, lens)),
    )


@pytest.mark.parametrize("tk", [2, TK])  # small calls are one operator
def test_inputs_changed_in_place_before_backward(module, query, tk):
    """As plain code: an error where a gradient needs the value, else none."""
    keys = torch.randn(B, tk, DK)

    def run(function, change):
        module.zero_grad()
        tensors = [query.clone(), keys.clone()]
        out = function(module, *tensors)
        change(tensors)
        out.square().sum().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    def ours(m, q, k):
        return m(q, k, k)

    for at in (0, 1):
        for function in (ours, truth):
            with pytest.raises(RuntimeError, match="inplace operation"):
                run(function, lambda tensors, at=at: tensors[at].add_(1))
    module.W_q.requires_grad_(False)
    got = run(ours, lambda tensors: tensors[0].add_(1))
    want = run(truth, lambda tensors: tensors[0].add_(1))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_history_that_is_cut(module, query):
    """Same bytes, same tensor, another node of the graph."""
    encoder, source = nn.Linear(4, DK), torch.randn(B, TK, 4)
    plain = CourseAttention(DK, DQ, H)
    plain.load_state_dict(module.state_dict())

    def run(attention):
        encoder.zero_grad()
        h = encoder(source) * 1
        first = sum(attention(query + i, h, h, None) for i in range(2))
        h.detach_().requires_grad_()
        attention(query, h, h, None).square().sum().backward()
        first.sum().backward()
        return [encoder.weight.grad, h.grad]

    for a, b in zip(run(module), run(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_parameters_swapped(module, keys, query):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad():  # a graph holds w_v, ours or plain, and refuses the swap
            agrees(module, query, keys)
            module.load_state_dict(bf.AdditiveAttention(DK, DQ, H).state_dict())
            agrees(module, query, keys)
            torch.utils.swap_tensors(keys, -keys)
            agrees(module, query, keys)
            assert module.double()(query.double(), *[keys.double()] * 2).dtype == torch.float64
            agrees(module.float(), query, keys)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_retain_graph(module, keys, query):
    def run(function):
        loss = function(module, query, keys).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        function(module, query, keys).sum().backward()

    same_gradients(module, lambda: run(lambda m, q, k: m(q, k, k)), lambda: run(truth))


def test_truncated_backpropagation(module, keys, query):
    # Encoder outputs used for several windows, each with a backward of its own.
    encoder = nn.Linear(4, DK)
    source = torch.randn(B, TK, 4)

    def windows(function):
        encoder.zero_grad()
        keys = encoder(source)
        for i in range(3):
            steps = [function(module, query + i + 0.1 * s, keys) for s in range(4)]
            torch.cat(steps, 1).square().sum().backward(retain_graph=True)
        return encoder.weight.grad.clone()

    got = windows(lambda m, q, k: m(q, k, k))
    torch.testing.assert_close(got, windows(truth), rtol=1e-4, atol=1e-5)
    same_gradients(module, lambda: windows(lambda m, q, k: m(q, k, k)), lambda: windows(truth))


def test_a_backward_that_stops_before_the_keys(module, keys, query):
    values = keys.clone().requires_grad_()
    torch.autograd.grad(module(query, keys, values).sum(), values)
    same_gradients(
        module,
        lambda: module(query, keys, keys).sum().backward(),
        lambda: truth(module, query, keys).sum().backward(),
    )


def test_an_unchanged_loop_of_fifty_steps(module, keys):
    keys.requires_grad_()
    lens = torch.tensor([3, 53, 0])
    queries = torch.randn(50, B, TQ, DQ)

    def loop(function):
        keys.grad = None
        steps = [function(q) for q in queries]
        torch.cat(steps, 1).square().sum().backward()
        return torch.cat(steps, 1).detach(), keys.grad.clone()

    ours = loop(lambda q: module(q, keys, keys, lens))
    plain = loop(lambda q: truth(module, q, keys, lens))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    same_gradients(
        module,
        lambda: loop(lambda q: module(q, keys, keys, lens)),
        lambda: loop(lambda q: truth(module, q, keys, lens)),
    )
    assert held(module) is None


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
