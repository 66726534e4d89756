"""Bad input is an error that names the argument, what it must be and what it got."""

import re

import pytest
import torch
from torch import nn

import bahdanau_fast as bf

SAID = re.compile(r"^[\w. ]+ must .+, got .+", re.DOTALL)


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


ones = torch.ones
# argument, what it is set to, error, words of the message
BAD = [
    ("queries", ones(3, 4), ValueError, "batch dimensions of keys"),
    (
        "queries",
        ones(1, 2, 4),
        ValueError,
        r"batch size of keys, 2, .* is hidden\[-1\]; .*\(2, -1, -1",
    ),
    ("queries", ones(3, 2, 4), ValueError, r"keys, 2, got \(3, 2, 4\): .* is hidden\[-1\]$"),
    ("queries", (ones(1, 2, 4), ones(1, 2, 4)), TypeError, r"h\[-1\]\), got tuple"),
    ("queries", ones(1, 4), ValueError, r"and one or two more, got \(1, 4\)$"),
    ("queries", ones(1, 2, 3, 4), ValueError, "3 dimensions"),
    ("keys", ones(5, 6), ValueError, "3 dimensions"),
    ("values", ones(2, 5), ValueError, "3 dimensions"),
    ("values", torch.tensor(1.0), ValueError, "3 dimensions"),
    ("keys", ones(4, 5, 6), ValueError, r"batch size of queries, 2, got \(4, 5, 6\)$"),
    (
        "keys",
        ones(5, 2, 6),
        ValueError,
        r"queries, 2, got \(5, 2, 6\): .* first, keys.transpose\(0, 1\)$",
    ),
    ("values", ones(3, 5, 7), ValueError, "batch size and length of keys"),
    ("values", ones(2, 4, 7), ValueError, "batch size and length of keys"),
    ("w_q", ones(8, 5), ValueError, r"shape \(8, 4\)"),
    ("w_q", ones(7, 4), ValueError, r"shape \(8, 4\)"),
    ("w_k", ones(8, 4), ValueError, r"shape \(8, 6\)"),
    ("w_k", ones(8, 6, 1), ValueError, r"shape \(8, 6\)"),
    ("w_v", ones(2, 8), ValueError, r"shape \(1, 8\), got \(2, 8\)$"),
    ("w_v", ones(8, 1), ValueError, r"shape \(1, 8\), got \(8, 1\)$"),
    ("w_v", ones(20, 16), ValueError, r"shape \(1, 8\), got \(20, 16\)$"),
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
]
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


def spoil(value, was):
    if isinstance(value, torch.dtype):
        return was.to(value)
    if value == "sparse" and isinstance(value, str):
        return was.to_sparse()
    if value == "meta" and isinstance(value, str):
        return was.to("meta")
    return value


@pytest.mark.parametrize("number", range(len(BAD)), ids=lambda n: f"{n}-{BAD[n][0]}")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_function(number, backend):
    name, value, error, words = BAD[number]
    arguments = {"backend": backend, "bias": ones(8), **good()}
    arguments[name] = spoil(value, arguments.get(name))
    with pytest.raises(error, match=words) as raised:
        bf.additive_attention(**arguments)
    text = str(raised.value)
    assert SAID.match(text), text
    # A wrong first tensor is told as itself or as what the next must be like.
    told = text.startswith(name) or f"of {name}" in text or f"where {name}" in text
    assert told or name in ("queries", "w_v"), text


