"""Bad input is an error that names the argument, what it must be and what it got."""

import re
from functools import partial

import pytest
import torch
from contract import scattered
from decoders import CELLS, DK, DV, LENS, TK, B, E, H, T, layer
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import bahdanau_fast as bf
from bahdanau_fast import losses

SAID = re.compile(r"^[\w. ]+ must .+, got .+", re.DOTALL)
ones = torch.ones


def good():
    return {
        "queries": torch.randn(2, 3, 4),
        "keys": torch.randn(2, 5, 6),
        "values": torch.randn(2, 5, 7),
        "w_q": torch.randn(8, 4),
        "w_k": torch.randn(8, 6),
        "w_v": torch.randn(1, 8),
        "valid_lens": None,
    }


# ---- the function --------------------------------------------------------------------------------

# argument, what it is set to, error, words of the message
BAD = [
    ("queries", ones(3, 4), ValueError, "batch dimensions of keys"),
    ("queries", ones(3, 2, 4), ValueError, r"keys, 2, got \(3, 2, 4\): .* is hidden\[-1\]$"),
    ("queries", ones(1, 2, 3, 4), ValueError, "3 dimensions"),
    ("keys", ones(5, 6), ValueError, "3 dimensions"),
    ("values", ones(2, 5), ValueError, "3 dimensions"),
    ("values", torch.tensor(1.0), ValueError, "3 dimensions"),
    ("keys", ones(4, 5, 6), ValueError, r"batch size of queries, 2, got \(4, 5, 6\)$"),
    ("values", ones(3, 5, 7), ValueError, "batch size and length of keys"),
    ("values", ones(2, 4, 7), ValueError, "batch size and length of keys"),
    ("w_q", ones(8, 5), ValueError, r"shape \(8, 4\)"),
    ("w_q", ones(7, 4), ValueError, r"shape \(8, 4\)"),
    ("w_k", ones(8, 4), ValueError, r"shape \(8, 6\)"),
    ("w_k", ones(8, 6, 1), ValueError, r"shape \(8, 6\)"),
    ("w_v", ones(2, 8), ValueError, r"shape \(1, 8\), got \(2, 8\)$"),
    ("w_v", ones(1, 1, 8), ValueError, r"shape \(1, 8\), got \(1, 1, 8\)$"),
    ("w_v", torch.tensor(1.0), ValueError, r"shape \(1, 8\), got \(\)$"),
    ("bias", ones(7), ValueError, r"shape \(8,\)"),
    ("bias", ones(1, 8), ValueError, r"shape \(8,\)"),
    ("valid_lens", ones(3), ValueError, r"shape \(2,\) or \(2, 3\)"),
    ("valid_lens", ones(2, 4), ValueError, r"shape \(2,\) or \(2, 3\)"),
    ("valid_lens", ones(2, 1), ValueError, r"shape \(2,\) or \(2, 3\)"),
    ("valid_lens", ones(2, 3, 1), ValueError, r"shape \(2,\) or \(2, 3\)"),
    ("valid_lens", torch.tensor(3), ValueError, r"shape \(2,\) or \(2, 3\)"),
    ("valid_lens", ones(2, dtype=torch.bool), TypeError, "mask=.*, got torch.bool"),
    ("valid_lens", ones(2, 5, dtype=torch.bool), TypeError, "mask=.*, got torch.bool"),
    ("valid_lens", ones(2, 3, 5, dtype=torch.bool), TypeError, "mask=.*, got torch.bool"),
    ("valid_lens", [True, False], TypeError, "mask=.*, got torch.bool"),
    ("valid_lens", ones(2, dtype=torch.complex64), TypeError, "torch.complex64"),
    ("valid_lens", ones(2).to(torch.float8_e5m2), TypeError, "integer dtype or .*float8"),
    ("valid_lens", [1, 2, 3], ValueError, r"shape \(2,\) or \(2, 3\)"),
    ("valid_lens", ["1", "2"], TypeError, r"list of numbers, got \['1', '2'\]"),
    ("mask", ones(2, 5), TypeError, r"\(mask == 0 for a float mask .*, got torch.float32$"),
    ("mask", ones(2, 3, 5, dtype=torch.uint8), TypeError, "bool, .*got torch.uint8"),
    ("mask", [[True] * 5] * 2, TypeError, "a tensor, got list"),
    ("mask", ones(2) > 0, ValueError, r"shape \(2, 5\) or broadcast to \(2, 3, 5\), got \(2,\)"),
    ("mask", ones(2, 3) > 0, ValueError, r"or broadcast to \(2, 3, 5\), got \(2, 3\)"),
    ("mask", ones(2, 1) > 0, ValueError, r"or broadcast to \(2, 3, 5\), got \(2, 1\)"),
    ("mask", ones(2, 2, 5) > 0, ValueError, r"or broadcast to \(2, 3, 5\), got \(2, 2, 5\)"),
    ("mask", ones(1, 1, 3, 5) > 0, ValueError, r"or broadcast to \(2, 3, 5\)"),
    ("mask", ones(2, 5, dtype=torch.bool, device="meta"), ValueError, "device of the data"),
    ("valid_lens", 3, TypeError, "None, a tensor or a list of numbers, got int"),
    ("valid_lens", ones(2, device="meta"), ValueError, "device"),
    ("dropout_p", -0.1, ValueError, "between 0 and 1, got -0.1"),
    ("dropout_p", 1.1, ValueError, "between 0 and 1, got 1.1"),
    ("dropout_p", float("nan"), ValueError, "between 0 and 1, got nan"),
    ("dropout_p", "0.1", TypeError, "number, got str"),
    ("dropout_p", None, TypeError, "number, got NoneType"),
    ("dropout_p", True, TypeError, "number, got bool"),
    ("backend", "cudnn", ValueError, "'auto', 'cuda', 'triton', 'cpu', 'reference', got 'cudnn'"),
]  # fmt: skip
TENSORS = ("queries", "keys", "values", "w_q", "w_k", "w_v", "bias")
for _name in TENSORS:
    BAD += [
        (_name, kind, TypeError, "float32, bfloat16, float16 or float64, got torch.")
        for kind in (torch.complex64, torch.int64, torch.bool, torch.uint8)
    ]
    BAD += [
        (_name, [1.0], TypeError, "a tensor, got list"),
        (_name, "sparse", TypeError, "dense"),
        (_name, torch.float64, TypeError, r"dtype of|torch.float64"),
        (_name, torch.float16, TypeError, r"dtype of|torch.float16"),
        (_name, "meta", ValueError, "device of"),
    ]
