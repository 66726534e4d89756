"""What a fused module leaves to its own ``forward``, and models that ``fuse`` leaves alone."""

import copy
import types

import driving
import pytest
import torch
from course import CourseAttention
from torch import nn
from tutorial import close, inputs, tutorial

import bahdanau_fast as bf


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
    assert bf.fuse(fused).fused
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
    assert bf.fuse(fused).fused
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
    assert bf.fuse(fused).fused
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
    assert bf.fuse(fused).fused
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
    assert [entry.name for entry in bf.fuse(model).fused] == ["attention"]


def test_scripting_a_fused_module_says_what_to_do():
    model = nn.Sequential(tutorial())
    bf.fuse(model)
    with pytest.raises(RuntimeError, match=r"bahdanau_fast\.unfuse\(model\): call that first"):
        torch.jit.script(model)
    bf.unfuse(model)
    assert close(torch.jit.script(model[0])(*inputs()), model[0](*inputs()))
