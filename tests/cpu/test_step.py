"""A step on a memory that projects its own queries: where it is taken, and what it gives."""

import parity
import pytest
import torch
from beside import close
from parity import DTYPES
from targets import without_gradients

import bahdanau_fast as bf
from bahdanau_fast.call import Call
from bahdanau_fast.ops.attention import attention

ops = torch.ops.bahdanau_fast
# (B, Tq, Tk, Dq, H): one row and a few, columns on either side of what a thread takes at once.
SIZES = [
    (1, 1, 1, 1, 1), (1, 1, 40, 512, 512), (1, 1, 9, 7, 63), (1, 1, 9, 130, 65),
    (4, 1, 30, 33, 200), (2, 3, 17, 16, 128), (64, 1, 10, 32, 32), (3, 2, 5, 8, 5),
    (0, 1, 4, 3, 2), (2, 0, 4, 3, 2), (2, 1, 0, 3, 2),
]  # fmt: skip


def drawn(size, dtype, seed=0):
    B, Tq, Tk, Dq, H = size
    generator = torch.Generator().manual_seed(seed)
    module = bf.AdditiveAttention(6, Dq, H, dtype=dtype).requires_grad_(False)
    shapes = (B, Tq, Dq), (B, Tk, 6), (B, Tk, 3)
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return module, q, k, v


@pytest.fixture
def taken(monkeypatch):
    """How often the operator was called that projects queries, and keeps nothing."""
    calls, plain = [], attention.now
    place = attention.names.index("w_q")

    def spy(*given):
        calls.extend([1] if given[place] is not None else [])
        return plain(*given)

    monkeypatch.setattr(attention, "now", spy)
    return calls


stepped, once = map(without_gradients, (parity.attended, parity.called))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_parity(size, dtype, taken):
    B, Tq, Tk, Dq, H = size
    by_row = torch.arange(B) % (Tk + 2)
    by_query = torch.arange(B * Tq).reshape(B, Tq) % (Tk + 2)
    for lens in (None, by_row, by_query):
        case = parity.Case(B, Tq, Tk, H, Dq, lens=lens, grads="context", bias=False)
        parity.check(case, dtype, stepped)
    assert taken


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 10.0, 1e3, 1e4])
def test_magnitudes(scale, taken):
    case = parity.Case(2, 1, 50, 80, 96, scale={"queries": scale, "keys": scale})
    parity.check(case, torch.float32, stepped)
    assert taken


# Calls without a memory, too large for one operator and small enough for fp64 where gradients may
# be asked for: without those their table is in fp32 from 16384 elements of keys on.
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize(
    "size", [(8, 1, 100, 64), (2, 3, 130, 64), (64, 1, 9, 64), (1, 1, 255, 64), (2, 15, 20, 500)]
)
def test_a_table_in_fp32_without_gradients(size, scale):
    B, Tq, Tk, H = size
    lens = torch.arange(B) * Tk // B
    case = parity.Case(B, Tq, Tk, H, 60, 70, lens=lens, scale={"queries": scale, "keys": scale})
    parity.check(case, torch.float32, once)


def test_rows_are_what_they_are_alone_and_for_any_number_of_threads(threads):
    module, q, k, v = drawn((8, 1, 30, 512, 512), torch.float32)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(module.attend(q, module.memory(k, v)))
    alone = [module.attend(q[i : i + 1], module.memory(k[i : i + 1], v[i : i + 1])) for i in (0, 7)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for i, row in zip((0, 7), alone, strict=True):
        close(found[0][i : i + 1], row)


def test_strided_queries_and_weights():
    module, q, k, v = drawn((3, 2, 11, 24, 40), torch.float32)
    memory = module.memory(k, v)
    want = module.attend(q, memory)
    wide = torch.full((3, 2, 48), float("nan"))
    wide[..., ::2] = q
    assert torch.equal(module.attend(wide[..., ::2], memory), want)
    turned = module.W_q.weight.detach().t().contiguous().t()
    module.W_q.weight = torch.nn.Parameter(turned, requires_grad=False)
    assert torch.equal(module.attend(q, memory), want)


def test_where_it_is_taken(taken):
    module, q, k, v = drawn((2, 1, 20, 32, 32), torch.float32)
    memory = module.memory(k, v)
    module.attend(q, memory)
    assert len(taken) == 1

    def untaken():
        taken.clear()
        module.attend(q, memory)
        return not taken

    for name in ("W_q", "w_v"):
        layer = getattr(module, name)
        layer.weight.requires_grad_(True)
        assert untaken()
        with torch.no_grad():
            assert not untaken()
        layer.weight.requires_grad_(False)
    module.dropout.p = 0.5
    assert untaken()
    module.eval()
    assert not untaken()
    hook = module.W_q.register_forward_hook(lambda _, inputs, output: 2 * output)
    assert untaken()
    hook.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert untaken()  # though the memory is from outside
    with bf.backends.use("reference"):
        assert untaken()
    for batch, form in ((8, "step"), (9, "projected")):
        queries, keys = torch.ones(batch, 1, 4096), torch.ones(batch, 2, 4096)
        w_q, w_v = torch.ones(1, 4096).expand(4096, 4096), torch.ones(1, 4096)
        assert bf.backends.decide(Call(queries, keys, keys, w_v, w_q)).form == form


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operator_gives_the_same_bits_with_and_without_gradients(dtype, bias):
    for size in SIZES:
        module, q, k, v = drawn(size, dtype)
        w_q, w_k, w_v = module.W_q.weight, module.W_k.weight, module.w_v.weight
        own = torch.linspace(-1, 1, size[-1], dtype=dtype) if bias else None
        options = {"w_q": w_q, "w_k": w_k, "bias": own, "valid_lens": torch.arange(size[0])}
        want = ops.attention.recorded(q, k, v, w_v, **options)
        found = ops.attention(q, k, v, w_v, **options, precise=False)
        assert all(map(torch.equal, found, want))
        narrow = ops.attention(q, k, v, w_v, **options, precise=False, narrow=True)
        assert torch.equal(narrow[1], want[1].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_small_call_gives_the_same_bits_with_and_without_gradients(dtype, taken):
    module, q, k, v = drawn((2, 1, 10, 8, 8), dtype)
    lens = torch.tensor([2, 6])
    with torch.no_grad():
        without = module(q, k, v, lens), module.attention_weights
    assert len(taken) == 1
    module.requires_grad_(True)
    context = module(q, k, v, lens)
    assert len(taken) == 1
    assert torch.equal(context, without[0])
    assert torch.equal(module.attention_weights, without[1])
    with torch.no_grad():
        module.dropout.p = 1.0
        assert not module(q, k, v, lens).any()
    assert len(taken) == 2
