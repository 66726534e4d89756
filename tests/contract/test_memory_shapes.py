"""Memories of keys with any number of batch dimensions: what a loop over their rows gives."""

import copy
import pickle

import pytest
import torch
from contract import scattered

import bahdanau_fast as bf

B, TQ, TK, D, H, DV = 6, 4, 13, 5, 7, 3
LENS = torch.tensor([2, 13, 0, 7, 1, 20])
KINDS = {
    "additive": lambda: bf.AdditiveAttention(D, D, H, bias=True),
    "mlp": lambda: bf.MLPAttention(H, D),
    "dot": bf.DotProductAttention,
    "location": lambda: bf.LocationAttention(D, D, H, channels=4, kernel_size=5, inputs=2),
    "coverage": lambda: bf.LocationAttention(D, D, H, channels=None),
}
OF_A_QUERY = ("location", "coverage")  # they take one query at a time
BATCHES = [(2, 3), (3, 1, 2)]
LOOKS = {
    "all keys": {},
    "lengths": {"lens": LENS},
    "lengths per query": {"lens": LENS[:, None] + torch.arange(TQ)},
    "a mask": {"mask": scattered(B, TK), "step": scattered(B, 1, TK, seed=1)},
    "a mask per query": {"lens": LENS, "mask": scattered(B, TQ, TK), "step": scattered(B, TK)},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def made(kind, look, state=False):
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
    return module, {**given, **look}


def attended(module, given, state=False):
    """Contexts and weights of two steps on one memory, and scores where the module has them."""
    memory = module.memory(
        given["keys"], given["values"], given.get("lens"), mask=given.get("mask")
    )
    found = []
    for step in range(2):
        queries = given["queries"] + step
        queries = queries.squeeze(-2) if state else queries
        location = (given["location"],) if "location" in given else ()
        found.append(module.attend(queries, memory, *location, mask=given.get("step")))
        found.append(module.attention_weights)
        if hasattr(module, "scores"):
            found.append(module.scores(queries, memory))
    return found


def row_by_row(module, given):
    """The same of each row alone, with a batch of one."""
    rows = [attended(module, {n: x[i : i + 1] for n, x in given.items()}) for i in range(B)]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


def gradients(results, module, given):
    leaves = [*(x for x in given.values() if x.requires_grad), *module.parameters()]
    return torch.autograd.grad([x.cos().sum() for x in results], leaves, allow_unused=True)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("state", [False, True], ids=["queries", "a state"])
def test_as_a_loop_over_the_rows(kind, look, batch, state):
    module, given = made(kind, look, state)
    for tensor in given.values():
        tensor.requires_grad_(tensor.is_floating_point())
    want = row_by_row(module, given)
    got = attended(module, {n: x.unflatten(0, batch) for n, x in given.items()}, state)
    for ours, exact in zip(got, want, strict=True):
        shaped = (exact.squeeze(1) if state else exact).unflatten(0, batch)
        torch.testing.assert_close(ours, shaped, rtol=1e-10, atol=1e-12)
    of_ours, of_want = (gradients(results, module, given) for results in (got, want))
    for ours, exact in zip(of_ours, of_want, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("state", [False, True], ids=["queries", "a state"])
def test_without_a_batch(kind, look, state):
    module, given = made(kind, look, state)
    want = row_by_row(module, given)
    for row in range(B):
        got = attended(module, {n: x[row] for n, x in given.items()}, state)
        for ours, exact in zip(got, want, strict=True):
            of_row = exact[row].squeeze(0) if state else exact[row]
            torch.testing.assert_close(ours, of_row, rtol=1e-10, atol=1e-12)


def test_a_call_of_a_location_module():
    module, given = made("location", "a mask")
    want = row_by_row(module, given)[0]
    shaped = {n: x.unflatten(0, (2, 3)) for n, x in given.items()}
    inputs = [shaped[name] for name in ("queries", "keys", "values", "location")]
    got = module(*inputs, mask=shaped["mask"] & shaped["step"].squeeze(2))
    torch.testing.assert_close(got.flatten(0, 1), want, rtol=1e-10, atol=1e-12)
    state = module(
        inputs[0].squeeze(2), *inputs[1:], mask=shaped["mask"] & shaped["step"].squeeze(2)
    )
    assert torch.equal(state, got.squeeze(2))


def test_a_list_of_lists_as_lengths(kind):
    module, given = made(kind, "lengths")
    shaped = {n: x.unflatten(0, (2, 3)) for n, x in given.items()}
    want = attended(module, shaped)
    got = attended(module, {**shaped, "lens": LENS.view(2, 3).tolist()})
    assert all(map(torch.equal, got, want))


@pytest.fixture
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh")
def test_compiled(kind):
    module, given = made(kind, "a mask per query")
    given = {n: x.unflatten(0, (2, 3)) for n, x in given.items()}
    for tensor in given.values():
        tensor.requires_grad_(tensor.is_floating_point())
    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    want, got = attended(module, given), compiled(module, given)
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)
    of_ours, of_want = (gradients(results, module, given) for results in (got, want))
    for ours, exact in zip(of_ours, of_want, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("fresh")
def test_compiled_once_for_many_sizes():
    module = made("location", "all keys")[0]
    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager", dynamic=True)
    sizes = {"queries": (1, D), "keys": (TK, D), "values": (TK, DV), "location": (2, TK)}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in ((8, 9), (10, 11)):  # unlike other sizes: torch guards equal ones
            given = {n: torch.rand(*batch, *size).double() for n, size in sizes.items()}
            want, got = attended(module, given), compiled(module, given)
            for ours, exact in zip(got, want, strict=True):
                torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)


ROWS = {
    "slice": slice(1, None),
    "list": [2, 0, 0],
    "booleans": torch.tensor([True, False, True]),
    "none": slice(0, 0),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("look", ["lengths", "a mask per query"])
def test_rows_are_of_the_first_dimension(kind, rows, look):
    module, given = made(kind, look)
    given = {n: x.unflatten(0, (3, 2)) for n, x in given.items()}
    index = ROWS[rows]
    memory = module.memory(given["keys"], given["values"], given["lens"], mask=given.get("mask"))
    location = (given["location"][index],) if "location" in given else ()
    got = module.attend(given["queries"][index], memory[index], *location)
    chosen = {n: x[index] for n, x in given.items() if n != "step"}
    torch.testing.assert_close(got, attended(module, chosen)[0], rtol=1e-10, atol=1e-12)


HOW = {
    "copied": copy.deepcopy,
    "pickled": lambda memory: pickle.loads(pickle.dumps(memory)),
    "detached": lambda memory: memory.detach(),
    "in fp32": lambda memory: memory.to(torch.float32).to(torch.float64),
}


@pytest.mark.parametrize("how", HOW)
def test_another_memory_has_the_same_batch(how):
    module, given = made("additive", "lengths")
    given = {n: x.unflatten(0, (2, 3)) for n, x in given.items()}
    memory = module.memory(given["keys"], given["values"], given["lens"])
    got = module.attend(given["queries"], HOW[how](memory))
    # In fp32, projected keys and values of at most 4 are off by 2**-22.
    torch.testing.assert_close(got, attended(module, given)[0], rtol=0, atol=2**-20)


def test_what_is_said_of_it():
    module, given = made("additive", "lengths")
    shaped = {n: x.unflatten(0, (2, 3)) for n, x in given.items()}
    memory = module.memory(shaped["keys"], shaped["values"], shaped["lens"])
    assert repr(memory) == (
        "Memory(B=(2, 3), Tk=13, H=7, Dv=3, valid_lens=(6,), dtype=torch.float64, device='cpu')"
    )
    of_rows = module.explain(given["queries"], module.memory(given["keys"], given["values"]))
    assert module.explain(shaped["queries"], memory) == of_rows
    assert module.explain(shaped["queries"], shaped["keys"], shaped["values"]) == (
        module.explain(given["queries"], given["keys"], given["values"])
    )


WRONG = [
    ({"values": (3, 2, TK, DV)}, r"values must have the batch dimensions of keys, \(2, 3\), got"),
    ({"values": (6, TK, DV)}, r"batch dimensions of keys, \(2, 3\), got \(6, 13, 3\)"),
    ({"values": (2, 3, TK)}, r"values must have 3 dimensions"),
    ({"keys": (TK,)}, r"keys must have 3 dimensions"),
    ({"lens": (6,)}, r"valid_lens must have shape \(2, 3\) or \(2, 3, 1\), got \(6,\)"),
    ({"mask": (6, TK)}, r"mask must have shape \(2, 3, 13\) or \(2, 3, 1, 13\), got \(6, 13\)"),
    ({"queries": (6, 1, D)}, r"queries must have the batch dimensions of the memory, \(2, 3\)"),
    ({"queries": (2, 3, 1, 1, D)}, r"\(2, 3\), and one or two more, got \(2, 3, 1, 1, 5\)"),
    ({"queries": (2, 3)}, r"\(2, 3\), and one or two more, got \(2, 3\)"),
    ({"step": (6, TK)}, r"mask must have shape \(2, 3, 13\) or \(2, 3, 1, 13\), got \(6, 13\)"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_errors(kind, wrong, message):
    module, given = made(kind, "all keys", state=True)
    given = {n: x.unflatten(0, (2, 3)) for n, x in given.items()}
    for name, shape in wrong.items():
        tensor = torch.ones(shape, dtype=torch.float64)
        given[name] = tensor > 0 if name in ("mask", "step") else tensor
    with pytest.raises(ValueError, match=message):
        attended(module, given)


@pytest.mark.parametrize("location", [(6, 2, TK), (2, 3, 1, TK), (2, 3, TK)])
def test_a_location_that_does_not_fit(location):
    module, given = made("location", "all keys")
    given = {n: x.unflatten(0, (2, 3)) for n, x in given.items()}
    given["location"] = torch.ones(location, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"location must have shape \(2, 3, 2, 13\), got"):
        attended(module, given)


def test_rows_of_a_memory_without_a_batch():
    module, given = made("additive", "all keys")
    memory = module.memory(given["keys"][0])
    with pytest.raises(ValueError, match="memory must have a batch dimension to be indexed"):
        memory[[0]]


def test_recurrent_layers_take_one_batch_dimension():
    layer = bf.AttentionGRU(2, D)
    keys = torch.zeros(2, 3, TK, D)
    with pytest.raises(ValueError, match=r"keys must have one batch dimension, got \(2, 3\)"):
        layer(torch.zeros(4, 6, 2), keys=keys)
