"""What ``fuse`` finds, what it leaves alone, and what it reports."""

import driving
import pytest
import told
import torch
from told import close, inputs, tutorial
from torch import nn

import bahdanau_fast as bf


class DotAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.key_layer = nn.Linear(8, 8)

    def forward(self, query, keys):
        return (query @ self.key_layer(keys).transpose(1, 2)).softmax(-1) @ keys


class WithoutTanh(told.Tutorial):
    def forward(self, query, keys):
        scores = self.Va(torch.sigmoid(self.Wa(query) + self.Ua(keys)))
        weights = torch.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        return torch.bmm(weights, keys), weights


class WithSharpening(told.Tutorial):
    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))) * 1.001
        weights = torch.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        return torch.bmm(weights, keys), weights


class InTraining(told.Tutorial):
    """Differs from the tutorial's in training mode, and in a gradient alone."""

    def forward(self, query, keys):
        found = super().forward(query, keys)
        return (found[0], found[1].detach()) if self.training else found


class Renamed(nn.Module):
    """Other names, and the encoder's outputs first: known by its layers."""

    def __init__(self):
        super().__init__()
        self.project_memory, self.project_state = nn.Linear(6, 8), nn.Linear(5, 8, bias=False)
        self.energy = nn.Linear(8, 1)

    def forward(self, memory, state):
        both = self.project_state(state).unsqueeze(1) + self.project_memory(memory)
        weights = self.energy(torch.tanh(both)).squeeze(-1).softmax(-1)
        return (weights.unsqueeze(1) @ memory).squeeze(1), weights


def test_the_report_prints_as_a_table():
    model = nn.ModuleDict(
        {
            "decoder": nn.ModuleDict({"attention": tutorial(), "out": nn.Linear(3, 3)}),
            "other": WithoutTanh(16),
            "heads": nn.MultiheadAttention(8, 2),
            "dot": DotAttention(),
            "ours": bf.AdditiveAttention(8),
        }
    )
    report = bf.fuse(model)
    assert [entry.name for entry in report.fused] == ["decoder.attention"]
    assert [entry.name for entry in report.left] == ["other", "dot"]
    assert report.left[1].text == "no additive attention that is known has its layers"
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["decoder.attention", "other", "dot"]
    assert lines[0].split() == ["module", "class", "fused", "as", "how,", "or", "why", "not"]
    assert "PyTorch tutorial" in lines[2]
    assert "left alone" in lines[3]
    assert bf.fuse(model).fused[0].text == "fused before"
    assert bf.unfuse(model) == ["decoder.attention"]
    assert bf.unfuse(model) == []
    assert str(bf.fuse(nn.Linear(3, 3))) == "no module looks like additive attention"


def test_a_module_is_known_by_its_layers():
    torch.manual_seed(0)
    module = Renamed()
    memory, state = torch.randn(3, 7, 6), torch.randn(3, 5)
    before = module(memory, state)
    (entry,) = bf.fuse(module).entries
    assert entry.family == "Show, Attend and Tell"
    assert close(module(memory, state), before)
    assert close(module(state=state, memory=memory), before)
    with pytest.raises(TypeError, match="unexpected keyword argument 'query'"):
        module(memory, query=state)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        module(memory=memory)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (WithoutTanh, "the context of step 1 differs by"),
        (WithSharpening, "the context of step 1 differs by"),
        (InTraining, "the gradient of"),
    ],
)
def test_an_edited_copy_is_left_alone(kind, said):
    torch.manual_seed(0)
    module = kind(16)
    before = module(*inputs())
    (entry,) = bf.fuse(module).entries
    assert entry.family is None
    assert said in entry.text
    assert type(module) is kind
    assert all(torch.equal(a, b) for a, b in zip(module(*inputs()), before, strict=True))


