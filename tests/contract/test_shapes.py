"""Any number of batch dimensions, decoder states, lists as lengths: what a loop over rows gives."""

import copy
import pickle
from itertools import product

import pytest
import torch
from beside import close, with_gradients
from contract import scattered
from thorough import one_of_each
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast import checks
from bahdanau_fast.backends.cpu import TABLE_ELEMENTS

# A memory of so many keys has a node of the graph that its steps share.
B, TQ, TK, D, H, DV = 6, 4, 23, 5, 7, 3
assert B * TK * min(D, H) >= TABLE_ELEMENTS
LENS = torch.tensor([2, 23, 0, 7, 1, 30])


class Function(nn.Module):
    """The function, called as a module; it has no memory."""

    def __init__(self):
        super().__init__()
        self.of = bf.AdditiveAttention(D, D, H, bias=True)

    def forward(self, *inputs, mask=None):
        of = self.of
        given = (*inputs[:3], of.W_q.weight, of.W_k.weight, of.w_v.weight, *inputs[3:])
        context, self.attention_weights = bf.additive_attention(*given, mask=mask, bias=of.bias)
        return context


KINDS = {
    "function": Function,
    "additive": lambda: bf.AdditiveAttention(D, D, H, bias=True),
    "mlp": lambda: bf.MLPAttention(H, D),
    "dot": bf.DotProductAttention,
    "location": lambda: bf.LocationAttention(D, D, H, channels=4, kernel_size=5, inputs=2),
    "coverage": lambda: bf.LocationAttention(D, D, H, channels=None),
}
WITH_MEMORY = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "function"])
EVERY = pytest.mark.parametrize("kind", KINDS)
OF_A_QUERY = ("location", "coverage")  # they take one query at a time
BATCHES = [(), (2, 3), (3, 1, 2)]
LOOKS = {
    "all keys": {},
    "lengths": {"lens": LENS},
    "lengths per query": {"lens": LENS[:, None] + torch.arange(TQ)},
    "a mask": {"mask": scattered(B, TK), "step": scattered(B, 1, TK, seed=1)},
    "a mask per query": {"lens": LENS, "mask": scattered(B, TQ, TK), "step": scattered(B, TK)},
}


def made(kind, look, state=False, batch=(B,)):
    """A module, its inputs by name, lengths and masks among them, in fp64."""
    torch.manual_seed(0)
    module = KINDS[kind]().double()
    queries_len = 1 if state or kind in OF_A_QUERY else TQ
    sizes = {"queries": (queries_len, D), "keys": (TK, D), "values": (TK, DV)}
    if kind in OF_A_QUERY:
        sizes["location"] = (2 if kind == "location" else 1, TK)
    given = {n: torch.rand(B, *size, dtype=torch.float64) for n, size in sizes.items()}
    look = dict(LOOKS[look])
    if "lens" in look and look["lens"].dim() == 2:
        look["lens"] = look["lens"][:, :queries_len]
    if "mask" in look and look["mask"].dim() == 3:
        look["mask"] = look["mask"][:, :queries_len]
    return module, {n: x.unflatten(0, batch) for n, x in {**given, **look}.items()}


def attended(module, given, state=False, steps=2):
    """Contexts and weights of a call and of steps on a memory, and scores, as far as it has."""
    queries, keys, values = (given[name] for name in ("queries", "keys", "values"))
    location = (given["location"],) if "location" in given else ()
    lens, mask = given.get("lens"), given.get("mask")
    found = []

    def step(number):
        return queries.squeeze(-2) + number if state else queries + number

    found += [module(step(0), keys, values, *location, lens, mask=mask), module.attention_weights]
    if hasattr(module, "memory"):
        memory = module.memory(keys, values, lens, mask=mask)
        for number in range(steps):
            found.append(module.attend(step(number), memory, *location, mask=given.get("step")))
            found.append(module.attention_weights)
            if hasattr(module, "scores"):
                found.append(module.scores(step(number), memory, *location))
    return found


def row_by_row(module, given):
    """The same of each row alone, with a batch of one."""
    rows = [attended(module, {n: x[i : i + 1] for n, x in given.items()}) for i in range(B)]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


def asked(given):
    """The same inputs, of which gradients are asked."""
    for tensor in given.values():
        tensor.requires_grad_(tensor.is_floating_point())
    return given


@EVERY
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("state", [False, True], ids=["queries", "a state"])
def test_as_a_loop_over_the_rows(kind, look, batch, state):
    module, given = made(kind, look, state)
    given = asked(given)
    want = row_by_row(module, given)
    if batch:
        got = attended(module, {n: x.unflatten(0, batch) for n, x in given.items()}, state)
    else:
        rows = (attended(module, {n: x[i] for n, x in given.items()}, state) for i in range(B))
        got = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    shaped = [x.squeeze(1) if state else x for x in want]
    close(got, [x.unflatten(0, batch) for x in shaped] if batch else shaped)
    got, want = (with_gradients(results, module, given)[len(got) :] for results in (got, want))
    close(got, want)