BAD += [
    ("w_q", None, ValueError, r"feature size 8 \(that of w_v\) where w_q is None, got \(2, 3, 4\)"),
    ("w_k", None, ValueError, r"feature size 8 \(that of w_v\) where w_k is None, got \(2, 5, 6\)"),
]
BAD += [(name, None, TypeError, "a tensor, got NoneType") for name in ("queries", "keys", "w_v")]


SPOILT = {"sparse": torch.Tensor.to_sparse, "meta": lambda x: x.to("meta"), "flat": lambda x: x[0]}


def spoil(value, was):
    if isinstance(value, torch.dtype):
        return was.to(value)
    return SPOILT[value](was) if isinstance(value, str) and value in SPOILT else value


def said(call, error, words):
    """The message of the error that a call raises."""
    with pytest.raises(error, match=words or None) as raised:
        call()
    assert SAID.match(str(raised.value)), str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("number", range(len(BAD)), ids=lambda n: f"{n}-{BAD[n][0]}")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_function(number, backend):
    name, value, error, words = BAD[number]
    arguments = {"backend": backend, "bias": ones(8), **good()}
    arguments[name] = spoil(value, arguments.get(name))
    text = said(partial(bf.additive_attention, **arguments), error, words)
    # A wrong first tensor is told as itself or as what the next must be like.
    told = text.startswith(name) or f"of {name}" in text or f"where {name}" in text
    assert told or name in ("queries", "w_v"), text


