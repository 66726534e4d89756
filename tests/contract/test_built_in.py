"""Each module is to PyTorch what a built-in one is: a table of modules by what is done to them."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from beside import as_exact, results, same
from contract import scattered
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

import bahdanau_fast as bf
from bahdanau_fast.ops import pool_in_chunks

B, T, TK, D, H = 3, 4, 37, 6, 8
LENS, MASK = torch.tensor([37, 0, 12]), scattered(B, TK)
QUERY_MASK = scattered(B, T, seed=5, share=0.6)


class Functions(nn.Module):
    """Both functions, with all that is inside a score."""

    def __init__(self):
        super().__init__()
        self.of, self.w_f = bf.AdditiveAttention(D, D, H, bias=True), nn.Linear(2, H)

    def forward(self, queries, keys, features, lens):
        of = self.of
        inside = {"w_q": of.W_q.weight, "w_k": of.W_k.weight, "w_v": of.w_v.weight}
        inside |= {"features": features, "w_f": self.w_f.weight, "bias": of.bias}
        inside |= {"queries": queries, "keys": keys}
        mask = torch.arange(TK) % 3 != lens.unsqueeze(1) % 3
        look = {"valid_lens": lens, "mask": mask, "activation": "relu"}
        attended = bf.additive_attention(values=keys, **inside, **look)
        layers = of.W_q.weight, of.W_k.weight, of.w_v.weight
        usual = bf.additive_attention(queries, keys, keys, *layers, lens)
        return *attended, *usual, bf.additive_scores(**inside, clip=10.0)


def drawn(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


Q, K, V, X = drawn(B, T, D), drawn(B, TK, D, seed=2), drawn(B, TK, 5, seed=3), drawn(T, B, 2)


def additive(activation="tanh", slope=0.01, **options):
    inside = {"bias": True, "activation": activation, "negative_slope": slope}
    return lambda: bf.AdditiveAttention(D, D, H, **inside), (Q, K, V), options


def location(inputs=1, **options):
    sizes = {"channels": 4, "kernel_size": 7, "inputs": inputs, **options}
    where = drawn(B, inputs, TK, seed=4).softmax(2)
    args = (Q[:, :1], K, V, where, LENS)
    return lambda: bf.LocationAttention(D, D, H, **sizes), args, {"mask": MASK}


def pooled(**form):
    return lambda: bf.AttentionPooling(D, H, **form), (K, LENS), {"mask": MASK}


def recurrent(cls=bf.AttentionGRU, layers=1, **options):
    make = lambda: cls(2, H, layers, key_size=D, value_size=5, **options)  # noqa: E731
    return make, (X,), {"keys": K, "values": V, "valid_lens": LENS}


#: How it is made, and what it is called with.
MODULES = {
    "functions": (Functions, (Q, K, drawn(B, TK, 2), LENS), {}),
    "additive": additive(valid_lens=LENS),
    "causal": additive(causal=True),
    "causal with a mask": additive(causal=True, mask=MASK, valid_lens=LENS),
    "query_mask": additive(query_mask=QUERY_MASK, valid_lens=LENS),
    "queries of all rows": (additive()[0], (Q[:1], K, V, LENS), {"mask": MASK}),
    "scale": additive(scale=-1.7, mask=scattered(T, TK)),
    "all options": additive(causal=True, query_mask=QUERY_MASK, scale=0.3),
    **{name: additive(name, 0.3) for name in ("relu", "leaky_relu", "sigmoid")},
    "mlp": (lambda: bf.MLPAttention(H, D), (Q, K, V, LENS), {}),
    "dot": (bf.DotProductAttention, (Q, K, V, LENS), {}),
    "location": location(),
    "two channels": location(2),
    "coverage": location(channels=None),
    "gated pooling": pooled(gated=True),
    "pooling of heads": pooled(heads=2, statistics=True),
    "gru": recurrent(),
    "lstm": recurrent(bf.AttentionLSTM, 2),
    "attention after": recurrent(attention_first=False),
    "attention after, not fed": recurrent(
        bf.AttentionLSTM, 2, attention_first=False, input_feeding=False
    ),
    "recurrent location": recurrent(location={"channels": 3, "kernel_size": 5, "inputs": 2}),
}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch, nothing_compiled):
    """Poolings in chunks have several, and nothing is compiled yet."""
    for name, size in {"PLAIN": 0, "CHUNK": 16 * H, "REMEMBERED": 0}.items():
        monkeypatch.setattr(pool_in_chunks, name, size)


class Row:
    """A module, and its call."""

    def __init__(self, name, dtype=torch.float64):
        def own(x):
            return x.to(dtype, copy=True).requires_grad_() if x.is_floating_point() else x

        torch.manual_seed(0)
        self.make, *given = MODULES[name]
        self.module = self.make().to(dtype)
        for parameter in self.module.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.args, self.options = tree_map_only(torch.Tensor, own, given)
        given = *self.args, *self.options.values()
        self.leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]

    def call(self, module=None):
        """What a module gives, and its weights."""
        module = self.module if module is None else module
        return module(*self.args, **self.options), getattr(module, "attention_weights", None)

    def others(self):
        """Other arguments by place, of the same shapes."""
        return tree_map_only(torch.Tensor, lambda x: x.flip(0), self.args)

    def outcome(self, module=None):
        """That, and gradients."""
        module = self.module if module is None else module
        return results(lambda: self.call(module), self.leaves, module)


class Bound(nn.Module):
    """A module that takes tensors by their places alone."""

    def __init__(self, row):
        super().__init__()
        self.module = row.module
        self.options = tree_map_only(torch.Tensor, torch.Tensor.detach, row.options)

    def forward(self, *args):
        return self.module(*args, **self.options)


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def copied(row):
    row.call()
    loaded = row.make().double()
    loaded.load_state_dict(row.module.state_dict())
    twins = copy.deepcopy(row.module), pickle.loads(pickle.dumps(row.module)), saved(row.module)
    for twin in twins if hasattr(loaded, "attention_weights") else ():
        assert torch.equal(twin.attention_weights, row.module.attention_weights)
    want = row.outcome()
    for twin in (*twins, loaded):
        same(row.outcome(twin), want, 0.0)
        for parameter in twin.parameters():
            parameter.data.zero_()
    same(row.outcome(), want, 0.0)


def compiled(row):
    # Dynamo takes no recurrent layer as a part of a graph.
    how = {"fullgraph": not hasattr(row.module, "rnn")}
    how["backend"] = "inductor" if isinstance(row.module, Functions) else "aot_eager"
    want = row.outcome()
    same(row.outcome(torch.compile(row.module, **how)), want)


def exported(row):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "The tensor attributes self.rnn._flat")  # torch's own
        program = torch.export.export(row.module, tuple(row.args), row.options).module()
    for args in row.args, row.others():
        same(program(*args, **row.options), row.module(*args, **row.options))


def traced(row):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that become constants
        program = torch.jit.trace(Bound(row), tuple(row.args), check_trace=False)
    for args in row.args, row.others():
        same(program(*args), row.module(*args, **row.options))


def transformed(row):
    """By vmap, grad, vmap of grad and forward mode, of the first input."""
    first, *rest = row.args

    def loss(first):
        found = tree_leaves(row.module(first, *rest, **row.options))
        return sum(x.square().sum() for x in found)

    (exact,) = torch.autograd.grad(loss(first), first)
    first = first.detach()
    grad, two = torch.func.grad(loss), torch.stack([first, first + 1])
    _, tangent = torch.func.jvp(loss, (first,), (first,))
    got = [grad(first), tangent, torch.vmap(loss)(two), torch.vmap(grad)(two)[0]]
    torch.testing.assert_close(
        got, [exact, (exact * first).sum(), torch.stack([*map(loss, two)]), exact]
    )


def written(row):
    """Into all results in place: each changes once, and backward is there but through weights."""
    for enabled in False, True:
        with torch.set_grad_enabled(enabled):
            want, got = (tree_leaves(row.module(*row.args, **row.options)) for _ in range(2))
            for x in got:
                x.mul_(3)
        same(got, [3 * x for x in want], 0.0)
    if not isinstance(row.module, Functions):
        sum(x.sum() for x in got).backward()


RECURRENT = [name for name in MODULES if MODULES[name][1][0] is X]  # torch has no vmap of these
CASES = [
    (claim, name)
    for claim in (copied, compiled, exported, traced, transformed, written)
    for name in MODULES
    if claim is not transformed or name not in RECURRENT
]


@pytest.mark.parametrize(("claim", "name"), CASES, ids=[f"{c.__name__}-{n}" for c, n in CASES])
def test_claims(claim, name):
    claim(Row(name))


# Poolings under autocast: tests/modules/test_pooling.py.
@pytest.mark.parametrize("name", [name for name in MODULES if "pooling" not in name])
def test_under_autocast(name):
    """Results and gradients, of parameters in fp32, keep the parity rule in bf16."""
    row, double = Row(name, torch.float32), Row(name)
    double.module.load_state_dict(row.module.state_dict())
    for x, like in zip(double.leaves, row.leaves, strict=True):
        x.data.copy_(like.data)
    exact = double.outcome()
    with torch.autocast("cpu", torch.bfloat16):
        ours = row.outcome()
        with bf.backends.use("reference"):
            eager = row.outcome()
    assert ours[0][0].dtype == torch.bfloat16 or name in RECURRENT  # as torch's own: as their state
    there = [[x for x in tree_leaves(found) if x is not None] for found in (ours, eager, exact)]
    as_exact(*there, torch.bfloat16)