@EVERY
@pytest.mark.parametrize("form", ["list", *checks.INTEGER, *checks.FLOATING], ids=str)
def test_lengths_of_every_form(kind, form):
    def formed(lens):
        return lens.tolist() if form == "list" else lens.to(form)

    for batch in ((B,), (2, 3)):
        for look in ("lengths", "lengths per query"):
            module, given = made(kind, look, batch=batch)
            got = attended(module, {**given, "lens": formed(given["lens"])})
            assert all(map(torch.equal, got, attended(module, given)))
    scores = torch.randn(B, TQ, TK)
    assert torch.equal(bf.masked_softmax(scores, formed(LENS)), bf.masked_softmax(scores, LENS))


def test_features_of_any_batch():
    torch.manual_seed(0)
    sizes = (TQ, D), (TK, D), (TK, DV), (TK, 2)
    q, k, v, f = (torch.randn(B, *size).double() for size in sizes)
    w_q, w_k, w_v, w_f = (torch.randn(s).double() for s in ((H, D), (H, D), (H,), (H, 2)))
    options = {"w_f": w_f, "activation": "relu"}

    def call(q, k, v, f):
        results = bf.additive_attention(q, k, v, w_q, w_k, w_v, features=f, **options)
        return *results, bf.additive_scores(q, k, w_q, w_k, w_v, features=f, clip=2.0, **options)

    want = call(q, k, v, f)
    rows = [x.unflatten(0, (2, 3)) for x in (q, k, v, f)]
    torch.testing.assert_close(call(*rows), tuple(x.unflatten(0, (2, 3)) for x in want))
    for i, state in enumerate(rows[0].unbind(2)):
        of_state = tuple(x[:, i].unflatten(0, (2, 3)) for x in want)
        torch.testing.assert_close(call(state, *rows[1:]), of_state)
    without_batch = call(q[1, 2], k[1], v[1], f[1])
    torch.testing.assert_close(without_batch, tuple(x[1, 2] for x in want))


# ---- compiled ------------------------------------------------------------------------------------


@WITH_MEMORY
@pytest.mark.usefixtures("nothing_compiled")
def test_compiled(kind):
    """Of a state, whose graph is the larger one; queries: test_built_in.py."""
    module, given = made(kind, "a mask per query", state=True, batch=(2, 3))
    given = asked(given)
    listed = {**given, "lens": given["lens"].tolist()}
    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    got, want = (
        with_gradients(of(module, listed, state=True), module, given) for of in (compiled, attended)
    )
    close(got, want)


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_once_for_many_sizes():
    module = made("location", "all keys")[0]
    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager", dynamic=True)
    sizes = {"queries": (1, D), "keys": (TK, D), "values": (TK, DV), "location": (2, TK)}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in ((8, 9), (10, 11)):  # unlike other sizes: torch guards equal ones
            given = {n: torch.rand(*batch, *size).double() for n, size in sizes.items()}
            want, got = (call(module, given, steps=1) for call in (attended, compiled))
            close(got, want)


# ---- memories ------------------------------------------------------------------------------------

# Of so many in the first dimension.
ROWS = {
    "slice": lambda n: slice(1, None),
    "slice with a step": lambda n: slice(0, None, 2),
    "list": lambda n: [2, 0, 0],
    "numbers": lambda n: torch.tensor([2, 1]),
    "booleans": lambda n: torch.arange(n) % 2 == 0,
    "none": lambda n: slice(0, 0),
    "empty list": lambda n: [],
    "no booleans": lambda n: torch.zeros(n, dtype=torch.bool),
}


INDEXED = (
    product([kind], ["lengths", "lengths per query", "a mask per query"], [(B,), (3, 2)], [rows])
    for kind in KINDS
    if kind != "function"
    for rows in ROWS
)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("kind", "look", "batch", "rows"), one_of_each(INDEXED))
def test_rows_are_of_the_first_dimension(kind, look, batch, rows, trained):
    module, given = made(kind, look, batch=batch)
    given, index = asked(given), ROWS[rows](batch[0])
    inputs = given["keys"], given["values"], given["lens"]
    location = (given["location"][index],) if "location" in given else ()
    with torch.set_grad_enabled(trained):
        memory = module.memory(*inputs, mask=given.get("mask"))[index]
        got = [module.attend(given["queries"][index], memory, *location)]
        want = attended(module, {n: x[index] for n, x in given.items() if n != "step"})[:1]
    if trained:
        got, want = (with_gradients(results, module, given) for results in (got, want))
    close(got, want)