INSIDE = [
    ({"features": ones(2, 5)}, ValueError, "features must have 3 dimensions"),
    ({"features": ones(2, 4, 3)}, ValueError, r"length of keys, \(2, 5\), got \(2, 4, 3\)"),
    ({"features": ones(2, 5, 3).double()}, TypeError, "features must have the dtype of keys"),
    ({"features": [1]}, TypeError, "features must be a tensor, got list"),
    ({"w_f": None}, ValueError, "w_f must be given with features, got None"),
    ({"features": None}, ValueError, "w_f must be given with features only"),
    ({"w_f": ones(8, 4)}, ValueError, r"w_f must have shape \(8, 3\), got \(8, 4\)"),
    ({"activation": "gelu"}, ValueError, "activation must be one of 'tanh', 'relu', 'leaky_relu'"),
    ({"activation": None}, ValueError, "activation must be one of"),
    ({"activation": "relu", "negative_slope": "0"}, TypeError, "negative_slope must be a number"),
    ({"activation": "relu", "negative_slope": float("nan")}, ValueError, "must be finite, got nan"),
    ({"clip": float("inf")}, ValueError, "clip must be finite, got inf"),
    ({"clip": True}, TypeError, "clip must be a number, got bool"),
    ({"queries": ones(1, 2, 3, 4)}, ValueError, "queries must have 3 dimensions"),
    ({"w_q": ones(8, 5)}, ValueError, r"w_q must have shape \(8, 4\)"),
    ({"w_q": None}, ValueError, r"queries must have feature size 8 .*, got \(2, 3, 4\)"),
    ({"w_k": None}, ValueError, r"keys must have feature size 8 .*, got \(2, 5, 6\)"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), INSIDE)
def test_what_is_inside_a_score(wrong, error, words):
    given = {**good(), "features": torch.randn(2, 5, 3), "w_f": torch.randn(8, 3), **wrong}
    if "clip" not in wrong:
        said(partial(bf.additive_attention, **given), error, words)
    del given["values"], given["valid_lens"]
    said(partial(bf.additive_scores, **given), error, words)


# ---- modules, alike ------------------------------------------------------------------------------


def located_at(module):
    return lambda *given, mask: module(*given[:3], ones(2, 1, 5), given[3], mask=mask)


MODULES = {
    "additive": lambda: bf.AdditiveAttention(6, 4, 8),
    "lazy": lambda: bf.AdditiveAttention(8),
    "mlp": lambda: bf.MLPAttention(8, 4),
    "dot": bf.DotProductAttention,
    "dot without weights": lambda: bf.DotProductAttention(need_weights=False),
    "location": lambda: located_at(bf.LocationAttention(4, 4, 8, channels=4, kernel_size=7)),
}


SOURCE = "queries", "keys", "values", "valid_lens", "mask"
WRONG = [row for row in BAD if row[0] in SOURCE]
WRONG += [(name, "flat", ValueError, "") for name in SOURCE[:3]]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda n: f"{n}-{WRONG[n][0]}")
def test_modules(kind, number):
    """What the function refuses; AdditiveAttention in the same words."""
    module, (name, value, error, words) = MODULES[kind](), WRONG[number]
    size = 6 if kind == "additive" else 4
    inputs = {"queries": ones(2, 3, 4), "keys": ones(2, 5, size), "values": ones(2, 5, 7)}
    inputs |= {"valid_lens": None, "mask": None}

    def call():
        *tensors, mask = inputs.values()
        return module(*tensors, mask=mask)

    call()
    inputs[name] = spoil(value, inputs[name])
    said(call, error, words if kind == "additive" else "")


def test_the_module_in_another_dtype_than_its_input():
    with pytest.raises((TypeError, RuntimeError), match=r"dtype|must"):
        bf.AdditiveAttention(6, 4, 8)(*(x.double() for x in list(good().values())[:3]))


# ---- modules, one by one -------------------------------------------------------------------------

Additive, Concat = bf.AdditiveAttention, bf.AdditiveAttention.from_concat
additive, dot, Linear = Additive(6, 4, 8), bf.DotProductAttention(), nn.Linear
Q, K, V = ones(2, 3, 4), ones(2, 5, 6), ones(2, 5, 7)


def attend(keys=K, queries=Q, lens=None, mask=None, also=None, **options):
    """A step of AdditiveAttention: lengths and mask are of the memory, ``also`` of the step."""
    memory = additive.memory(keys, valid_lens=lens, mask=mask)
    return additive.attend(queries, memory, mask=also, **options)


