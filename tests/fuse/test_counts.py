"""What is counted in one call holds in others only where it is a constant of the module.

A form is one of each of ``WAYS``. Many of them count by their data: vectors, queries, heads,
repetitions, parts of what is joined, or a number that scores are multiplied by.
"""

import copy
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from beside import ran, results, same
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast.fuse.compiling import fuse_graph

D, H, MOST = 6, 16, 8
# Batch, keys and candidates of calls; these divide the hidden axis.
SIZES = (2, 5, 4), (8, 9, 2), (20, 23, 8)
TOGETHER = 10  # forms in a module
GROUPS = {"eager": 11, "graph": 3, "dynamic graph": 4, "export": 2}


def context(x, k):
    return x.view(*k.shape[:2], -1).softmax(1).mT @ k if x.shape[:2] == k.shape[:2] else x


SUMS = {
    "joined": lambda m, q, k, c: m.J(torch.cat([q[:, None].expand(-1, k.size(1), -1), k], -1)),
    "parts": lambda m, q, k, c: (
        m.P(torch.cat([q] * len(c) + [-q] * (MOST - len(c)), 1))[:, None] + m.U(k)
    ),
    "heads": lambda m, q, k, c: (m.W(q)[:, None] + m.U(k)).unflatten(2, (len(c), -1)),
    "halves": lambda m, q, k, c: (m.W(q).view(2, -1, 1, H) + m.U(k).unflatten(0, (2, -1))).flatten(
        0, 1
    ),
    "both": lambda m, q, k, c: m.W(q).unsqueeze(1) + m.U(k),
    "alike": lambda m, q, k, c: m.W(q).unsqueeze(1).expand_as(m.G(k)) + m.U(k),
    "queries": lambda m, q, k, c: m.C(c).unsqueeze(1) + m.U(k).unsqueeze(1),
    "repeated": lambda m, q, k, c: m.W(q).repeat(1, k.size(1)).view(len(q), -1, H) + m.U(k),
    "picked": lambda m, q, k, c: m.W(q).unsqueeze(1) + m.U(k)[:, : len(c)],
    "scaled": lambda m, q, k, c: len(c) * m.W(q).unsqueeze(1) + m.U(k),
}
SCORES = {
    "vector": lambda m, x, q, c: x @ m.v,
    "linear": lambda m, x, q, c: m.V(x).squeeze(-1),
    "some": lambda m, x, q, c: x @ m.e[:3].t(),
    "one of": lambda m, x, q, c: x @ m.e[len(c) - 1],
    "of a sample": lambda m, x, q, c: x.flatten(1, -2).bmm(m.G(q).unsqueeze(2)).squeeze(2),
    "summed": lambda m, x, q, c: (x.flatten(1, -2) * m.G(q)[:, None]).sum(-1),
    "of a candidate": lambda m, x, q, c: x @ m.C(c).t(),
    "given": lambda m, x, q, c: x @ c.t(),
    "slice": lambda m, x, q, c: x @ m.e[: len(c)].t(),
}
AFTER = {
    "none": lambda x, k, c: x,
    "halved": lambda x, k, c: x / 2,
    "by keys": lambda x, k, c: x / k.size(1),
    "by number": lambda x, k, c: x * len(c),
}
WEIGH = {
    "scores": lambda x, k: x,
    "last": lambda x, k: torch.softmax(x, -1),
    "old": lambda x, k: F.softmax(x),
    "first": lambda x, k: torch.softmax(x, 1),
    "masked": lambda x, k: x.masked_fill(x.detach() < 0, -1e9).softmax(-1),
    "context": context,
}
WAYS = SUMS, SCORES, AFTER, WEIGH
NAMED = [
    ("both", "of a sample", "none", "context"),
    ("both", "given", "none", "last"),
    ("both", "of a candidate", "none", "scores"),
    ("both", "slice", "none", "first"),
    ("both", "vector", "by keys", "context"),
    ("alike", "linear", "halved", "context"),
    ("joined", "vector", "none", "old"),
]


class Form(nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.ways = [ways[name] for ways, name in zip(WAYS, names, strict=True)]
        self.W, self.U, self.G = (nn.Linear(D, H) for _ in range(3))
        self.J, self.P = nn.Linear(2 * D, H), nn.Linear(MOST * D, H)
        self.C, self.V = nn.Linear(H, H), nn.Linear(H, 1)
        self.v, self.e = nn.Parameter(torch.randn(H)), nn.Parameter(torch.randn(MOST, H))

    def forward(self, q, k, c):
        add, score, after, weigh = self.ways
        x = torch.tanh(add(self, q, k, c))
        scores = score(self, x, q, c) if x.size(-1) == H else (x * self.v.view(len(c), -1)).sum(-1)
        return weigh(after(scores, k, c), k)


class Forms(nn.ModuleList):
    def forward(self, *given):
        return [form(*given) for form in self]


# The forms with names, and the first group of those that are drawn; the others with thorough.
CASES = [
    pytest.param(by, seed, marks=pytest.mark.thorough if seed > 1 else ())
    for by, n in GROUPS.items()
    for seed in range(n + 1)
]
CASES.append(pytest.param("backend", 0, marks=pytest.mark.thorough))


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize(("by", "seed"), CASES)
def test_a_form_computes_the_same_at_all_sizes(by, seed):
    torch.compiler.reset()
    torch.manual_seed(seed)
    drawn, operators = random.Random(f"{by} {seed}"), []
    forms = [[drawn.choice([*ways]) for ways in WAYS] for _ in range(TOGETHER)] if seed else NAMED
    # Parts make their number a constant of a whole graph, and halves a batch of two, which is
    # compiled again then.
    fixed = ("parts", "halves")
    apart = ([Form(*x) for x in forms if (x[0] in fixed) == alone] for alone in (True, False))
    plain = Forms(map(Forms, apart)).double()
    call = module = copy.deepcopy(plain)

    def rewritten(graph, given):
        made = fuse_graph(graph, given)
        operators.extend(n for n in made.graph.nodes if "bahdanau_fast" in str(n.target))
        return made

    report = bf.fuse(module, always=True) if by in ("eager", "export") else None
    if report is None:
        backend = "bahdanau_fast" if by == "backend" else rewritten
        for part in module:
            part.compile(backend=backend, dynamic=by == "dynamic graph" or None)
    for batch, keys, candidates in SIZES:
        shapes = (batch, D), (batch, keys, D), (candidates, H)
        given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
        want = results(partial(plain, *given), given, plain)
        if by == "export":
            call = torch.export.export(module, tuple(given)).module()
        for _ in range(3 if by == "eager" else 1):  # the third call of a kind is fused
            same(results(partial(call, *given), given, call), want)
    if by == "eager":
        assert ran(report) > 0
    elif report is None and by != "backend":
        assert operators