@pytest.mark.parametrize("edited", [0, 1], ids=["context", "weights alone"])
def test_edited_copies_of_published_modules_are_left_alone(edited):
    cases = {}
    of_two = ("joeynmt", "speechbrain location", "espnet", "opennmt")
    for name in of_two if edited else (*of_two, "coqui"):
        module = driving.PEERS[name].make()
        own = type(module).forward

        def forward(self, *args, own=own, **kwargs):
            result = own(self, *args, **kwargs)
            if not isinstance(result, tuple):
                return result * 1.01
            return tuple(x * 1.01 if at == edited else x for at, x in enumerate(result))

        forward.__signature__ = __import__("inspect").signature(own)
        module.__class__ = type("Edited", (type(module),), {"forward": forward})
        (entry,) = bf.fuse(module).entries
        cases[name] = entry.family, "differs by" in entry.text
    assert cases == dict.fromkeys(cases, (None, True))


def test_a_forward_set_on_the_instance_is_left_alone():
    module = tutorial()
    module.forward = module.forward
    (entry,) = bf.fuse(module).entries
    assert entry.text == "its forward was replaced on the instance"


def test_hooks_do_not_run_during_the_check():
    module, seen = tutorial(), []
    module.Wa.register_forward_hook(lambda *_: seen.append(1))
    module.register_forward_hook(lambda *_: seen.append(1))
    state = torch.get_rng_state()
    assert bf.fuse(module).fused
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)


def test_course_modules_of_every_naming():
    found = {}
    for names in (("W_q", "W_k", "w_v"), ("W_k", "W_q", "v"), ("query", "memory", "energy")):
        module = Course(*names)
        queries, keys = torch.randn(3, 2, 5), torch.randn(3, 6, 7)
        lens = torch.tensor([1, 6, 3])
        before = module(queries, keys, keys, lens)
        (entry,) = bf.fuse(module).entries
        found[names[0]] = entry.family
        assert close([module(queries, keys, keys, lens)], [before])
        assert module.attention_weights.shape == (3, 2, 6)
    assert found == dict.fromkeys(found, "d2l")


class Course(nn.Module):
    def __init__(self, query, key, score):
        super().__init__()
        self.names = query, key, score
        for name, size in zip(self.names, (5, 7, 8), strict=True):
            self.add_module(name, nn.Linear(size, 1 if name == score else 8, bias=False))
        self.dropout = nn.Dropout(0.3)
        self.eval()

    def forward(self, queries, keys, values, valid_lens):
        query, key, score = (self.get_submodule(name) for name in self.names)
        both = query(queries).unsqueeze(2) + key(keys).unsqueeze(1)
        scores = score(torch.tanh(both)).squeeze(-1)
        self.attention_weights = bf.masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class DropsQueries(Course):
    def forward(self, queries, keys, values, valid_lens):
        chance, self.dropout.p = self.dropout.p, 0.0
        found = super().forward(
            nn.functional.dropout(queries, chance, self.training), keys, values, valid_lens
        )
        self.dropout.p = chance
        return found


LEFT_ALONE = {
    "its windowing is on": driving.coqui_of(windowing=True),
    "its norm is sigmoid": driving.coqui_of(norm="sigmoid"),
    "its forward_attn is on": driving.coqui_of(forward_attn=True),
    "besides": driving.theirs(driving.ESPNET, "AttLocRec", 8, 9, 10, 4, 3),
    "everything dropped": lambda: DropsQueries("W_q", "W_k", "w_v"),
}


@pytest.mark.parametrize("said", LEFT_ALONE)
def test_other_attention_with_the_same_layers_is_left_alone(said):
    (entry,) = bf.fuse(LEFT_ALONE[said]()).entries
    assert entry.family is None
    assert said in entry.text


def test_a_lazy_module_is_fused_before_its_first_call():
    torch.manual_seed(0)
    module = driving.PEERS["d2l"].make()
    assert [entry.family for entry in bf.fuse(module).entries] == ["d2l"]
    assert isinstance(module.W_q.weight, nn.UninitializedParameter)
    queries, keys = torch.randn(3, 2, 5), torch.randn(3, 6, 7)
    ours = module(queries, keys, keys, None)
    bf.unfuse(module)
    assert close([ours], [module(queries, keys, keys, None)])


def test_what_is_no_module_is_said():
    for function in (bf.fuse, bf.unfuse):
        with pytest.raises(TypeError, match=r"^model must be a torch\.nn\.Module, got dict$"):
            function({})