MODULES = {
    "additive": lambda: bf.AdditiveAttention(6, 4, 8),
    "lazy": lambda: bf.AdditiveAttention(8),
    "mlp": lambda: bf.MLPAttention(8, 4),
    "dot": bf.DotProductAttention,
    "dot without weights": lambda: bf.DotProductAttention(need_weights=False),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *((name, "sparse", TypeError) for name in TENSORS[:3]),
        *((name, torch.int64, TypeError) for name in TENSORS[:3]),
        *((name, torch.complex64, TypeError) for name in TENSORS[:3]),
        *((name, "flat", ValueError) for name in TENSORS[:3]),
        *((name, [1.0], TypeError) for name in TENSORS[:3]),
        ("keys", "batch", ValueError),
        ("values", "batch", ValueError),
        ("values", "rows", ValueError),
        ("keys", torch.float64, TypeError),
        ("values", "meta", ValueError),
        ("valid_lens", ones(4), ValueError),
        ("valid_lens", [1], ValueError),
        ("valid_lens", ["1", "2"], TypeError),
        ("valid_lens", ones(2) > 0, TypeError),
    ],
)
def test_modules(kind, name, value, error):
    module = MODULES[kind]()
    size = 6 if kind == "additive" else 4
    inputs = {
        "queries": ones(2, 3, 4),
        "keys": ones(2, 5, size),
        "values": ones(2, 5, 7),
        "valid_lens": None,
    }
    module(*inputs.values())
    kinds = {"flat": lambda x: x[0], "batch": lambda x: x[:1], "rows": lambda x: x[:, 1:]}
    was = inputs[name]
    make = kinds.get(value) if isinstance(value, str) else None
    inputs[name] = make(was) if make else spoil(value, was)
    with pytest.raises(error) as raised:
        module(*inputs.values())
    assert SAID.match(str(raised.value)), str(raised.value)


def test_feature_sizes():
    module = bf.AdditiveAttention(6, 4, 8)
    with pytest.raises(ValueError, match=r"^queries must have feature size 4 .*, got \(2, 3, 5\)"):
        module(ones(2, 3, 5), ones(2, 5, 6), ones(2, 5, 7))
    with pytest.raises(ValueError, match=r"^keys must have feature size 6 .*, got \(2, 5, 9\)"):
        module(ones(2, 3, 4), ones(2, 5, 9), ones(2, 5, 7))
    with pytest.raises(ValueError, match=r"^keys must have feature size 6 .*, got \(2, 5, 9\)"):
        module.memory(ones(2, 5, 9))
    with pytest.raises(ValueError, match=r"^key must have feature size 4 .*, got \(2, 5, 9\)"):
        bf.DotProductAttention()(ones(2, 3, 4), ones(2, 5, 9), ones(2, 5, 7))
    with pytest.raises(ValueError, match=r"^w_v must have shape \(1, 8\), got \(2, 8\)$"):
        bf.additive_scores(ones(2, 3, 8), ones(2, 5, 8), None, None, ones(2, 8))


def test_the_module_in_another_dtype_than_its_input():
    with pytest.raises((TypeError, RuntimeError), match=r"dtype|must"):
        bf.AdditiveAttention(6, 4, 8)(*(x.double() for x in list(good().values())[:3]))


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
def test_constructors_type(make):
    with pytest.raises(TypeError, match=r"got|missing|takes"):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bf.AdditiveAttention(0), "num_hiddens must be at least 1, got 0"),
        (lambda: bf.AdditiveAttention(-1, 2, 3), "key_size must be at least 1, got -1"),
        (lambda: bf.AdditiveAttention(1, 0, 3), "query_size must be at least 1, got 0"),
        (lambda: bf.AdditiveAttention(8, -0.1), "dropout must be between 0 and 1, got -0.1"),
        (lambda: bf.AdditiveAttention(8, 1.5), "dropout must be between 0 and 1, got 1.5"),
        (lambda: bf.AdditiveAttention(2, 3, 8, 2), "dropout must be between 0 and 1, got 2"),
        (lambda: bf.MLPAttention(0, 2), "units must be at least 1, got 0"),
        (lambda: bf.MLPAttention(2, 0), "ipt_dim must be at least 1, got 0"),
        (lambda: bf.MLPAttention(2, 2, -1.0), "dropout must be between 0 and 1, got -1.0"),
        (lambda: bf.DotProductAttention(7), "dropout must be between 0 and 1, got 7"),
        (lambda: bf.AdditiveAttention.from_concat(nn.Linear(5, 8), nn.Linear(8, 1)), "query_size"),
        (
            lambda: bf.AdditiveAttention.from_concat(nn.Linear(6, 8), nn.Linear(8, 1), 6),
            "query_size",
        ),
        (
            lambda: bf.AdditiveAttention.from_concat(nn.Linear(6, 8), nn.Linear(8, 1), 0),
            "query_size",
        ),
        (lambda: bf.AdditiveAttention.from_concat(nn.Linear(6, 8), nn.Linear(8, 2)), "v must be"),
        (lambda: bf.AdditiveAttention.from_concat(nn.Linear(6, 8), nn.Linear(7, 1)), "v must be"),
        (
            lambda: bf.AdditiveAttention.from_linears(*(nn.Linear(3, n) for n in (8, 7, 1))),
            "w_k must have 8 outputs, as w_q, got 7",
        ),
    ],
)
def test_constructors_value(make, words):
    with pytest.raises(ValueError, match=words) as raised:
        make()
    assert SAID.match(str(raised.value))


