"""A fused module: its hooks, training, kept keys and calls that are not served are its own."""

import copy
import math

import driving
import pytest
import told
import torch
from remembered import projections
from torch import nn
from tutorial import close, inputs, tutorial

import bahdanau_fast as bf
from bahdanau_fast.fuse.step import Step
from bahdanau_fast.ops import attend


def test_hooks_run_and_changed_layers_are_called():
    module, seen = tutorial(), []
    bf.fuse(module)
    for name in ("", "Wa", "Ua", "Va"):
        module.get_submodule(name).register_forward_hook(
            lambda *_, name=name: seen.append(name) or None
        )
    before = told.Tutorial.forward(module, *inputs())
    seen.clear()
    assert close(module(*inputs()), before)
    assert sorted(seen) == ["", "Ua", "Va", "Wa"]
    module.Wa.weight.data.mul_(2.0)
    module.Va = nn.Sequential(nn.Linear(16, 1))
    assert close(module(*inputs()), told.Tutorial.forward(module, *inputs()))


@pytest.mark.parametrize("name", ["query_layer", "query_layer.linear_layer"])
def test_hooks_of_a_wrapped_layer_and_of_the_layer_inside_it_run(name):
    peer = driving.PEERS["coqui"]
    module = peer.make()
    bf.fuse(module)
    module.get_submodule(name).register_forward_hook(lambda _, __, result: -result)
    draw = torch.Generator().manual_seed(0)
    contexts = []
    for one in (module, copy.deepcopy(module)):
        if contexts:
            bf.unfuse(one)
        draw.manual_seed(0)
        results = peer.drive(one, lambda *shape: torch.randn(shape, generator=draw))
        contexts.append([result for kind, result in results if kind == "context"])
    assert all(map(close, *contexts))


def test_training_changes_the_weights_of_the_module_itself():
    ours, theirs = tutorial(), tutorial()
    bf.fuse(ours)
    losses = []
    for module in (ours, theirs):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
        query, keys = inputs()
        for _ in range(5):
            for _ in range(3):  # steps with a loss each, whose gradients add up
                module(query, keys)[0].square().sum().backward()
            optimizer.step()
            losses.append([p.grad.clone() for p in module.parameters()])
            optimizer.zero_grad()
    half = len(losses) // 2
    for mine, other in zip(losses[:half], losses[half:], strict=True):
        for a, b in zip(mine, other, strict=True):
            # 27 rows of 9 weights a gradient, added up three times and through five updates.
            assert float((a - b).abs().max()) <= 2.0**-16 * max(1.0, float(b.abs().max()))


def test_a_replica_computes_with_its_own_attributes():
    module = tutorial()
    bf.fuse(module)
    replica = module._replicate_for_data_parallel()
    replica._modules = dict(copy.deepcopy(module)._modules)
    with torch.no_grad():
        replica.Va.weight.neg_()
    assert close(replica(*inputs()), told.Tutorial.forward(replica, *inputs()))
    assert not close(replica(*inputs()), module(*inputs()))


def test_kept_keys_that_change_are_noticed():
    module = driving.PEERS["speechbrain"].make()
    states, state = torch.randn(4, 23, driving.D), torch.randn(4, driving.Q)
    lens = driving.lens_of(23)
    bf.fuse(module)
    with torch.no_grad():
        module(states, lens, state)
        module(states, lens, state)
        for change in (lambda keys: keys.mul_(-1.5), lambda keys: keys.numpy().fill(0.5)):
            change(module.precomputed_enc_h)
            with torch.inference_mode(False):
                assert close(
                    module(states, lens, state),
                    type(module)._original.forward(module, states, lens, state),
                )
    cache = module._bahdanau_fast_step._cache
    assert cache._entry.table is not None
    module.reset()
    assert cache._entry is None  # freed with the keys
    other = torch.randn(4, 17, driving.D)
    assert module(other, driving.lens_of(17), state)[1].shape == (4, 17)
    assert module.precomputed_enc_h.shape == (4, 17, driving.H)


@pytest.mark.parametrize("grad", [True, False])
def test_keys_that_come_once_take_no_fingerprint(monkeypatch, grad):
    """Those of a loop take one at each step, and are projected once."""
    module, taken, take = tutorial(), [], attend.fingerprint.now
    bf.fuse(module)
    monkeypatch.setattr(attend.fingerprint, "now", lambda *of: taken.append(of[0]) or take(*of))

    def counts(calls):
        query, keys = inputs(length=50)
        with torch.set_grad_enabled(grad):
            theirs = told.Tutorial.forward(module, query, keys)
            ours = []
            made = projections(
                lambda: ours.extend(module(query, keys) for _ in range(calls)), keys.shape
            )
        assert all(close(each, theirs) for each in ours)
        return made, sum(each is keys for each in taken)

    assert [counts(1) for _ in range(4)] == [(1, 1), (1, 0), (1, 0), (1, 0)]
    assert counts(4) == (2, 3)  # seen to be a loop at its second step
    assert [counts(4) for _ in range(2)] == [(1, 4), (1, 4)]
    assert [counts(1) for _ in range(3)] == [(1, 1), (1, 0), (1, 0)]


def test_a_scorer_is_made_anew_for_a_bias_that_is_to_learn():
    weight, bias = nn.Parameter(torch.randn(1, 5)), torch.randn(1)
    step = Step()
    assert step.scorer(weight, bias, 2.0) is step.scorer(weight, bias, 2.0)
    with torch.no_grad():
        weight.mul_(2.0)
    assert torch.equal(step.scorer(weight, bias, 2.0), 2.0 * weight)
    bias.requires_grad_()
    assert step.scorer(weight, bias) is step.scorer(weight, bias)
    (grad,) = torch.autograd.grad(step.scorer(weight, bias, 2.0).sum(), bias)
    assert grad.tolist() == [0.0]


def test_a_row_with_nothing_to_look_at_is_uniform():
    module = driving.PEERS["joeynmt"].make()
    bf.fuse(module)
    values = torch.randn(2, 5, driving.D)
    module.compute_proj_keys(values)
    mask = torch.tensor([[[True] * 5], [[False] * 5]])
    _, weights = module(torch.randn(2, 1, driving.Q), mask, values)
    assert weights[1].tolist() == [[pytest.approx(0.2)] * 5]
    assert math.isclose(float(weights[0].detach().sum()), 1.0, rel_tol=1e-6)


def test_it_compiles_in_one_graph():
    module = tutorial()
    bf.fuse(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert close(compiled(*inputs()), module(*inputs()))


def test_a_call_that_is_not_served_is_the_modules_own():
    torch.manual_seed(0)
    module = driving.PEERS["espnet location"].make().eval()
    states, state = torch.randn(1, 9, driving.D), torch.randn(1, driving.Q)
    call = {"att_prev": None, "last_attended_idx": 2}
    before = module(states, [9], state, **call)
    module.reset()
    bf.fuse(module)
    after = module(states, [9], state, **call)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert after[1][0, 5:].tolist() == [0.0] * 4  # the window
