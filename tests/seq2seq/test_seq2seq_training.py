"""Training, decoding, pictures and the demo, at sizes that take seconds."""

import dataclasses
import json
import math
import re

import pytest
import torch
from threads import one_thread  # noqa: F401

from bahdanau_fast import backends
from bahdanau_fast.seq2seq import (
    Pairs,
    Settings,
    Trainer,
    build_model,
    masked_cross_entropy,
    train,
    translate,
)
from bahdanau_fast.seq2seq.cli import demo
from bahdanau_fast.seq2seq.cli.demo import compare_training, relative_difference
from bahdanau_fast.seq2seq.data import dates
from bahdanau_fast.seq2seq.data.pairs import Batch
from bahdanau_fast.seq2seq.training.trainer import World, shard

TINY = Settings(embed_size=16, num_hiddens=32, epochs=40, batch_size=32, lr=1e-2)


@pytest.fixture(scope="module")
def pairs():
    """Months by name and number: a task a tiny model learns by heart."""
    months = dates.LANGUAGES["American English"].months
    texts = [
        (f"{name} {day}", f"{i:02}-{day}")
        for i, name in enumerate(months, 1)
        for day in range(1, 10)
    ]
    return Pairs.of(texts)


@pytest.fixture(scope="module")
def trained(pairs):
    model = build_model(pairs, TINY)
    return model, train(model, pairs, TINY, progress=False)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_is_that_of_the_valid_positions(smoothing):
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 7, requires_grad=True), torch.randint(0, 7, (3, 5))
    loss = masked_cross_entropy(logits, labels, torch.tensor([5, 2, 0]), smoothing)
    log_p = logits.detach().log_softmax(-1)
    picked = log_p.gather(2, labels.unsqueeze(-1)).squeeze(-1)
    per_token = -(1 - smoothing) * picked - smoothing * log_p.mean(-1)
    want = torch.stack([per_token[b, :n].sum() / 5 for b, n in enumerate([5, 2, 0])])
    torch.testing.assert_close(loss, want)
    loss.sum().backward()
    assert (logits.grad[1, 2:] == 0).all()
    assert (logits.grad[2] == 0).all()


def test_a_loss_that_is_not_finite_stops_before_it_does_harm(pairs):
    trainer = Trainer(build_model(pairs, TINY), TINY, total_steps=10)
    trainer.step(pairs.tensors)
    trainer.model.decoder.dense.bias.data[5] = float("inf")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"the loss must be finite, got (nan|inf) at step 2"):
        trainer.step(pairs.tensors)
    assert all(torch.equal(v, before[n]) for n, v in trainer.model.state_dict().items())
    assert len(trainer.history.losses) == 1


def test_bfloat16_learns_like_float32(pairs):
    settings = dataclasses.replace(TINY, epochs=10)
    curves = []
    for bf16 in (False, True):
        changed = dataclasses.replace(settings, bf16=bf16)
        model = build_model(pairs, changed)
        curves.append(train(model, pairs, changed, progress=False).losses)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert curves[0] != curves[1]
    assert curves[0][0] == pytest.approx(curves[1][0], rel=1e-2)
    assert sum(curves[1][-8:]) == pytest.approx(sum(curves[0][-8:]), rel=0.3)
    assert curves[1][-1] < 0.7 * curves[1][0]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_are_the_batch(pairs, rows, size):
    batch = Batch(*(tensor[:rows] for tensor in pairs.tensors))
    model = build_model(pairs, TINY).double()
    worlds = [World(rank, size) for rank in range(size)]
    shards = [shard(batch, world) for world in worlds]
    assert all(len(part.source) >= 1 for part in shards)
    trainer = Trainer(model, TINY, 1)
    whole, parts = (sum(trainer.loss(b) for b in group) for group in ([batch], shards))
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"num_hiddens": 1.5}, "num_hiddens must be an integer, got float"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"attention": "self"}, "attention must be one of 'additive', 'dot', 'none', got 'self'"),
        ({"schedule": "linear"}, "schedule must be one of 'cosine', 'constant'"),
    ],
)
def test_settings_out_of_range(changes, said):
    with pytest.raises((ValueError, TypeError), match=said):
        Settings(**changes)


def test_a_tiny_run_learns_and_repeats(pairs, trained):
    _, history = trained
    assert len(history.losses) == len(history.seconds) == 40 * math.ceil(len(pairs) / 32)
    assert history.losses[0] == pytest.approx(math.log(len(pairs.target_vocab)), rel=0.3)
    assert sum(history.losses[-10:]) / 10 < 0.05
    assert history.tokens_per_second > 0
    short = dataclasses.replace(TINY, epochs=1)
    first, second = (
        train(build_model(pairs, short), pairs, short, progress=False).losses for _ in range(2)
    )
    assert first == second
    seeds = [dataclasses.replace(TINY, seed=seed) for seed in (0, 1)]
    one, other = (build_model(pairs, settings).decoder.dense.weight for settings in seeds)
    assert not torch.equal(one, other)


