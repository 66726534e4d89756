"""The course's BLEU by hand, corpus scores by sacrebleu."""

import math
import sys

import pytest

from bahdanau_fast.seq2seq import bleu, corpus_scores


@pytest.mark.parametrize(
    ("pred", "label", "k", "score"),
    [
        ("il est calme .", "il est calme .", 2, 1.0),
        ("il est paresseux .", "il est calme .", 2, (3 / 4) ** 0.5 * (1 / 3) ** 0.25),
        ("va", "va !", 1, math.exp(1 - 2)),  # too short
        ("a a a a", "a b", 1, (1 / 4) ** 0.5),  # an n-gram counts as often as the label has it
        ("a b c d", "a b", 2, (2 / 4) ** 0.5 * (1 / 3) ** 0.25),  # too long: no penalty of its own
        ("a b", "c d", 2, 0.0),
        ("b a", "a b", 2, 0.0),
        ("va !", "va !", 4, 1.0),  # fewer tokens than k: as far as they go
        ("a", "a b", 2, math.exp(1 - 2)),
        ("", "a", 1, 0.0),
        ("a", "", 1, 0.0),
    ],
)
def test_course_bleu(pred, label, k, score):
    assert bleu(pred, label, k) == pytest.approx(score)
    # A token may be a space.
    pred, label = ([word.replace("a", " ") for word in text.split()] for text in (pred, label))
    assert bleu(pred, label, k) == pytest.approx(score)


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (1.5, TypeError)])
def test_bad_k(k, error):
    with pytest.raises(error, match="k must be"):
        bleu("a", "a", k)


def test_corpus_scores_are_those_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    ours, truth = ["le chat dort .", "il est calme ."], ["le chat dort bien .", "il est calme ."]
    scores = corpus_scores(ours, truth)
    assert scores.bleu == pytest.approx(sacrebleu.corpus_bleu(ours, [truth]).score)
    assert scores.chrf == pytest.approx(sacrebleu.corpus_chrf(ours, [truth]).score)
    assert "tok:13a" in scores.signature
    chinese = corpus_scores(["我们走吧。"], ["我们走吧。"], chinese=True)
    assert "tok:zh" in chinese.signature
    assert chinese.bleu == pytest.approx(100)
    for bad in ([], ["a"]):
        with pytest.raises(ValueError, match="hypotheses must be as many as references, 2"):
            corpus_scores(bad, ["a", "b"])


def test_a_missing_sacrebleu_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ModuleNotFoundError, match="pip install sacrebleu"):
        corpus_scores(["a"], ["a"])
