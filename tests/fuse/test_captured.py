"""What a capture by torch's compiler does not see by itself, and what it costs."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside import ran, results, same
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

import bahdanau_fast as bf
from bahdanau_fast.fuse import capture
from bahdanau_fast.fuse.front import record_of

B, T, H, CALLS = 3, 7, 16, 5


class Plain(nn.Module):
    def __init__(self, way=None):
        super().__init__()
        self.W, self.U, self.v = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, 1)
        self.way = way

    def scores(self, q, k):
        return self.v(torch.tanh(self.W(q).unsqueeze(1) + self.U(k))).squeeze(-1)

    def forward(self, q, k, mask):
        return self.way(self, q, k, mask)


def weigh(scores, k):
    weights = scores.softmax(-1)
    return torch.bmm(weights.unsqueeze(1), k).squeeze(1), weights


def drawn(seed=0, batch=B, length=T):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(s, generator=generator) for s in ((batch, H), (batch, length, H)))
    return q, k, torch.rand(batch, length, generator=generator) < 0.3


def written(change):
    """A mask that is written to after it hid scores."""

    def way(m, q, k, mask):
        mask = mask.clone()
        mask[:, 0] = False
        filled = m.scores(q, k).masked_fill(mask, -torch.inf)
        mask = change(mask)
        return *weigh(filled, k), mask

    return way


def squared(m, q, k, mask):
    w = m.W(q)
    both = torch.tanh(w.unsqueeze(1) + m.U(k))
    w **= 2
    return *weigh(m.v(both).squeeze(-1), k), w


def noisy(m, q, k, mask):
    return weigh(m.scores(q, k + torch.as_tensor(np.random.randn(H), dtype=k.dtype)), k)


def turned(m, q, k, mask):
    k = k.transpose(0, 1)
    w = m.v(torch.tanh(m.W(q) + m.U(k))).squeeze(-1).softmax(0)
    return (w.unsqueeze(-1) * k).sum(0), w.view(-1)


def inside(m, q, k, mask):
    return checkpoint(lambda q: weigh(m.scores(q, k), k)[0], q, use_reentrant=True)


def listed(m, q, k, mask):
    """A list whose length is data, which torch's compiler cannot know."""
    return *weigh(m.scores(q, k), k), mask.nonzero().tolist()


WAYS = {
    "a mask joined in place": written(lambda mask: mask.__ior__(mask.roll(1, 1))),
    "a mask by its operator": written(
        lambda m: torch.ops.aten.logical_or_.default(m, m.roll(1, 1))
    ),
    "a query squared in place": squared,
    "NumPy's random numbers": noisy,
    "weights that are viewed": turned,
    "a reentrant checkpoint": inside,
    "a list as long as the data say": listed,
}


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", WAYS)
def test_the_same_in_each_call(name, grad):
    torch.manual_seed(0)
    plain = Plain(WAYS[name])
    module = copy.deepcopy(plain)
    bf.fuse(module, always=True)
    with torch.set_grad_enabled(grad):
        for seed in range(CALLS):
            found = []
            for each in (module, plain):
                np.random.seed(seed)
                found.append(each(*drawn(seed)))
            same(*found)


def in_place(m, q, k, mask):
    scores = m.scores(q, k)
    lens, flat = 1 + mask.sum(1), scores.reshape(-1, k.size(1))
    seen = torch.arange(k.size(1), dtype=torch.float32)[None, :] < lens[:, None]
    flat[~seen] = -1e6  # as the course's sequence_mask
    return weigh(flat.reshape(scores.shape), k)


def chosen(m, q, k, mask):
    scores = m.scores(q, k)
    mask = torch.arange(k.size(1)) <= (~mask).sum(1, keepdim=True)
    return weigh(torch.where(mask, scores, torch.full_like(scores, -1e6)), k)


def multiplied(m, q, k, mask):
    mask = mask.index_fill(1, torch.tensor(0), False).to(k.dtype)
    return weigh(m.scores(q, k) * (1 - mask) + -1e6 * mask, k)