def test_training_leaves_the_global_random_state_alone(pairs):
    settings = dataclasses.replace(TINY, epochs=1, dropout=0.1)
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    train(build_model(pairs, settings), pairs, settings, progress=False)
    assert torch.equal(torch.rand(3), want)


def test_the_gradient_is_clipped_and_the_rate_falls(pairs):
    trainer = Trainer(build_model(pairs, TINY), TINY, total_steps=10)
    batch = pairs.tensors
    rates = []
    for _ in range(11):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.step(batch)
        grads = [p.grad for p in trainer.model.parameters()]
        assert torch.stack([g.norm() for g in grads]).norm() <= TINY.clip * 1.001
    assert rates[0] == pytest.approx(TINY.lr)
    assert rates[-1] == pytest.approx(TINY.lr / 20)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_backends_give_the_same_losses(pairs, cell):
    settings = dataclasses.replace(TINY, cell=cell, epochs=10)
    names = backends.available()
    compared = compare_training(pairs, settings, names, steps=25)
    losses = {name: trainer.history.losses for name, trainer in compared.items()}
    assert relative_difference([1.0, 2.0], [1.0, 2.5]) == 0.2
    for name in names:
        assert len(losses[name]) == 25
        assert relative_difference(losses[name], losses["reference"]) <= 1e-3
        assert min(compared[name].history.seconds) > 0
    # and they are the first losses of the training itself
    with backends.use("reference"):
        whole = train(build_model(pairs, settings), pairs, settings, progress=False).losses
    assert whole[:25] == losses["reference"]


def test_translate_gives_tokens_and_where_they_looked(pairs, trained):
    model, _ = trained
    texts = ["March 3", "October 7", "May 1"]
    args = (pairs.source_vocab, pairs.target_vocab, pairs.tensors.source.shape[1], 8)
    model.train()
    results = translate(model, texts, *args, batch_size=2)
    assert model.training
    assert ["".join(r.tokens) for r in results] == ["03-3", "10-7", "05-1"]
    for text, result in zip(texts, results, strict=True):
        assert "".join(result.source) == text
        assert result.weights.shape == (4, len(text))
        assert result.weights.sum(-1).max() <= 1.0 + 1e-6
        assert result.weights[:2].argmax(-1).max() < text.index(" ") + 1  # the month is read there
    assert translate(model, [], *args) == []


@pytest.mark.parametrize(("silence", "lines"), [(60.0, 0), (-1.0, 3)])
def test_a_long_epoch_shows_that_it_goes_on(silence, lines, pairs, capsys, monkeypatch):
    settings = dataclasses.replace(TINY, epochs=1)  # of four steps
    monkeypatch.setattr("bahdanau_fast.seq2seq.training.trainer._SILENCE", silence)
    train(build_model(pairs, settings), pairs, settings)
    *steps, epoch = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"epoch 1/1  loss \S+  \S+ tokens/s", epoch)
    assert [line.partition("  loss ")[0] for line in steps] == [
        f"step {n} of 4" for n in range(1, lines + 1)
    ]


@pytest.mark.parametrize("judged", [False, True])
def test_a_small_demo(judged, tmp_path, capsys, monkeypatch):
    settings = Settings(embed_size=8, num_hiddens=16, epochs=1, batch_size=32)
    sizes = demo.DemoSizes(train=200, held_out=10, compared_steps=5)
    if judged:  # 200 dates teach too little for that
        monkeypatch.setattr(demo, "DemoSizes", lambda: sizes)
    assert demo.run(tmp_path / "deep" / "out", settings, sizes) != judged
    printed = capsys.readouterr().out
    assert printed.startswith("a smoke run: too small to learn dates") != judged
    assert printed.count(" -> ") == printed.count("WRONG") == 10 * judged
    assert "\r" not in printed
    assert ("FAIL  exact match" if judged else "----  exact match") in printed
    assert "PASS  largest relative difference of the losses over 5 steps" in printed
    figures = json.loads((tmp_path / "deep" / "out" / "demo.json").read_text())
    assert figures["loss_max_relative_difference"] <= 1e-3
    assert 0 <= figures["exact_match"] <= 1
    of_steps, of_attention = (figures[f"median_{name}_seconds"] for name in ("step", "attention"))
    for name, step in of_steps.items():
        times = rf"{step * 1e3:.2f} ms +{of_attention[name] * 1e3:.2f} ms"
        assert re.search(rf"^  {name} +{times}$", printed, re.MULTILINE), printed
    assert figures["versions"]["torch"] == torch.__version__
    for name in ("attention.png", "loss.png"):
        assert (tmp_path / "deep" / "out" / name).stat().st_size > 10_000
