"""After one torch.manual_seed the course's modules and ours hold the same weights, lazy or not."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from course import CourseAttention, CourseMLPAttention, inputs
from torch import nn
from torch.nn.parameter import is_lazy

import bahdanau_fast as bf
from bahdanau_fast.seq2seq import (
    EncoderDecoder,
    Seq2SeqAttentionDecoder,
    Seq2SeqDecoder,
    Seq2SeqEncoder,
    init_xavier,
)

SEEDS = pytest.mark.parametrize("seed", [0, 1, 2024])


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def seeded(seed, make, *call):
    """The module, made and called after seeding, and the next random number."""
    torch.manual_seed(seed)
    module = make()
    if call:
        module.eval()(*call)
    return module, torch.rand(1)


def equal(ours, course):
    got, want = ours.state_dict(), course.state_dict()
    assert [name for name in got if name != "bias"] == list(want)
    for name, weight in want.items():
        assert got[name].dtype == weight.dtype
        assert torch.equal(got[name], weight), name


@SEEDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(8,), (2, 20, 8)], ids=["lazy", "sized"])
def test_the_same_weights(sizes, bias, dtype, seed):
    with default_dtype(dtype):
        data = [x.to(dtype) for x in inputs()]
        course, then = seeded(seed, lambda: CourseAttention(*sizes), *data, None)
        ours, next_number = seeded(seed, lambda: bf.AdditiveAttention(*sizes, bias=bias), *data)
    equal(ours, course)
    assert next_number == then  # and what is drawn afterwards is the same too
    torch.testing.assert_close(ours(*data), course(*data, None))  # a bias is zero at first
    with_dtype, _ = seeded(seed, lambda: bf.AdditiveAttention(*sizes, dtype=dtype), *data)
    equal(with_dtype, course)


@SEEDS
@pytest.mark.parametrize("Tk", [10, 300], ids=["small", "large"])
def test_the_size_of_the_first_call_changes_nothing(Tk, seed):
    data = inputs(Tk=Tk)
    course, _ = seeded(seed, lambda: CourseAttention(8), *data, None)
    for backend in ("cpu", "reference"):
        with bf.backends.use(backend):
            equal(seeded(seed, lambda: bf.AdditiveAttention(8), *data)[0], course)


@SEEDS
def test_compiled_before_the_first_call(seed):
    course, _ = seeded(seed, lambda: CourseAttention(8), *inputs(), None)
    torch.manual_seed(seed)
    ours = bf.AdditiveAttention(8)
    torch._dynamo.reset()  # else sizes that other tests have varied are symbols
    got = torch.compile(ours, backend="aot_eager", fullgraph=True)(*inputs())
    equal(ours, course)
    torch.testing.assert_close(got, course(*inputs(), None))


@SEEDS
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_lazy_module_draws_the_same(how, seed):
    course, _ = seeded(seed, lambda: CourseAttention(8), *inputs(), None)
    ours, _ = seeded(seed, lambda: how(bf.AdditiveAttention(8)), *inputs())
    equal(ours, course)


@SEEDS
def test_the_oldest_module(seed):
    course, _ = seeded(seed, lambda: CourseMLPAttention(8, 6))
    equal(seeded(seed, lambda: bf.MLPAttention(8, 6))[0], course)


@SEEDS
def test_a_memory_in_front_of_the_first_call(seed):
    # Documented: the key layer, the scoring layer, then with the first queries the query layer.
    queries, keys, values = inputs()
    torch.manual_seed(seed)
    w_k, w_v, w_q = nn.Linear(2, 8, False), nn.Linear(8, 1, False), nn.Linear(20, 8, False)
    torch.manual_seed(seed)
    ours = bf.AdditiveAttention(8)
    memory = ours.memory(keys, values)
    assert is_lazy(ours.W_q.weight)
    context = ours.attend(queries, memory)
    for layer, like in ((ours.W_k, w_k), (ours.w_v, w_v), (ours.W_q, w_q)):
        assert type(layer) is nn.Linear
        assert torch.equal(layer.weight, like.weight)
    torch.testing.assert_close(context, ours(queries, keys, values))


def test_state_dicts_of_modules_never_called_go_both_ways():
    course, ours = CourseAttention(8), bf.AdditiveAttention(8)
    for source, target in ((course, bf.AdditiveAttention(8)), (ours, CourseAttention(8))):
        target.load_state_dict(source.state_dict(), strict=True)
        assert all(is_lazy(weight) for weight in target.parameters())
        target(*inputs(), None)
        assert [tuple(p.shape) for p in target.parameters()] == [(8, 2), (8, 20), (1, 8)]


def test_loaded_weights_of_other_sizes_are_told():
    ours, sized = bf.AdditiveAttention(8), bf.AdditiveAttention(3, 20, 8)
    ours.load_state_dict(sized.state_dict(), strict=True)
    with pytest.raises(ValueError, match=r"^keys must have feature size 3 \(.*key_size\), got"):
        ours(*inputs())
    queries, keys, values = inputs(key=3)
    torch.testing.assert_close(ours(queries, keys, values), sized(queries, keys, values))


def test_hooks_see_the_first_call_once():
    ours, seen = bf.AdditiveAttention(8), []
    for layer in (ours.W_q, ours.W_k, ours.w_v):
        layer.register_forward_pre_hook(lambda layer, args: seen.append(tuple(args[0].shape)))
    ours(*inputs())
    assert seen[:2].count((2, 3, 20)) == 1
    assert seen[:2].count((2, 10, 2)) == 1
    assert (1, 8) not in seen


# ---- the encoder and the decoder -----------------------------------------------------------------

SIZES = (11, 8, 16, 2)


class CourseEncoder(nn.Module):
    """The layers of the course's encoder, in its order."""

    def __init__(self, vocab_size, embed_size, num_hiddens, num_layers):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = nn.GRU(embed_size, num_hiddens, num_layers)


class CourseDecoder(nn.Module):
    """Likewise its decoder, with attention or without."""

    def __init__(self, vocab_size, embed_size, num_hiddens, num_layers, attends):
        super().__init__()
        if attends:
            self.attention = CourseAttention(num_hiddens, num_hiddens, num_hiddens)
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = nn.GRU(embed_size + num_hiddens, num_hiddens, num_layers)
        self.dense = nn.Linear(num_hiddens, vocab_size)


def xavier(layer):
    """The course's own, for ``net.apply``."""
    if type(layer) is nn.Linear:
        nn.init.xavier_uniform_(layer.weight)
    if type(layer) is nn.GRU:
        for name in layer._flat_weights_names:
            if "weight" in name:
                nn.init.xavier_uniform_(layer._parameters[name])


@SEEDS
@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("applied", [True, False], ids=["xavier", "as made"])
def test_translators(applied, attends, seed):
    decoder = Seq2SeqAttentionDecoder if attends else Seq2SeqDecoder

    def ours():
        net = EncoderDecoder(Seq2SeqEncoder(*SIZES), decoder(*SIZES))
        return net.apply(init_xavier) if applied else net

    def course():
        net = nn.ModuleDict({"encoder": CourseEncoder(*SIZES)})
        net["decoder"] = CourseDecoder(*SIZES, attends)
        return net.apply(xavier) if applied else net

    equal(seeded(seed, ours)[0], seeded(seed, course)[0])