def by_hand(m, q, k, mask):
    e = m.scores(q, k).exp() * ~mask.index_fill(1, torch.tensor(0), False)
    weights = e / (e.sum(1, keepdim=True) + 1e-10)
    return torch.einsum("bt,btd->bd", weights, k), weights


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("way", [in_place, chosen, multiplied, by_hand])
def test_a_mask_is_part_of_it_at_all_sizes(way, grad):
    plain = Plain(way)
    module = copy.deepcopy(plain)
    report = bf.fuse(module, always=True)
    with torch.set_grad_enabled(grad):
        for batch, length in ((3, 7), (3, 7), (5, 7), (4, 9), (6, 20)):
            given = drawn(batch, batch, length)
            same(*(results(partial(m, *given), [], m) for m in (module, plain)))
    assert {entry.formula for entry in report.fused} == {
        "softmax(v . tanh(W q + W.bias + U k + U.bias) + v.bias, mask) v"
    }
    assert ran(report) == 4


def test_a_call_that_the_compiler_leaves_is_said_at_once(monkeypatch):
    def fails(*_):
        raise TorchDynamoException("no such luck\nbelow")

    module, compiled = Plain(lambda m, q, k, mask: weigh(m.scores(q, k), k)), capture._Way.call
    report = bf.fuse(module, always=True)
    monkeypatch.setattr(capture._Way, "call", fails)
    for _ in range(CALLS):
        module(*drawn())
    (entry,) = report.left
    assert entry.text.endswith("leaves some of its calls: TorchDynamoException: no such luck")
    monkeypatch.setattr(capture._Way, "call", compiled)
    for _ in range(CALLS):
        module(*drawn(length=T + 1))
    (entry,) = report.fused
    assert "fused, " in entry.text
    assert entry.text.endswith("no such luck")


def test_a_class_of_torch_is_patched(monkeypatch):
    plain = Plain(lambda m, q, k, mask: weigh(m.scores(q, k), k))
    module = copy.deepcopy(plain)
    report = bf.fuse(module, always=True)
    for patched in (False, True, False):
        if patched:
            monkeypatch.setattr(
                nn.Linear, "forward", lambda m, x: 2 * F.linear(x, m.weight, m.bias)
            )
        for seed in range(CALLS):
            same(module(*drawn(seed)), plain(*drawn(seed)))
        monkeypatch.undo()
    assert ran(report) > CALLS


def test_a_model_that_is_deleted_is_gone():
    module = Plain(lambda m, q, k, mask: weigh(m.scores(q, k), k))
    report = bf.fuse(module, always=True)
    for seed in range(CALLS):
        module(*drawn(seed))
    assert ran(report) > 0
    alive = [weakref.ref(parameter) for parameter in module.parameters()]
    del module, report
    gc.collect()
    assert [parameter() for parameter in alive] == [None] * len(alive)


def test_a_choice_is_made_by_time_and_made_again(monkeypatch):
    """Both ways are timed on copies; the row says what each took."""
    module, given = Plain(lambda m, q, k, mask: weigh(m.scores(q, k), k)), drawn(0, 32, 50)
    report = bf.fuse(module)
    for _ in range(CALLS):
        module(*given)
    (entry,) = report.entries
    assert "us as written" in entry.text
    assert "with gradients, (32, 16), (32, 50, 16)" in entry.text
    ((kind,),) = [choice.kinds.values() for choice in module.__dict__["_bahdanau_fast"].choices]
    before, kind.due = kind.times, 0.0
    module(*given)
    assert kind.times is not before


