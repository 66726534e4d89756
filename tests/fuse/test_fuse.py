"""What ``fuse`` finds, what it leaves alone, and what it reports."""

import driving
import pytest
import told
import torch
from told import close, inputs, tutorial
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast.fuse import plan
from bahdanau_fast.fuse import report as fuse_report
from bahdanau_fast.memory import key_cache


class DotAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.key_layer = nn.Linear(8, 8)

    def forward(self, query, keys):
        return (query @ self.key_layer(keys).transpose(1, 2)).softmax(-1) @ keys


class WithoutTanh(told.Tutorial):
    def forward(self, query, keys):
        both = self.Wa(query) + self.Ua(keys)
        scores = self.Va(torch.tanh(both) if keys is None else torch.sigmoid(both))
        weights = torch.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        return torch.bmm(weights, keys), weights


def call(module, calls=1):
    """Results of the last of some calls."""
    return [module(*inputs()) for _ in range(calls)][-1]


class KeysFirst(told.Tutorial):
    def forward(self, query, keys):
        return self.Va(torch.tanh(self.Ua(keys) + self.Wa(query))).squeeze(2)


def test_a_formula_names_queries_and_keys():
    (entry,) = bf.fuse(KeysFirst(16), inputs()).fused
    assert entry.formula == "Va . tanh(Ua k + Ua.bias + Wa q + Wa.bias) + Va.bias"


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
    assert report.fused == ()
    assert [entry.name for entry in report.waiting] == ["decoder.attention", "other", "dot"]
    assert [entry.name for entry in report.left] == ["ours"]
    assert str(report).endswith("\n3 modules are looked at when they are called")
    for name in ("decoder.attention", "other"):
        call(model.get_submodule(name), 3)
    (entry,) = report.fused
    assert (entry.name, entry.kind) == ("decoder.attention", "Tutorial")
    assert entry.place.startswith("told.py:")
    assert entry.formula.startswith("softmax(Va . tanh(")
    assert [entry.name for entry in report.waiting] == ["dot"]
    assert type(model["other"]) is WithoutTanh
    lines = str(report).splitlines()
    assert lines[0].split() == ["module", "class", "where", "formula", "how,", "or", "why", "not"]
    assert [line.split()[0] for line in lines[2:4]] == ["decoder.attention", "ours"]
    assert bf.fuse(model).fused == (entry,)
    assert bf.unfuse(model) == ["decoder.attention", "other", "dot"]
    assert bf.unfuse(model) == []
    assert str(bf.fuse(nn.Linear(3, 3))) == "no module to look at"


def test_what_does_not_pay_runs_as_written(monkeypatch):
    monkeypatch.setattr(fuse_report, "PAYS", 0.0)
    module = tutorial()
    before = call(module)
    report = bf.fuse(module)
    assert all(torch.equal(a, b) for a, b in zip(call(module, 3), before, strict=True))
    (entry,) = report.left
    assert report.fused == ()
    assert entry.text.startswith("runs as written")
    assert entry.formula in str(bf.fuse(tutorial(), inputs(), always=True))


def test_a_forward_set_on_the_instance_is_left_alone():
    module = tutorial()
    module.forward = module.forward
    (entry,) = bf.fuse(module).entries
    assert entry.text == "its forward was replaced on the instance"


def test_hooks_run_once_and_nothing_is_drawn():
    module, seen = tutorial(), []
    report = bf.fuse(module)
    module.Wa.register_forward_hook(lambda *_: seen.append("Wa"))
    module.register_forward_hook(lambda *_: seen.append(""))
    given, state = inputs(), torch.get_rng_state()
    module(*given)
    assert report.fused
    assert seen == ["Wa", ""]
    assert torch.equal(torch.get_rng_state(), state)


def test_course_modules_of_every_naming():
    for names in (("W_q", "W_k", "w_v"), ("W_k", "W_q", "v"), ("query", "memory", "energy")):
        module = Course(*names)
        queries, keys = torch.randn(3, 2, 5), torch.randn(3, 6, 7)
        lens = torch.tensor([1, 6, 3])
        before = module(queries, keys, keys, lens)
        report = bf.fuse(module)
        for _ in range(3):
            assert close([module(queries, keys, keys, lens)], [before])
        assert report.fused
        assert all(name in report.fused[0].formula for name in names)
        assert module.attention_weights.shape == (3, 2, 6)


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


def test_a_lazy_module_is_fused_at_its_first_call():
    torch.manual_seed(0)
    module = driving.PEERS["d2l"].make()
    report = bf.fuse(module)
    assert isinstance(module.W_q.weight, nn.UninitializedParameter)
    queries, keys = torch.randn(3, 2, 5), torch.randn(3, 6, 7)
    ours = [module(queries, keys, keys, None) for _ in range(4)]
    assert report.fused
    bf.unfuse(module)
    assert close(ours, [module(queries, keys, keys, None)] * 4)