HOW = {
    "copied": copy.deepcopy,
    "pickled": lambda memory: pickle.loads(pickle.dumps(memory)),
    "detached": lambda memory: memory.detach(),
    "in fp32": lambda memory: memory.to(torch.float32).to(torch.float64),
}


@WITH_MEMORY
@pytest.mark.parametrize("how", HOW)
def test_another_memory_has_the_same_batch_lengths_and_mask(kind, how):
    module, given = made(kind, "a mask per query", batch=(2, 3))
    given = asked(given)
    del given["step"]
    memory = module.memory(given["keys"], given["values"], given["lens"], mask=given["mask"])
    location = (given["location"],) if "location" in given else ()
    other, want = HOW[how](memory), attended(module, given)[0]
    got = module.attend(given["queries"], other, *location)
    # In fp32, projected keys and values of at most 4 are off by 2**-22.
    torch.testing.assert_close(got, want, rtol=0, atol=2**-20)
    assert other.projected.keys.requires_grad == (how == "in fp32")
    if how in ("copied", "pickled"):
        other.values.zero_()
        torch.testing.assert_close(module.attend(given["queries"], memory, *location), want)


def test_what_is_said_of_it():
    module, given = made("additive", "lengths")
    shaped = {n: x.unflatten(0, (2, 3)) for n, x in given.items()}
    memory = module.memory(shaped["keys"], shaped["values"], shaped["lens"])
    assert repr(memory) == (
        "Memory(B=(2, 3), Tk=23, H=7, Dv=3, valid_lens=(6,), dtype=torch.float64, device='cpu')"
    )
    masked = module.memory(given["keys"], mask=torch.ones(B, TK, dtype=torch.bool))
    assert "valid_lens=None, mask=(6, 1, 23)," in repr(masked)
    of_rows = module.explain(given["queries"], module.memory(given["keys"], given["values"]))
    assert module.explain(shaped["queries"], memory) == of_rows
    assert module.explain(shaped["queries"], shaped["keys"], shaped["values"]) == (
        module.explain(given["queries"], given["keys"], given["values"])
    )


# ---- errors --------------------------------------------------------------------------------------

BROADCAST = r"mask must have shape \(2, 3, 23\) or broadcast to .*, got \(6, 23\)"
DIFFER = [
    ("values", (3, 2, TK, DV), r"values must have the batch dimensions of keys, \(2, 3\), got"),
    ("lens", (6,), r"valid_lens must have shape \(2, 3\) or \(2, 3, 1\), got \(6,\)"),
    ("mask", (6, TK), BROADCAST),
    ("step", (6, TK), BROADCAST),
    ("queries", (6, 1, D), r"queries must have the batch dimensions of (the memory|keys), \(2,"),
    ("location", (6, 2, TK), r"location must have shape \(2, 3, [12], 23\), got"),
    ("location", (2, 3, 3, TK), r"location must have shape \(2, 3, [12], 23\), got"),
]
# A call may say another thing of these.
OF_A_MEMORY = [
    ("values", (6, TK, DV), r"batch dimensions of keys, \(2, 3\), got \(6, 23, 3\)"),
    ("values", (2, 3, TK), r"values must have 3 dimensions"),
    ("keys", (TK,), r"keys must have 3 dimensions"),
    ("queries", (2, 3, 1, 1, D), r"\(2, 3\), and one or two more, got \(2, 3, 1, 1, 5\)"),
    ("queries", (2, 3), r"\(2, 3\), and one or two more, got \(2, 3\)"),
]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (kind, wrong)
        for kind, wrong in product(KINDS, DIFFER + OF_A_MEMORY)
        if wrong[0] != "location" or kind in OF_A_QUERY
    ],
    ids=str,
)
def test_batches_that_differ(kind, wrong):
    """In a call, and on a memory."""
    name, shape, message = wrong
    module, given = made(kind, "all keys", state=True, batch=(2, 3))
    tensor = torch.ones(shape, dtype=torch.float64)
    given[name] = tensor > 0 if name in ("mask", "step") else tensor
    queries, *source = (given[name] for name in ("queries", "keys", "values"))
    location = (given["location"],) if "location" in given else ()
    lens, mask, step = (given.get(name) for name in ("lens", "mask", "step"))
    with pytest.raises(ValueError, match=message if wrong in DIFFER else "must have"):
        module(queries, *source, *location, lens, mask=mask if step is None else step)
    if kind != "function":
        with pytest.raises(ValueError, match=message):
            module.attend(queries, module.memory(*source, lens, mask=mask), *location, mask=step)
