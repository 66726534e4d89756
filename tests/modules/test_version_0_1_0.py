"""What 0.1.0 wrote is read, and gives the numbers it gave; what it named is there.

The files in version_0_1_0/ were written by make.py in that folder, with the package of 0.1.0.
"""

import copy
import importlib
import inspect
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch

import bahdanau_fast as bf
import bahdanau_fast.seq2seq  # `make` asks for it
from bahdanau_fast.seq2seq import Translator

sys.path.insert(0, str(Path(__file__).resolve().parent / "version_0_1_0"))

import make

FILES = make.HERE
NAMES = json.loads((FILES / "names.json").read_text())
# Where pickles of 0.1.0 look for their classes.
PICKLED = (
    "bahdanau_fast.dot_product.DotProductAttention",
    "bahdanau_fast.key_cache.KeyCache",
    "bahdanau_fast.memory.Memory",
    "bahdanau_fast.memory.ProjectedKeys",
    "bahdanau_fast.modules.AdditiveAttention",
    "bahdanau_fast.modules.MLPAttention",
    "bahdanau_fast.recurrent.AttentionGRU",
    "bahdanau_fast.recurrent.AttentionLSTM",
    "bahdanau_fast.seq2seq.beam.Beam",
    "bahdanau_fast.seq2seq.data.Pairs",
    "bahdanau_fast.seq2seq.data.Vocab",
    "bahdanau_fast.seq2seq.decoders.Seq2SeqAttentionDecoder",
    "bahdanau_fast.seq2seq.decoders.Seq2SeqDecoder",
    "bahdanau_fast.seq2seq.models.EncoderDecoder",
    "bahdanau_fast.seq2seq.models.Seq2SeqEncoder",
    "bahdanau_fast.seq2seq.scoring.CorpusScores",
    "bahdanau_fast.seq2seq.settings.Settings",
    "bahdanau_fast.seq2seq.training.Trainer",
    "bahdanau_fast.seq2seq.translating.Translation",
    "bahdanau_fast.seq2seq.translator.Translator",
)
MODULES = tuple(make.modules_of(bf))
POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")


@pytest.fixture(scope="module")
def tensors():
    """Inputs, results and state dicts by name."""
    return torch.load(FILES / "tensors.pt", weights_only=True)


def unpickled(name):
    return torch.load(FILES / f"{name}.pt", weights_only=False)


def assert_gives(module, known):
    """In evaluation, what the module gave then."""
    results = make.flat(module.eval()(*known["inputs"]))
    torch.testing.assert_close([x.detach() for x in results], known["results"])


@pytest.mark.parametrize("name", MODULES)
def test_pickles(name, tensors):
    module = unpickled(name)
    assert type(module) is type(make.modules_of(bf)[name])
    assert_gives(module, tensors[name])
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_gives(twin, tensors[name])
    # A step of training with it: the attributes that only training reads are there too.
    module.train()
    inputs = [x.clone() if x is not None else None for x in tensors[name]["inputs"]]
    needing = [x.requires_grad_() for x in inputs if x is not None and x.is_floating_point()]
    needing += module.parameters()
    sum(x.sum() for x in make.flat(module(*inputs))).backward()
    assert all(x.grad is not None for x in needing)


@pytest.mark.parametrize("name", MODULES)
def test_state_dicts(name, tensors):
    module = make.modules_of(bf)[name]
    state = tensors[name]["state"]
    module.load_state_dict(state)
    assert_gives(module, tensors[name])
    assert list(module.state_dict()) == list(state)


def test_a_pickle_whose_weights_were_not_made_yet(tensors):
    module = unpickled("additive_uncalled")
    queries, keys, values, lens = tensors["additive_lazy"]["inputs"]
    assert module(queries, keys, values, lens).shape == (2, 3, 4)
    fresh = unpickled("additive_uncalled")
    fresh.load_state_dict(tensors["additive_lazy"]["state"])
    assert_gives(fresh, tensors["additive_lazy"])


@pytest.mark.parametrize("name", ["additive", "mlp", "dot"])
def test_pickles_keep_the_weights_of_the_last_call(name, tensors):
    module, (queries, keys, *_) = unpickled(name), tensors[name]["inputs"]
    weights = module.attention_weights
    assert weights.shape == (2, queries.shape[1], keys.shape[1])
    torch.testing.assert_close(weights @ tensors[name]["inputs"][2], tensors[name]["results"][0])


@pytest.mark.parametrize("name", ["memory", "memory_of_many"])
def test_memories(name, tensors):
    module, memory = unpickled("additive").eval(), unpickled(name)
    assert type(memory) is bf.Memory
    known = tensors[name]
    for source in (memory, copy.deepcopy(memory), pickle.loads(pickle.dumps(memory)), memory[:]):
        context = module.attend(*known["inputs"], source)
        got = [context.detach(), module.attention_weights.detach()]
        torch.testing.assert_close(got, known["results"])


def test_checkpoints(tensors):
    known = tensors["checkpoint"]
    written = Translator.load(FILES / "checkpoint.pt").translate(known["inputs"])
    assert [" ".join(translation.tokens) for translation in written] == known["results"]
    torch.testing.assert_close([t.weights for t in written], known["weights"])


@pytest.mark.parametrize("path", PICKLED)
def test_paths_of_pickles(path):
    module, _, name = path.rpartition(".")
    assert inspect.isclass(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    found, missing = importlib.import_module(module), []
    for path in NAMES[module]:
        value = found
        for part in path.split("."):
            value = getattr(value, part, missing)
        if value is missing:
            missing.append(path)
    assert missing == []
    assert {path for path in NAMES[module] if "." not in path} <= set(found.__all__)


@pytest.mark.parametrize("module", NAMES)
def test_signatures(module):
    for path, old in NAMES[module].items():
        # AdditiveAttention took (*sizes, **named) then; make.modules_of has both of its forms.
        if old is None or path == "AdditiveAttention":
            continue
        value = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        new = make.parameters_of(value)
        # A call that was right then is right now, and means the same.
        in_order = [p[0] for p in old if p[1] in POSITIONAL]
        assert [p[0] for p in new if p[1] in POSITIONAL][: len(in_order)] == in_order, path
        now = {name: (kind, default) for name, kind, default in new}
        for name, kind, default in old:
            assert now[name] == (kind, default), (path, name)
        known = {p[0] for p in old}
        added = [p for p in new if p[0] not in known]
        assert all(default is not None for _, _, default in added), path