@pytest.mark.parametrize("parts", [False, True])
def test_calls_of_too_many_kinds_run_as_written_and_others_compile_them(parts, monkeypatch, caplog):
    def way(m, q, k, n):
        if parts and float(q.sum()) > 1e9:
            return None
        for _ in range(n):
            k = k.sin()
        return weigh(m.scores(q, k), k)

    monkeypatch.setattr(capture, "_ALWAYS", 4)
    plain, (q, k, _) = Plain(way), drawn()
    module = copy.deepcopy(plain)
    report = bf.fuse(module, always=True)
    for n in range(11):
        same(module(q, k, n), plain(q, k, n))
    assert {entry.text.partition("; ")[2] for entry in report.entries} == {capture._TOO_MANY}
    graphs = []
    with torch._dynamo.config.patch(recompile_limit=2):
        torch.compile(plain, backend=lambda graph, _: graphs.append(graph) or graph)(q, k, 2)
    assert graphs
    assert "recompile_limit" not in caplog.text


def test_others_compile_fused_modules_of_as_many_classes_as_plain_ones():
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            module = type("Own", (Plain,), {})(lambda m, q, k, mask: weigh(m.scores(q, k), k))
            bf.fuse(module)
            torch.compile(module, backend="eager", fullgraph=True)(*drawn())


@pytest.mark.filterwarnings("error")
def test_nothing_is_captured_in_parts_where_warnings_are_errors():
    text = pickle.dumps(2.0)

    def way(m, q, k, mask):
        q = q if float(q.sum()) > 1e9 else q * pickle.loads(text)
        return weigh(m.scores(q, k), k)

    plain = Plain(way)
    module = copy.deepcopy(plain)
    bf.fuse(module, always=True)
    for seed in range(CALLS):
        same(module(*drawn(seed)), plain(*drawn(seed)))


NOTED = []


@torch.library.custom_op("bahdanau_fast_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    """As a collective, which each process has to call as often as the others."""
    NOTED.append(x.shape)
    return x.clone()


noted.register_fake(torch.empty_like)


def test_an_operator_of_others_runs_once_a_call():
    module = Plain(lambda m, q, k, mask: weigh(m.scores(q, k), noted(k)))
    report = bf.fuse(module)
    with torch.no_grad():
        for _ in range(CALLS):
            module(*drawn(0, 32, 50))
    assert len(NOTED) == CALLS
    (entry,) = report.left
    assert entry.text == "runs as written, not timed"


def nodes_of(result, name):
    """Nodes of this name in the graph of a result."""
    found, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [each for each, _ in node.next_functions]
    return [node for node in found if node.name() == name]


@pytest.mark.parametrize("order", [1, -1])
def test_keys_of_scores_alone_are_projected_once_for_steps_with_a_backward_each(order):
    plain = Plain(lambda m, q, k, mask: m.scores(q, k).sin()).double()
    module = copy.deepcopy(plain)
    report = bf.fuse(module, always=True)
    keys = drawn(0, 128, 128)[1].double()
    steps, found = [drawn(seed, 128)[0].double() for seed in range(CALLS)], []
    for query in steps:
        module(query, keys, None)
    assert "softmax not part" in report.fused[0].text
    keys.requires_grad_()
    for each in (plain, module):
        keys.grad = None
        each.zero_grad()
        for _ in range(2):
            losses = [each(query, keys, None).sum() for query in steps]
            projections = nodes_of(sum(losses), "_LinearBackward")
            for loss in losses[::order]:
                loss.backward()
        found.append([keys.grad, *(p.grad for p in each.parameters())])
    assert len(projections) == 1
    torch.testing.assert_close(*found)


def test_a_module_keeps_its_class_while_another_thread_calls_it():
    module = Plain(lambda m, q, k, mask: m.scores(q, k).sin())
    bf.fuse(module)
    record, in_front = record_of(module), type(module)
    inside, go_on = threading.Event(), threading.Event()

    def way(module, own, args, kwargs):
        inside.set()
        go_on.wait(20)
        return own(module, *args, **kwargs)

    record.way = way
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(module, *drawn(0)[:2], None)
        assert inside.wait(20)
        record.leave("", "another thread found so", True)
        module(*drawn(0)[:2], None)
        assert type(module) is in_front  # whose methods the compiler may be reading
        go_on.set()
        other.result()
    assert type(module) is Plain
