"""Scores of translations: the course's BLEU of one text, corpus BLEU and chrF of many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.extras import require


def bleu(pred: str | Sequence[str], label: str | Sequence[str], k: int) -> float:
    """The course's BLEU of one text: ``exp(min(0, 1 - m/n)) prod_{i<=min(k,n)} p_i^(1/2^i)``.

    n and m are the lengths of prediction and label, p_i the share of the prediction's i-grams
    that the label has too, each counted as often as the label has it (after Papineni et al. 2002).

    Args:
        pred: predicted tokens; a string is split at spaces.
        label: true tokens, likewise.
        k: the longest n-grams.

    Returns:
        Between 0 and 1. 0 for an empty prediction.

    Raises:
        TypeError, ValueError: ``k`` is no integer of at least 1.

    >>> bleu("il est calme .", "il est calme .", 2), bleu("va !", "allez !", 2)
    (1.0, 0.0)
    """
    checks.positive_int("k", k)
    words, wanted = (x.split() if isinstance(x, str) else list(x) for x in (pred, label))
    if not words:
        return 0.0
    score = math.exp(min(0.0, 1.0 - len(wanted) / len(words)))
    for n in range(1, min(k, len(words)) + 1):
        ours, theirs = (
            Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
            for tokens in (words, wanted)
        )
        score *= ((ours & theirs).total() / ours.total()) ** (0.5**n)
    return score


@dataclass(frozen=True)
class CorpusScores:
    """BLEU and chrF of a corpus, 0 to 100, and what sacrebleu needs to give this BLEU again."""

    bleu: float
    chrf: float
    signature: str


def corpus_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, chinese: bool = False
) -> CorpusScores:
    """Corpus BLEU and chrF by sacrebleu (Post 2018; Popović 2015).

    Args:
        hypotheses: translations.
        references: what they should be, one each.
        chinese: cut into characters, as sacrebleu does for Chinese; else its "13a" words.

    Raises:
        ModuleNotFoundError: sacrebleu is not installed.
        ValueError: nothing to score, or lengths that differ.
    """
    sacrebleu = require("sacrebleu", "BLEU needs")
    if not hypotheses or len(hypotheses) != len(references):
        need = f"be as many as references, {len(references)}, and at least one"
        checks.reject(ValueError, "hypotheses", need, len(hypotheses))
    # Both sides are joined tokens, which would make sacrebleu warn.
    metric = sacrebleu.BLEU(tokenize="zh" if chinese else "13a", force=True)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    chrf = sacrebleu.CHRF().corpus_score(list(hypotheses), [list(references)])
    return CorpusScores(score.score, chrf.score, str(metric.get_signature()))
