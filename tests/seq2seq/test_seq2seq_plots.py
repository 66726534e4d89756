"""Pictures of attention and of losses: what is drawn, on which axes."""

import re

import pytest
import torch
from threads import one_thread  # noqa: F401

from bahdanau_fast.seq2seq import Pairs, Settings, build_model, show_heatmaps, translate
from bahdanau_fast.seq2seq.cli import plots
from bahdanau_fast.seq2seq.search.beam import Beam
from bahdanau_fast.seq2seq.search.translator import Translation


def falling(steps, low, high=7.0):
    """Losses that fall evenly on a logarithmic axis."""
    return [high * (low / high) ** (i / max(1, steps - 1)) for i in range(steps)]


def validated(losses, top=20.0):
    return [
        {"epoch": i, "loss": loss, "bleu": top * (1 - 1 / i), "chrf": 2 * top * (1 - 1 / i)}
        for i, loss in enumerate(losses, 1)
    ]


CASES = {
    "one step": ([4.2], validated([4.0]), 1),
    "one epoch": (falling(16, 3.0), validated([3.0]), 1),
    "few epochs": (falling(48, 2.0), validated(falling(3, 2.0, 3.0)), 2),
    "many epochs": (falling(12_000, 1.9), validated(falling(200, 1.7, 4.0)), 120),
    "near zero": (falling(3_000, 1e-5), validated(falling(20, 1e-4)), 20),
    "zero": ([0.0] * 30, validated([0.0, 0.0]), 1),
    "just above zero": ([0.5, 0.1, 0.06], validated([0.5, 0.06]), 2),
    "not validated": (falling(300, 1.0), [], None),
}


@pytest.mark.parametrize("name", CASES)
def test_axes_hold_their_curves_and_the_history_and_have_round_ticks_in_plain_words(name):
    losses, validations, best = CASES[name]
    figure = plots.training_curves(losses, validations, best)
    figure.draw_without_rendering()
    for axes in figure.axes:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        assert left >= 0
        assert bottom >= 0
        for line in axes.lines:
            if line.get_label().startswith("best.pt"):
                continue
            assert all(left <= x <= right for x in line.get_xdata())
            assert all(bottom <= y <= top for y in line.get_ydata())
        for axis, low, high in ((axes.xaxis, left, right), (axes.yaxis, bottom, top)):
            ticks = [tick for tick in axis.get_ticklocs() if low <= tick <= high]
            assert 1 <= len(ticks) <= 12
            assert axis is axes.yaxis or all(tick == int(tick) for tick in ticks)
            for label in axis.get_ticklabels():
                assert re.fullmatch(r"[\d,]+(\.\d+)?", label.get_text())
            assert not [label for label in axis.get_ticklabels(minor=True) if label.get_text()]
    training = figure.axes[0].lines
    assert list(training[0].get_ydata()) == losses
    assert list(training[0].get_xdata()) == list(range(1, len(losses) + 1))
    if not validations:
        assert len(figure.axes) == 1
        return
    loss, scores = figure.axes[1:]
    assert list(loss.lines[0].get_ydata()) == [v["loss"] for v in validations]
    marks = [line for line in loss.lines if line.get_label().startswith("best.pt")]
    assert [int(mark.get_xdata()[0]) for mark in marks] == ([] if best is None else [best])
    assert [line.get_label() for line in scores.lines] == ["BLEU", "chrF"]
    assert list(scores.lines[0].get_ydata()) == [v["bleu"] for v in validations]


def test_means_are_those_of_whole_windows():
    losses = [float(i % 7) + 1 for i in range(205)]
    _, means = plots.training_curves(losses, []).axes[0].lines
    assert means.get_label() == "mean of 4 steps"
    assert len(means.get_ydata()) == 51
    assert means.get_ydata()[1] == sum(losses[4:8]) / 4
    assert means.get_xdata()[1] == (5 + 8) / 2


def test_heatmaps():
    figure = show_heatmaps(torch.eye(4).reshape(1, 1, 4, 4), "keys", "queries", ["one"])
    image = figure.axes[0].images[0]
    assert torch.equal(torch.tensor(image.get_array().tolist()), torch.eye(4, dtype=torch.float))
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("keys", "queries")
    with pytest.raises(ValueError, match="matrices must have 4 dimensions"):
        show_heatmaps(torch.eye(4), "keys", "queries")


@pytest.fixture(scope="module")
def translations():
    """Short sources, one as long as the model reads, one longer; greedy and by beams."""
    texts = [("go now", "va"), ("run", "cours"), ("stop it now", "arrête")]
    pairs = Pairs.of(texts)
    model = build_model(pairs, Settings(embed_size=8, num_hiddens=12))
    sources, args = ["go", "stop it", "go now go"], (pairs.source_vocab, pairs.target_vocab, 7, 5)
    return [
        translation
        for beam in (None, Beam(2))
        for translation in translate(model, sources, *args, beam=beam)
    ]


def test_the_end_of_the_sentence_is_drawn(translations):
    for translation in translations:
        axes = plots.alignments([translation], ["a title"], "a heading").axes[0]
        labels = [label.get_text() for label in axes.get_xticklabels()]
        signs = ["·" if sign == " " else sign for sign in translation.source]
        assert labels == signs + ["<eos>"] * (len(translation.source) < 7)
        words = ["·" if sign == " " else sign for sign in translation.tokens]
        assert [label.get_text() for label in axes.get_yticklabels()] == words
        image = torch.tensor(axes.images[0].get_array().tolist())
        assert image.shape == (len(translation.tokens), len(labels))
        torch.testing.assert_close(image.sum(1), torch.ones(len(translation.tokens)))


def test_what_no_font_draws_is_a_box_and_is_said(monkeypatch):
    monkeypatch.setattr(plots, "_fonts", lambda: (("DejaVu Sans",), frozenset(map(ord, "go va"))))
    translation = Translation(["go", "们"], ["va"], torch.ones(1, 2) / 2)
    figure, note = plots.attention_figure([translation])
    assert note.startswith("no font here draws 们 (□ in the picture); --font FILE names one")
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["go", "□"]
