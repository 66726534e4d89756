"""A fused module: its hooks and kept keys; what it leaves to its own ``forward``.

That changed layers are called and training is the plain module's: test_ways.py, test_sequences.py.
"""

import copy
import math
import types

import driving
import pytest
import told
import torch
from course import CourseAttention
from told import close, inputs, tutorial
from torch import nn

import bahdanau_fast as bf


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
        for _ in range(4):
            module(states, lens, state)
        for change in (lambda keys: keys.mul_(-1.5), lambda keys: keys.numpy().fill(0.5)):
            change(module.precomputed_enc_h)
            with torch.inference_mode(False):
                assert close(
                    module(states, lens, state),
                    type(module)._original.forward(module, states, lens, state),
                )
    module.reset()
    other = torch.randn(4, 17, driving.D)
    assert module(other, driving.lens_of(17), state)[1].shape == (4, 17)
    assert module.precomputed_enc_h.shape == (4, 17, driving.H)


def test_a_row_with_nothing_to_look_at_is_as_plain_code_gives_it():
    module = driving.PEERS["joeynmt"].make()
    bf.fuse(module)
    values = torch.randn(2, 5, driving.D)
    module.compute_proj_keys(values)
    mask = torch.tensor([[[True] * 5], [[False] * 5]])
    for _ in range(3):
        _, weights = module(torch.randn(2, 1, driving.Q), mask, values)
        assert weights[1].isnan().all()
    assert math.isclose(float(weights[0].detach().sum()), 1.0, rel_tol=1e-6)


def test_it_compiles_in_one_graph():
    module = tutorial()
    bf.fuse(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert close(compiled(*inputs()), module(*inputs()))


# ---- what is left to its own code ----------------------------------------------------------------


def test_a_window_of_keys_is_seen():
    torch.manual_seed(0)
    module = driving.PEERS["espnet location"].make().eval()
    states, state = torch.randn(1, 9, driving.D), torch.randn(1, driving.Q)
    call = {"att_prev": None, "last_attended_idx": 2}
    before = module(states, [9], state, **call)
    module.reset()
    bf.fuse(module)
    after = module(states, [9], state, **call)
    assert close(after, before)
    assert after[1][0, 5:].tolist() == [0.0] * 4  # the window


def outcome(call):
    """A call's results, or its error."""
    try:
        return list(call())
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((3, 9, 16), (3, 9, 16)),
        ((3, 2, 16), (3, 9, 16)),
        ((1, 1, 16), (3, 9, 16)),
        ((3, 16), (3, 9, 16)),
    ],
    ids=["as many as keys", "two", "one for the batch", "a state"],
)
def test_queries_that_its_own_code_takes_in_its_own_way(queries, keys):
    module = tutorial()
    fused = copy.deepcopy(module)
    report = bf.fuse(fused)
    for _ in range(2):
        fused(*inputs())
    assert report.fused
    given = torch.randn(queries), torch.randn(keys)
    theirs, ours = outcome(lambda: module(*given)), outcome(lambda: fused(*given))
    if isinstance(theirs, tuple):
        assert ours == theirs
    else:
        assert close(ours, theirs)


def test_a_broadcast_query_of_the_courses_module():
    torch.manual_seed(0)
    module = CourseAttention(5, 6, 8)
    fused = copy.deepcopy(module)
    bf.fuse(fused)
    given = (
        torch.randn(1, 2, 6),
        torch.randn(3, 4, 5),
        torch.randn(3, 4, 7),
        torch.tensor([1, 2, 4]),
    )
    torch.testing.assert_close(fused(*given), module(*given))


def patched_on_the_instance(module):
    own = type(module).attend
    module.attend = types.MethodType(lambda self, *given: 2 * own(self, *given), module)


def patched_on_the_class(module):
    kind = next(each for each in type(module).__mro__ if "attend" in vars(each))
    own = kind.attend
    kind.attend = lambda self, *given: 2 * own(self, *given)


def forward_patched_on_the_class(module):
    kind = next(
        each for each in type(module).__mro__ if each.__name__ == "Parts" and "attend" in vars(each)
    )
    own = kind.forward
    kind.forward = lambda self, query, keys: [2 * each for each in own(self, query, keys)]


@pytest.mark.parametrize(
    "patch", [patched_on_the_instance, patched_on_the_class, forward_patched_on_the_class]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_methods_patched_after_fuse(patch, compiled):
    if compiled and patch is patched_on_the_class:
        pytest.skip("torch.compile does not see it in a plain module either")
    torch.compiler.reset()

    class Parts(type(tutorial())):
        """The tutorial's module, its context by a method of its own."""

        def attend(self, weights, keys):
            return torch.bmm(weights, keys)

        def forward(self, query, keys):
            _, weights = super().forward(query, keys)
            return self.attend(weights, keys), weights

    module = tutorial()
    module.__class__ = Parts
    fused = copy.deepcopy(module)
    bf.fuse(fused)
    call = torch.compile(fused, backend="eager") if compiled else fused
    before = module(*inputs())
    assert close(call(*inputs()), before)
    patch(fused)
    if patch is patched_on_the_instance:
        patch(module)
    after = module(*inputs())
    assert not close(after[:1], before[:1])
    assert close(call(*inputs()), after)


@pytest.mark.parametrize("call", ["uint8 mask", "another batch"])
def test_errors_are_its_own(call):
    module = driving.PEERS["tacotron"].make()
    fused = copy.deepcopy(module)
    bf.fuse(fused)
    mask = torch.zeros(4, 9, dtype=torch.uint8 if call == "uint8 mask" else torch.bool)
    memory, before = torch.randn(4, 9, driving.D), torch.zeros(4, 2, 9)
    state = torch.randn(4 if call == "uint8 mask" else 3, driving.Q)
    errors = []
    for each in (module, fused):
        given = state, memory, each.memory_layer(memory), before, mask
        errors.append(outcome(lambda each=each, given=given: each(*given)))
    assert errors[0] == errors[1]
    assert isinstance(errors[0], tuple)


@pytest.mark.parametrize(
    "compile_it", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 3))]
)
def test_compiled_submodules_are_left_alone(compile_it):
    model = nn.ModuleDict({"layer": compile_it(nn.Linear(3, 3)), "attention": tutorial()})
    report = bf.fuse(model)
    model["attention"](*inputs())
    assert [entry.name for entry in report.fused] == ["attention"]


def test_scripting_a_fused_module_says_what_to_do():
    model = nn.Sequential(tutorial())
    bf.fuse(model)
    with pytest.raises(RuntimeError, match=r"bahdanau_fast\.unfuse\(model\): call that first"):
        torch.jit.script(model)
    bf.unfuse(model)
    assert close(torch.jit.script(model[0])(*inputs()), model[0](*inputs()))