# What each function of a swapped or shared input says: queries, keys, the cure in the message.
SWAPPED = [
    ((2, 3, 4), (3, 9, 6), r"queries must have .*, got \(2, 3, 4\): .* is hidden\[-1\]$"),
    ((1, 3, 4), (3, 9, 6), r"hidden\[-1\]; queries of all rows are queries.expand\(3, -1, -1\)$"),
    ((3, 1, 4), (9, 3, 6), r"the batch comes first, keys.transpose\(0, 1\)$"),
    ((1, 1, 4), (9, 1, 6), r"keys.transpose\(0, 1\); .* queries.expand\(9, -1, -1\)$"),
    ((3, 1, 4), (3, 2, 9, 6), r"image are keys.flatten\(1, 2\)$"),
    ((1, 1, 4), (3, 2, 9, 6), r"image are keys.flatten\(1, 2\)$"),
    ((3, 4), (3, 2, 9, 6), r"image are keys.flatten\(1, 2\)$"),
    ((1, 4), (3, 9, 6), r"batch dimensions of .*\(3,\), and one or two more, got \(1, 4\)$"),
    ((2, 5, 4), (3, 9, 6), r"must have the batch size of [^:]*$"),
    (((1, 3, 4), (1, 3, 4)), (3, 9, 6), r"LSTM's state \(h, c\) pass h\[-1\]\), got tuple"),
]  # fmt: skip
wanted = scattered(2, 3)
OPTIONS = [
    ({"query_mask": wanted.float()}, TypeError, "query_mask must be bool, .*float32$"),
    ({"query_mask": [True]}, TypeError, "query_mask must be a tensor, got list"),
    ({"query_mask": wanted[:, :1]}, ValueError, r"have shape \(2, 3\), got \(2, 1\)"),
    ({"query_mask": wanted.to("meta")}, ValueError, "query_mask must be on the device"),
    ({"scale": "2"}, TypeError, "scale must be a number, got str"),
    ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
]


def ways(queries, keys, **options):
    """The function, the module, and a memory with and without scores."""
    layers = additive.W_q, additive.W_k, additive.w_v
    weights = [layer.weight for layer in layers]
    return [
        partial(bf.additive_attention, queries, keys, keys, *weights, **options),
        partial(additive, queries, keys, **options),
        *(
            partial(attend, keys, queries, return_scores=scores, **options)
            for scores in (False, True)
        ),
    ]


@pytest.mark.parametrize("way", range(4), ids=["function", "module", "memory", "scores"])
@pytest.mark.parametrize(("queries", "keys", "words"), SWAPPED)
def test_the_cure_is_named(queries, keys, words, way):
    pair = isinstance(queries[0], tuple)
    given = tuple(ones(size) for size in queries) if pair else ones(queries)
    said(ways(given, ones(keys))[way], TypeError if pair else ValueError, words)


@pytest.mark.parametrize("way", range(4), ids=["function", "module", "memory", "scores"])
@pytest.mark.parametrize(("options", "error", "words"), OPTIONS)
def test_options(options, error, words, way):
    said(ways(Q, K, **options)[way], error, words)


pooled = bf.AttentionPooling(6, 5)
located = bf.LocationAttention(6, 4, 8, channels=4, kernel_size=7)
forward = bf.LocationAttention(6, 4, 8, 4, 7, normalize="forward")


def locate(**wrong):
    given = {"queries": Q[:, :1], "keys": K, "values": V, "location": ones(2, 1, 5)}
    return located(**{**given, **wrong})


gru, lstm = (layer(cls, dtype=torch.float32) for cls in CELLS)
X, source = ones(T, B, E), (ones(B, TK, DK), ones(B, TK, DV))
hidden, of_steps = ones(1, B, H), ones(B, T, TK) > 0
after = layer(CELLS[0], dtype=torch.float32, attention_first=False)
not_fed = layer(CELLS[0], dtype=torch.float32, attention_first=False, input_feeding=False)
by_place = bf.AttentionGRU(E, H, location={"channels": None})


def remembered(*inputs, mask=None, **options):
    """A call of AttentionGRU on a memory."""
    return gru(*inputs, **options, memory=gru.attention.memory(*source, mask=mask))


def grown(*more, of=additive, **options):
    """A memory of two rows, 5 keys of 6 and values of 7 features, with something appended."""
    return of.memory(K, V, **options).append(*more)


def after_a_change():
    module = Additive(6, 4, 8)
    memory = module.memory(K, V).append(K, V)
    with torch.no_grad():
        module.W_k.weight.add_(1.0)
    return module.attend(Q, memory.append(K, V))