def test_memory_and_attend():
    module = bf.AdditiveAttention(6, 4, 8)
    with pytest.raises(ValueError, match="values must have the batch size and length of keys"):
        module.memory(ones(2, 5, 6), ones(2, 6, 6))
    with pytest.raises(TypeError, match="keys must be a tensor, got NoneType"):
        module.memory(None)
    with pytest.raises(ValueError, match=r"valid_lens must have shape"):
        module.attend(ones(2, 3, 4), module.memory(ones(2, 5, 6), valid_lens=ones(7)))
    with pytest.raises(TypeError, match=r"valid_lens must be None, a tensor or a list .*, got int"):
        module.memory(ones(2, 5, 6), valid_lens=3)
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 5\)"):
        module.memory(ones(2, 5, 6), mask=ones(2, 4) > 0)
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 5\) .*, got \(3, 5\)"):
        module.memory(ones(2, 5, 6), mask=ones(3, 5) > 0)  # nothing says that there are 3 queries
    per_query = module.memory(ones(2, 5, 6), mask=ones(1, 7, 5) > 0)
    for mask in (None, ones(2, 5) > 0):
        with pytest.raises(ValueError, match=r"mask must have shape .*, got \(2, 7, 5\)"):
            module.attend(ones(2, 3, 4), per_query, mask=mask)
    with pytest.raises(ValueError, match=r"mask must have shape .*, got \(2, 2, 5\)"):
        module.attend(ones(2, 3, 4), module.memory(ones(2, 5, 6)), mask=ones(2, 2, 5) > 0)
    with pytest.raises(TypeError, match=r"clip must be a number, got str"):
        module.scores(ones(2, 3, 4), module.memory(ones(2, 5, 6)), clip="10")
    memory = module.memory(ones(2, 5, 6))
    with pytest.raises(ValueError, match="queries must have feature size 4"):
        module.attend(ones(2, 3, 5), memory)
    with pytest.raises(ValueError, match="batch size"):
        module.attend(ones(3, 3, 4), memory)


def test_masked_softmax():
    for scores, valid, error, words in [
        (ones(2, 3), None, ValueError, "scores must have 3 dimensions"),
        ([1.0], None, TypeError, "scores must be a tensor, got list"),
        (ones(1, 2, 3, dtype=torch.int64), None, TypeError, "scores must be float32"),
        (ones(2, 3, 4), ones(5), ValueError, "valid_lens must have shape"),
        (ones(2, 3, 4), ones(2) > 0, TypeError, "valid_lens must have an integer"),
        (ones(2, 3, 4), 3, TypeError, "valid_lens must be None, a tensor or a list .*, got int"),
        (ones(2, 3, 4), ones(2, 4) > 0, TypeError, "valid_lens .* mask="),
    ]:
        with pytest.raises(error, match=words) as raised:
            bf.masked_softmax(scores, valid)
        assert SAID.match(str(raised.value))


def test_backends():
    with (
        pytest.raises(ValueError, match=r"^backend must be one of .*, got 'nope'"),
        bf.backends.use("nope"),
    ):
        pass
    meta = {n: x.to("meta") for n, x in good().items() if x is not None}
    with pytest.raises(ValueError, match=r"^backend must serve meta tensors, got 'cpu'"):
        bf.additive_attention(**meta, backend="cpu")