def test_what_is_no_module_is_said():
    for function in (bf.fuse, bf.unfuse):
        with pytest.raises(TypeError, match=r"^model must be a torch\.nn\.Module, got dict$"):
            function({})


class Largest(told.Tutorial):
    """A product with a broadcast vector, of which nobody takes the sum."""

    def forward(self, query, keys):
        both = torch.tanh(self.Wa(query) + self.Ua(keys))
        weights = (both * self.Va.weight.expand(9, 16)).amax(-1).softmax(-1)
        return torch.bmm(weights.unsqueeze(1), keys), weights


def test_a_product_that_is_not_summed_has_values():
    (entry,) = bf.fuse(Largest(16), inputs()).left
    assert "its values are needed" in entry.text


class Kept(told.Tutorial):
    def __init__(self, size, activation):
        super().__init__(size)
        self.activation = activation

    def forward(self, query, keys):
        act = getattr(torch, self.activation) if isinstance(self.activation, str) else None
        both = self.Wa(query) + self.Ua(keys)
        scores = self.Va((act or self.activation)(both)).squeeze(2)
        return torch.bmm(scores.softmax(-1).unsqueeze(1), keys), scores


@pytest.mark.parametrize("activation", [torch.tanh, "tanh", nn.Tanh(), nn.functional.relu])
def test_an_activation_may_be_kept(activation):
    assert bf.fuse(Kept(16, activation), inputs()).fused


WRITERS = {
    "mul_": lambda x: x.mul_(0.5),
    "data": lambda x: x.data.mul_(0.5),
    "a part": lambda x: x[0].zero_(),
    "an index": lambda x: x.__setitem__(0, 0.0),
    "numpy": lambda x: x.numpy().fill(0.5),
    "out": lambda x: torch.add(x, 1.0, out=x),
    "inplace": lambda x: torch.nn.functional.relu(x, True),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
}


class Writing(told.Tutorial):
    """Writes to its keys when they are projected, and before anybody has asked for that.

    What it writes to the query comes after the fused operator.
    """

    write = None

    def forward(self, query, keys):
        keys = keys.clone()
        projected, query = self.Ua(keys), self.Wa(query)
        self.write(keys)
        weights = torch.softmax(self.Va(torch.tanh(query + projected)).squeeze(2), dim=-1)
        context = torch.bmm(weights.unsqueeze(1), keys)
        self.write(query)
        return context + query.sum(), weights


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_promised_is_of_what_was_there(writer):
    torch.manual_seed(0)
    module = Writing(16)
    module.write = WRITERS[writer]
    with torch.no_grad():
        theirs = call(module)
        report = bf.fuse(module)
        ours = call(module, 3)
    assert report.fused
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
def test_keys_are_projected_once_for_all_steps(monkeypatch, grad):
    monkeypatch.setattr(plan, "_SMALL", 0)
    module, (query, _) = tutorial(), inputs()
    keys = torch.randn(3, 40, 16)
    bf.fuse(module)
    made = []
    for name in ("linear", "shared_linear"):
        own = getattr(key_cache, name)
        monkeypatch.setattr(
            key_cache, name, lambda *a, own=own, **k: made.append(a[0]) or own(*a, **k)
        )
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            module(query, keys)
        made.clear()
        others = keys + 1
        contexts = [module(query + i, others)[0] for i in range(6)]
    assert 1 <= len(made) <= 2 < len(contexts)


# ---- what a later call has to share with the noted one -------------------------------------------


class Values(told.Tutorial):
    """Keys and values, which may be one tensor."""

    def forward(self, query, keys, values):
        _, weights = super().forward(query, keys)
        return torch.bmm(weights, values), weights


def test_tensors_that_were_one_may_be_two():
    module, (query, keys) = Values(16), inputs()
    bf.fuse(module)
    for values in (keys, keys, keys, 2 * keys):
        assert close(module(query, keys, values), Values.forward(module, query, keys, values))


def test_autocast_may_take_another_dtype():
    module = tutorial()
    bf.fuse(module)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found = [call(module)[0] for _ in range(4)]
        assert {each.dtype for each in found} == {dtype}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x, pad):
        return self.layers(x, src_key_padding_mask=pad)


def test_layers_of_torch_stay_on_their_fast_path():
    module, (_, x) = Encoder().eval(), inputs()
    pad = torch.arange(9) >= torch.tensor([[9], [5], [2]])
    with torch.no_grad():
        want = module(x, pad)
        report = bf.fuse(module)
        assert torch.equal(module(x, pad), want)
    assert "fast path" in report.left[0].text