batches = ones(2, 3, 4), ones(2, 3, 9, 4), ones(2, 3, 9, 4)
LISTS = {
    "sizes": [
        (ValueError, r"^queries must have feature size 4 .*, got \(2, 3, 5\)",
         lambda: additive(ones(2, 3, 5), K, V)),
        (ValueError, r"^keys must have feature size 6 .*, got \(2, 5, 9\)",
         lambda: additive(Q, ones(2, 5, 9), V)),
        (ValueError, r"^keys must have feature size 6 .*, got \(2, 5, 9\)",
         lambda: additive.memory(ones(2, 5, 9))),
        (ValueError, r"^keys must have feature size 4 .*, got \(2, 5, 9\)",
         lambda: dot(Q, ones(2, 5, 9), V)),
        (TypeError, r"^values must have the dtype of queries",  # of a call that projects in front
         lambda: Additive(64, 64, 64)(*ones(2, 8, 64, 64), ones(8, 64, 64).double())),
        (ValueError, r"^memory must come from .* by another AdditiveAttention",
         lambda: dot.attend(Q, additive.memory(K))),
        (ValueError, r"^w_v must have shape \(1, 8\), got \(2, 8\)$",
         lambda: bf.additive_scores(ones(2, 3, 8), ones(2, 5, 8), None, None, ones(2, 8))),
        *((ValueError, r"features must have .*got \(3, 2, 9, 2\)",
           partial(of, *batches[:n], *map(ones, ((8, 4), (8, 4), (8,))), features=ones(3, 2, 9, 2),
                   w_f=ones(8, 2)))
          for of, n in ((bf.additive_scores, 2), (bf.additive_attention, 3))),
    ],
    "constructors": [
        (ValueError, "num_hiddens must be at least 1, got 0", lambda: Additive(0)),
        (ValueError, "key_size must be at least 1, got -1", lambda: Additive(-1, 2, 3)),
        (ValueError, "query_size must be at least 1, got 0", lambda: Additive(1, 0, 3)),
        (ValueError, "dropout must be between 0 and 1, got -0.1", lambda: Additive(8, -0.1)),
        (ValueError, "dropout must be between 0 and 1, got 1.5", lambda: Additive(8, 1.5)),
        (ValueError, "dropout must be between 0 and 1, got 2", lambda: Additive(2, 3, 8, 2)),
        (ValueError, "units must be at least 1, got 0", lambda: bf.MLPAttention(0, 2)),
        (ValueError, "ipt_dim must be at least 1, got 0", lambda: bf.MLPAttention(2, 0)),
        (ValueError, "dropout must be .*, got -1.0", lambda: bf.MLPAttention(2, 2, -1.0)),
        (ValueError, "dropout must be .*, got 7", lambda: bf.DotProductAttention(7)),
        *((ValueError, "query_size", partial(Concat, Linear(*sizes), Linear(8, 1), *of))
          for sizes, of in (((5, 8), ()), ((6, 8), (6,)), ((6, 8), (0,)))),
        (ValueError, "v must be", lambda: Concat(Linear(6, 8), Linear(8, 2))),
        (ValueError, "v must be", lambda: Concat(Linear(6, 8), Linear(7, 1))),
        (ValueError, "w_k must have 8 outputs, as w_q, got 7",
         lambda: Additive.from_linears(*(Linear(3, n) for n in (8, 7, 1)))),
        (ValueError, "activation must be one of 'tanh', 'relu', 'leaky_re",
         lambda: Additive(8, activation="gelu")),
        (ValueError, "activation must be one of", lambda: Additive(8, activation=torch.relu)),
        (ValueError, "negative_slope must be finite, got inf",
         lambda: Additive(8, negative_slope=float("inf"))),
        (TypeError, "negative_slope must be a number, got str",
         lambda: Additive(8, negative_slope="0.1")),
        *((ValueError, words, partial(bf.LocationAttention, 6, 5, 4, **wrong)) for words, wrong in (
            ("kernel_size must be odd, got 4", {"kernel_size": 4}),
            ("channels must be at least 1", {"channels": 0}),
            ("activation must be one of 'tanh', 'relu'", {"activation": "gelu"}),
            ("normalize must be one of 'softmax', 'sigmoid', .* got 'sum'", {"normalize": "sum"}),
            ("inputs must be at least 1", {"inputs": 0}),
            ("dropout must be between 0 and 1", {"dropout": 2.0}),
        )),
        (ValueError, "size must be at least 1", lambda: bf.AttentionPooling(0, 5)),
        (ValueError, "heads must be at least 1", lambda: bf.AttentionPooling(6, 5, heads=0)),
        (ValueError, "dropout must be between", lambda: bf.AttentionPooling(6, 5, dropout=2.0)),
        (ValueError, "w must take the 5 features that V gives, got 6",
         lambda: bf.AttentionPooling.from_layers(Linear(6, 5), Linear(6, 1))),
        (TypeError, "V must be an nn.Linear, got Tanh",
         lambda: bf.AttentionPooling.from_layers(nn.Tanh(), Linear(6, 1))),
        (ValueError, r"U must have the shape of V, \(5, 6\), got \(4, 6\)",
         lambda: bf.AttentionPooling.from_layers(Linear(6, 5), Linear(5, 1), Linear(6, 4))),
        (ValueError, "input_feeding must be True where attention is first",
         lambda: bf.AttentionGRU(E, H, input_feeding=False)),
        (ValueError, "input_feeding must be True with a location",
         lambda: bf.AttentionGRU(E, H, attention_first=False, input_feeding=False,
                                 location={"channels": None})),
    ],
    "memory and attend": [
        (ValueError, "values must have the batch size and length of keys",
         lambda: additive.memory(K, ones(2, 6, 6))),
        (TypeError, "keys must be a tensor, got NoneType", lambda: additive.memory(None)),
        (ValueError, r"valid_lens must have shape", lambda: attend(lens=ones(7))),
        (TypeError, "valid_lens must be None, a tensor or a list .*, got int",
         lambda: additive.memory(K, valid_lens=3)),
        (ValueError, r"mask must have shape \(2, 5\)", lambda: attend(mask=ones(2, 4) > 0)),
        # Nothing says that there are 3 queries.
        (ValueError, r"mask must have shape \(2, 5\) .*, got \(3, 5\)",
         lambda: additive.memory(K, mask=ones(3, 5) > 0)),
        (ValueError, r"mask must have shape .*, got \(2, 7, 5\)",
         lambda: attend(mask=ones(1, 7, 5) > 0)),
        (ValueError, r"mask must have shape .*, got \(2, 7, 5\)",
         lambda: attend(mask=ones(1, 7, 5) > 0, also=ones(2, 5) > 0)),
        (ValueError, r"mask must have shape .*, got \(2, 2, 5\)",
         lambda: attend(also=ones(2, 2, 5) > 0)),
        (TypeError, r"clip must be a number, got str",
         lambda: additive.scores(Q, additive.memory(K), clip="10")),
        (ValueError, "queries must have feature size 4", lambda: attend(queries=ones(2, 3, 5))),
        (ValueError, "batch size", lambda: attend(queries=ones(3, 3, 4))),
    ],
    "masked_softmax": [
        (ValueError, "scores must have 3 dimensions", lambda: bf.masked_softmax(Q[0], None)),
        (TypeError, "scores must be a tensor, got list", lambda: bf.masked_softmax([1.0], None)),
        (TypeError, "scores must be float32", lambda: bf.masked_softmax(Q.long(), None)),
        (ValueError, "valid_lens must have shape", lambda: bf.masked_softmax(Q, ones(5))),
        (TypeError, "valid_lens must have an integer", lambda: bf.masked_softmax(Q, ones(2) > 0)),
        (TypeError, "valid_lens must be None, a tensor or a list .*, got int",
         lambda: bf.masked_softmax(Q, 3)),
        (TypeError, "valid_lens .* mask=", lambda: bf.masked_softmax(Q, Q[0] > 0)),
    ],
    "pooling": [
        (ValueError, "keys must have feature size 6", lambda: pooled(K[..., :5])),
        *((ValueError, "keys must have feature size 8",  # which chunks of rows would not notice
           partial(bf.AttentionPooling(8, 128), ones(32, 512, n))) for n in (4, 16)),
        (TypeError, "keys must have the dtype of the module's weights", lambda: pooled(K.double())),
        (ValueError, "keys must have 3 dimensions", lambda: pooled(K[0, 0])),
        (TypeError, "keys must be a tensor", lambda: pooled([1.0])),
        (ValueError, r"valid_lens must have shape \(2,\) or \(2, 1\)",
         lambda: pooled(K, ones(2, 2))),
        (TypeError, "a bool mask is given as mask=", lambda: pooled(K, K[..., 0] > 0)),
        (ValueError, r"mask must have shape \(2, 5\)", lambda: pooled(K, mask=K[:, :3, 0] > 0)),
        (ValueError, "values must have the batch size and length",
         lambda: pooled(K, values=V[:, :3])),
    ],
    "location": [
        (ValueError, "location must have 3 dimensions", lambda: locate(location=ones(2, 5))),
        (ValueError, r"shape \(2, 1, 5\), got \(2, 2, 5\)",
         lambda: locate(location=ones(2, 2, 5))),
        (TypeError, "location must have the dtype",
         lambda: locate(location=ones(2, 1, 5).double())),
        (ValueError, "queries must have feature size 4", lambda: locate(queries=ones(2, 1, 5))),
        (ValueError, "keys must have feature size 6", lambda: locate(keys=ones(2, 5, 4))),
        (ValueError, r"previous must be the weights .* got \(2, 1, 4\)",
         lambda: forward.attend(
             ones(2, 1, 4), forward.memory(K), ones(2, 1, 5), previous=ones(2, 1, 4))),
    ],
    "recurrent": [
        (TypeError, "exactly one of keys and memory must be given", lambda: gru(X)),
        (TypeError, "got both", lambda: remembered(X, None, source[0])),
        (TypeError, r"memory must come from memory\(\), got Tensor",
         lambda: gru(X, memory=source[0])),
        (ValueError, "memory must come from .* by another AdditiveAttention",
         lambda: gru(X, memory=lstm.attention.memory(*source))),
        (TypeError, "values must be None beside a memory",
         lambda: remembered(X, values=source[1])),
        (TypeError, "valid_lens must be None", lambda: remembered(X, valid_lens=LENS)),
        (ValueError, r"mask must have shape \(5, 11\)",
         lambda: gru(X, hidden, *source, mask=of_steps)),
        (ValueError, "mask must have shape", lambda: remembered(X, hidden, mask=of_steps)),
        (ValueError, "inputs must have 3 dimensions", lambda: remembered(X[0])),
        (ValueError, "inputs must have feature size 3",
         lambda: remembered(ones(T, B, E + 1))),
        (TypeError, "inputs must be float32", lambda: remembered(X.long())),
        (ValueError, "batch size of the memory", lambda: remembered(X[:, :2])),
        (ValueError, r"inputs must have at least one step, got \(0, 5, 3\)",
         lambda: remembered(X[:0])),
        (ValueError, r"hidden must have shape \(1, 5, 9\)",
         lambda: remembered(X, hidden[:0])),
        (TypeError, "hidden must have the dtype of inputs",
         lambda: remembered(X, hidden.double())),
        (TypeError, "hidden must be a pair", lambda: lstm(X, hidden, *source)),
        (TypeError, "hidden must be a pair of tensors, got 3 of them",
         lambda: lstm(X, (hidden,) * 3, *source)),
        (TypeError, "hidden must be a tensor, got tuple",
         lambda: remembered(X, (hidden, hidden))),
        (ValueError, r"values must have feature size 4 \(value_size\), got 3",
         lambda: gru(ones(T, B, E + 1), None, source[0], source[1][..., 1:])),
        (ValueError, "inputs must have at least one step",
         lambda: not_fed(X[:0], None, *source)),
        (ValueError, r"keys must have one batch dimension, got \(2, 3\)",
         lambda: gru(X, keys=ones(2, 3, TK, DK))),
        (ValueError, "inputs must have the batch size of the memory, 5",
         lambda: remembered(pack_padded_sequence(X[:, :3], [6, 4, 2]))),
        (ValueError, "inputs must have 3 dimensions",
         lambda: remembered(pack_padded_sequence(X[..., 0], [6, 4, 2, 2, 1]))),
        (ValueError, r"context must have shape \(5, 4\), got \(5, 3\)",
         lambda: after(X, None, *source, context=ones(B, E))),
        (TypeError, "context must have the dtype",
         lambda: after(X, None, *source, context=ones(B, DV).double())),
        (TypeError, "context must be a tensor", lambda: after(X, None, *source, context=0.0)),
        *((TypeError, "context must be None where no step takes",
           partial(of, X, None, *source, context=ones(B, DV))) for of in (gru, not_fed)),
        (ValueError, "inputs must have feature size 3",
         lambda: not_fed(ones(T, B, E + 1), None, *source)),
        (TypeError, "inputs must be padded with a location",
         lambda: by_place(pack_sequence([ones(5, E), ones(3, E)]), keys=ones(2, TK, H))),
    ],
    "append": [
        (ValueError, r"keys must have the batch dimensions of the memory, \(2,\)",
         lambda: grown(K[1:])),
        (ValueError, "keys must have the batch dimensions", lambda: grown(K[..., None])),
        (ValueError, "values must have the batch dimensions", lambda: grown(K, V[1:])),
        (ValueError, "values must have the batch size and length of", lambda: grown(K, V[:, 1:])),
        (ValueError, "values must have the feature size of the memory, 7", lambda: grown(K)),
        (ValueError, "keys must have feature size 6", lambda: grown(K[..., 1:], V)),
        (ValueError, "keys must have the feature size of the memory, 6",
         lambda: grown(K[..., 1:], V, of=dot)),
        (TypeError, "keys must have the dtype of the memory", lambda: grown(K.double())),
        (TypeError, "keys must have the dtype of the memory",
         lambda: grown(K.double(), V.double(), of=dot)),
        (TypeError, "values must have the dtype of", lambda: grown(K, V.double())),
        (TypeError, "keys must be a tensor, got list", lambda: grown([1.0])),
        (TypeError, "values must be a tensor, got str", lambda: grown(K, "keys")),
        (ValueError, "memory must have a mask, .* to be appended to, got valid_lens",
         lambda: grown(K, valid_lens=[2, 2])),
        (ValueError, "made after the last change of the key layer", after_a_change),
        *((TypeError, "rows must be a slice, a list or a tensor of one dimension",
           lambda rows=rows: additive.memory(K)[rows])
          for rows in (0, (0, 1), None, torch.zeros(2, 2, dtype=torch.long))),
        (ValueError, "memory must have a batch dimension to be indexed",
         lambda: additive.memory(K[0])[[0]]),
        (TypeError, r"memory must come from memory\(\), got Tensor", lambda: additive.attend(Q, K)),
        (TypeError, r"memory must come from memory\(\), got Tensor",
         lambda: located.attend(Q[:, :1], K, ones(2, 1, 5))),
    ],
    "losses": [
        (ValueError, "width must be positive, got 0", lambda: losses.guided(Q, width=0)),
        (ValueError, "weights must have 3 dimensions", lambda: losses.coverage(Q[0])),
        (ValueError, r"source_lens must have shape \(2,\)",
         lambda: losses.doubly_stochastic(Q, None, ones(2, 4))),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [pytest.param(*row, id=f"{name}-{i}") for name in LISTS for i, row in enumerate(LISTS[name])],
)
def test_calls(error, words, call):
    said(call, error, words)


@pytest.mark.parametrize(
    "make",
    [
        bf.AdditiveAttention,
        lambda: bf.AdditiveAttention(1, 2, 3, 0.1, 5),
        lambda: bf.AdditiveAttention(8, 0.1, num_hiddens=8),
        lambda: bf.AdditiveAttention(8, size=3),
        lambda: bf.AdditiveAttention(key_size=3, num_hiddens=8),
        lambda: bf.AdditiveAttention(8.0),
        lambda: bf.AdditiveAttention("8"),
        lambda: bf.AdditiveAttention(True),
        lambda: bf.AdditiveAttention(3, 4, None),
        lambda: bf.AdditiveAttention(8, "0.1"),
        lambda: bf.MLPAttention(8, 2.0),
        lambda: bf.DotProductAttention(None),
    ],
)
def test_arguments_of_constructors(make):
    with pytest.raises(TypeError, match=r"got|missing|takes"):
        make()


def test_backends():
    with (
        pytest.raises(ValueError, match=r"^backend must be one of .*, got 'nope'"),
        bf.backends.use("nope"),
    ):
        pass
    meta = {n: x.to("meta") for n, x in good().items() if x is not None}
    with pytest.raises(ValueError, match=r"^backend must serve meta tensors, got 'cpu'"):
        bf.additive_attention(**meta, backend="cpu")
