"""``fuse`` against the published code of others: several decoder steps, and a training."""

import copy

import driving
import pytest
import torch
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast import parity
from bahdanau_fast import run as operators
from bahdanau_fast.seq2seq.data import dates

MODES = ("train", "eval")


def run(module, drive, dtype, mode):
    """Outputs and, in training, gradients of inputs and parameters, by kind."""
    generator = torch.Generator().manual_seed(3)
    inputs = []

    def draw(*shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        inputs.append(drawn.requires_grad_(mode == "train"))
        return inputs[-1]

    module.to(dtype).train(mode == "train")
    module.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(mode == "train"):
        found = [(kind, result.clone()) for kind, result in drive(module, draw)]
    if mode == "train":
        generator.manual_seed(4)
        loss = torch.zeros((), dtype=dtype)
        for _, result in found:
            if result.requires_grad:
                seed = torch.randn(result.shape, generator=generator, dtype=torch.float64)
                loss = loss + (result * seed.to(dtype)).sum()
        loss.backward()
        found += [("gradients of inputs", each.grad) for each in inputs]
        found += [(f"gradient of {name}", p.grad) for name, p in module.named_parameters()]
    return [(kind, None if result is None else result.detach()) for kind, result in found]


def gaps(found, exact):
    """Largest error, and largest value, of each kind of result."""
    assert [kind for kind, _ in found] == [kind for kind, _ in exact]
    worst = {}
    for (kind, ours), (_, theirs) in zip(found, exact, strict=True):
        assert (ours is None) == (theirs is None), kind
        if theirs is not None:
            assert ours.shape == theirs.shape
            error, largest = worst.get(kind, (0.0, 0.0))
            size = float(theirs.double().abs().max())
            worst[kind] = max(error, parity.error(ours, theirs)), max(largest, size)
    return worst


def count(monkeypatch):
    """What is called of the package's operators from now on."""
    calls = []
    for name in ("attend", "scores"):
        own = getattr(operators, name)
        monkeypatch.setattr(
            operators, name, lambda *a, own=own, name=name, **k: calls.append(name) or own(*a, **k)
        )
    return calls


@pytest.fixture(params=driving.PEERS)
def peer(request):
    return driving.PEERS[request.param]


@pytest.fixture
def module(peer):
    torch.manual_seed(0)
    made = peer.make()
    if any(isinstance(p, torch.nn.UninitializedParameter) for p in made.parameters()):
        run(made, peer.drive, torch.float32, "eval")  # draws what is lazy
    return made


@pytest.mark.parametrize("mode", MODES)
def test_the_same_before_and_after(peer, module, mode, monkeypatch):
    eager = run(module, peer.drive, torch.float32, mode)
    exact = run(module, peer.drive, torch.float64, mode)
    module.float()
    state = {name: each.clone() for name, each in module.state_dict().items()}
    report = bf.fuse(module)
    for _ in range(6):  # noted, and looked at: each of the ways that its steps take
        run(module, peer.drive, torch.float32, mode)
    assert report.fused == report.entries != ()
    calls = count(monkeypatch)

    ours = gaps(run(module, peer.drive, torch.float32, mode), exact)
    assert len(calls) >= len(driving.SOURCES) * driving.STEPS
    theirs = gaps(eager, exact)
    # One number is a sum over everything, whose rounding is luck: fp64, below, judges it.
    single = {f"gradient of {name}" for name, p in module.named_parameters() if p.numel() == 1}
    for kind, (error, largest) in ours.items():
        if kind not in single:
            assert error <= parity.allowed(theirs[kind][0], largest, torch.float32), kind
    # Both round some hundred times per element at most; AllenNLP adds 1e-13 to a sum of one.
    for kind, (error, largest) in gaps(run(module, peer.drive, torch.float64, mode), exact).items():
        assert error <= 2.0**-40 * max(1.0, largest), kind

    module.float()
    after = module.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert bf.unfuse(module) == [""]
    monkeypatch.undo()
    for (kind, back), (_, first) in zip(
        run(module, peer.drive, torch.float32, mode), eager, strict=True
    ):
        assert back is first is None or torch.equal(back, first), kind


def test_a_copy_and_a_pickle_compute_the_same(peer, module, tmp_path):
    report = bf.fuse(module)
    first = [run(module, peer.drive, torch.float32, "eval") for _ in range(2)][-1]
    assert report.fused
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    for other in (copy.deepcopy(module), loaded):
        assert type(other) is type(module)
        assert all(a is not b for a, b in zip(other.parameters(), module.parameters(), strict=True))
        again = [run(other, peer.drive, torch.float32, "eval") for _ in range(2)][-1]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again, first, strict=True))
        assert bf.unfuse(other) == [""]


VOCABULARY = 128  # letters; others are the last one


class Translator(nn.Module):
    """Letters to letters: an embedding, a GRU and JoeyNMT's decoder, all of so many features."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size, padding_idx=0)
        self.encoder = nn.GRU(size, size, batch_first=True)
        self.encoder.output_size = size  # JoeyNMT's decoder asks for it
        self.decoder = driving.load("joeynmt.decoders", "RecurrentDecoder")(
            emb_size=size, hidden_size=size, encoder=self.encoder, vocab_size=VOCABULARY
        )

    def loss(self, source, target):
        """Cross entropy of the letters of (B,T) targets, from (B,S) sources."""
        states, last = self.encoder(self.embedding(source))
        given, wanted = self.embedding(target[:, :-1]), target[:, 1:]
        mask, steps = (source > 0).unsqueeze(1), given.shape[1]
        scores, *_ = self.decoder(given, states, last[-1], mask, steps, trg_mask=None)
        return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=0)


def batch_of(texts):
    """(B,T): 1 to begin, letters, 2 to end, then zeros."""
    rows = [torch.tensor([1, *(min(ord(c), VOCABULARY - 1) for c in text), 2]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def train(model, pairs, steps, batch):
    """The losses of some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for step in range(steps):
        at = step * batch % (len(pairs) - batch)
        sources, targets = zip(*pairs[at : at + batch], strict=True)
        optimizer.zero_grad()
        loss = model.loss(batch_of(sources), batch_of(targets))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_joeynmt_trains_to_the_same_losses():
    torch.manual_seed(0)
    model = Translator(32)
    fused = copy.deepcopy(model)
    report = bf.fuse(fused)
    pairs = [(example.text, example.iso) for example in dates.generate(200)]
    before, after = (train(each, pairs, 50, 16) for each in (model, fused))
    assert report.fused
    assert before[-1] < 0.8 * before[0]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) <= 1e-4
