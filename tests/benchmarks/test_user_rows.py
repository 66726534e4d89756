"""Rows of what a user feels, with tiny sizes on the CPU."""

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from bahdanau_fast.fuse import choice, look
from benchmarks import decoders, measure
from benchmarks.contestants import CourseAttention
from benchmarks.decoders import DROP_IN, FUSE, OURS, OWN
from benchmarks.gpu import user

DECODER, CHAPTER = "(3,4,5,8)", "(2,3,4,8)"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(user, "SIZES", user.TINY)
    monkeypatch.setattr(choice, "PAYS", float("inf"))  # calls as small run as written
    monkeypatch.setattr(look, "_SECONDS", 0.0)
    monkeypatch.setattr(measure, "GPU_SECONDS", 1e-3)
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0.0)


def rows(part=""):
    return {row.name: row for row in user.user("cpu") if part in row.name}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_rows_come_last_and_graphs_need_a_gpu(device, monkeypatch):
    monkeypatch.setattr(user, "SIZES", user.TINY | {"compiled": None})
    found = [(row.name, row.seconds) for row in user.user(device)]
    compiled = ["compiled" in name for name, _ in found]
    assert compiled == sorted(compiled)
    wanted = {user.ROW_SECONDS[device], user.COMPILED_SECONDS}
    assert {seconds for _, seconds in found} == wanted
    for part in ("graphed: training step", "compiled: training step"):
        assert any(part in name for name, _ in found) == (device == "cuda")


@pytest.mark.parametrize("who", [OWN, DROP_IN, FUSE, OURS])
def test_a_decoder_is_what_a_graph_can_be_made_of(who, monkeypatch):
    made = []

    def make(module, arguments):  # runs what CUDA would capture, and asks for the same gradients
        given, found = tree_leaves(arguments), tree_leaves(module(*arguments))
        assert all(isinstance(x, torch.Tensor) for x in given)
        outputs = [x for x in found if x.requires_grad]
        asked = [x for x in (*given, *module.parameters()) if x.requires_grad]
        made.extend(torch.autograd.grad(outputs, asked, [torch.ones_like(x) for x in outputs]))

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    result = user._decoder(f"{who}, graphed", torch.device("cpu"), "train", user.TINY["decoder"])
    assert result["passed"]
    assert len(made) == 12  # source and state, three of attention, seven of other layers
    assert all(x.any() for x in made)


class Wrong(CourseAttention):
    """Ignores the lengths."""

    def forward(self, queries, keys, values, valid_lens):
        return super().forward(queries, keys, values, None)


@pytest.mark.parametrize("call", ["training step", "greedy decode"])
def test_a_wrong_decoder_is_seen(call, monkeypatch):
    wrong = partial(decoders._CourseDecoder, Wrong)
    monkeypatch.setitem(decoders.DECODERS, DROP_IN, decoders.DECODERS[DROP_IN]._replace(make=wrong))
    result = rows()[f"{DROP_IN}: {call} {DECODER}, float32"].compute()
    assert result["worst"] > 1
    assert not result["passed"]


@pytest.mark.parametrize("way", ["forward", "forward + backward"])
def test_a_wrong_module_is_seen(way, monkeypatch):
    monkeypatch.setattr(user.bf, "AdditiveAttention", Wrong)
    for name, row in rows(f"module call (2,1,5,8), {way}").items():
        if "compiled" not in name:
            assert row.compute()["passed"] == name.startswith(OWN), name
