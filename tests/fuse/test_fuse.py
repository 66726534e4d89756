"""What ``fuse`` reports, what it leaves alone, and what it computes once."""

import inspect

import pytest
import torch
from course import CourseMLPAttention
from styles import STYLES
from torch import nn
from whole import Tutorial, inputs, tutorial

import bahdanau_fast as bf
from bahdanau_fast.fuse import choice
from bahdanau_fast.graphs import plan
from bahdanau_fast.memory import key_cache


def call(module, calls=1):
    """Results of the last of some calls."""
    return [module(*inputs()) for _ in range(calls)][-1]


class KeysFirst(Tutorial):
    def forward(self, query, keys):
        return self.Va(torch.tanh(self.Ua(keys) + self.Wa(query))).squeeze(2)


def test_a_formula_names_queries_and_keys():
    (entry,) = bf.fuse(KeysFirst(16), inputs()).fused
    assert entry.formula == "Va . tanh(Ua k + Ua.bias + Wa q + Wa.bias) + Va.bias"
    given = (
        *(torch.randn(3, *shape) for shape in ((2, 5), (6, 5), (6, 4))),
        torch.tensor([1, 6, 3]),
    )
    (entry,) = bf.fuse(CourseMLPAttention(8, 5), given).fused
    assert entry.formula == "softmax(v . tanh(W_k q + W_q k), mask) v"


def test_the_report_prints_as_a_table():
    other = STYLES["join_gelu"]
    module = other.make()
    kind = type(module)
    model = nn.ModuleDict(
        {
            "decoder": nn.ModuleDict({"attention": tutorial(), "out": nn.Linear(3, 3)}),
            "other": module,
            "heads": nn.MultiheadAttention(8, 2),
            "dot": STYLES["dot_product"].make(),
            "ours": bf.AdditiveAttention(8),
        }
    )
    report = bf.fuse(model)
    assert report.fused == ()
    assert [entry.name for entry in report.waiting] == ["decoder.attention", "other", "dot"]
    (ours,) = report.left
    assert (ours.name, ours.text) == ("ours", "already this package's")
    assert str(report).endswith("\n3 modules are looked at when they are called")
    call(model["decoder"]["attention"], 3)
    for _ in range(3):
        module(*other.inputs(torch.randn))
    (entry,) = report.fused
    assert (entry.name, entry.kind) == ("decoder.attention", "Tutorial")
    lines, first = inspect.getsourcelines(Tutorial)
    at = next(i for i, line in enumerate(lines) if "tanh" in line)
    assert entry.place == f"whole.py:{first + at}"
    assert entry.formula.startswith("softmax(Va . tanh(")
    assert [entry.name for entry in report.waiting] == ["dot"]
    assert type(module) is kind
    lines = str(report).splitlines()
    assert lines[0].split() == ["module", "class", "where", "formula", "how,", "or", "why", "not"]
    assert [line.split()[0] for line in lines[2:4]] == ["decoder.attention", "ours"]
    assert report._repr_html_().count("<tr>") == 3
    assert bf.fuse(model).fused == (entry,)
    assert bf.unfuse(model) == ["decoder.attention", "other", "dot"]
    assert bf.unfuse(model) == []
    assert str(bf.fuse(nn.Linear(3, 3))) == "no module to look at"


class Scorer(nn.Module):
    """As SR-GNN's: a caller gives what forward made to another method."""

    def __init__(self):
        super().__init__()
        self.encoder, self.attention = nn.Linear(16, 16), tutorial()

    def forward(self, x):
        return self.encoder(x)

    def compute_scores(self, query, keys):
        return self.weigh(query, keys)

    def weigh(self, query, keys):
        return torch.tanh(query + keys)


def test_methods_that_are_not_watched_are_named():
    module = Scorer()
    report = bf.fuse(module)
    for _ in range(3):
        module.compute_scores(*inputs())
        assert "other methods than forward are not watched: Scorer.compute_scores" in str(report)
        module(inputs()[0])
    assert "other methods" not in str(bf.fuse(tutorial()))


def test_what_does_not_pay_runs_as_written(monkeypatch):
    monkeypatch.setattr(choice, "PAYS", 0.0)
    module = tutorial()
    before = call(module)
    report = bf.fuse(module)
    assert all(torch.equal(a, b) for a, b in zip(call(module, 3), before, strict=True))
    (entry,) = report.left
    assert report.fused == ()
    assert entry.text.startswith("runs as written")
    assert entry.formula in str(bf.fuse(tutorial(), inputs(), always=True))
    call(module, 8)
    assert module.__dict__["_bahdanau_fast"].rests(inputs())  # and asks seldom again
    assert not module.__dict__["_bahdanau_fast"].rests([torch.cat([x, x]) for x in inputs()])


def test_a_forward_set_on_the_instance_is_left_alone():
    module = tutorial()
    module.forward = module.forward
    (entry,) = bf.fuse(module).entries
    assert entry.text == "its forward was replaced on the instance"


def test_what_is_no_module_is_said():
    for function in (bf.fuse, bf.unfuse):
        with pytest.raises(TypeError, match=r"^model must be a torch\.nn\.Module, got dict$"):
            function({})


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


class Encoder(nn.Sequential):
    """Of the user's, with layers of torch."""


def test_layers_of_torch_stay_on_their_fast_path():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    module, (_, x) = Encoder(layer).eval(), inputs()
    with torch.no_grad():
        want = module(x)
        report = bf.fuse(module)
        assert torch.equal(module(x), want)
    assert "fast path" in report.left[0].text
