"""A page for a browser: point at a word of a translation and see where it looked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.search.translator import Translation, shown


def attention_page(translations: Sequence[Translation]) -> str:
    """HTML that shows attention weights word by word, in one file that needs no network.

    With translations of ``Beam(record=True)`` it also shows each step of the search. The address
    names what is selected, counted from 0: ``#s=0&t=2`` is target token 2 of sentence 0, ``k=1``
    in place of ``t=2`` source token 1; ``b=3&h=1`` in front of these is hypothesis 1 of step 3.

    Args:
        translations: from a :class:`Translator`; or of your own, with ``weights`` of shape
            (target tokens, source tokens).

    Raises:
        ValueError: no translation; one without tokens or weights; weights of another shape, or
            that are not finite.

    >>> import torch
    >>> translation = Translation(["it", "is"], ["c'est"], torch.tensor([[0.2, 0.8]]))
    >>> "c'est" in attention_page([translation])
    True
    """
    if not translations:
        checks.reject(ValueError, "translations", "hold at least one", 0)
    text = json.dumps([_sentence(t) for t in translations], separators=(",", ":"))
    template = resources.files(__package__).joinpath("attention.html").read_text(encoding="utf-8")
    # No token can end the element that holds the data: each "<" is written as an escape.
    return template.replace("{DATA}", text.replace("<", "\\u003c"))


def _sentence(translation: Translation) -> dict[str, Any]:
    source, weights = shown(translation)
    steps = [
        [(a.token, a.parent, round(a.score, 3), _rounded(a.weights)) for a in step]
        for step in translation.steps or ()
    ]
    rows = [_rounded(row) for row in weights.tolist()]
    return {"source": source, "target": translation.tokens, "weights": rows, "steps": steps}


def _rounded(row: Sequence[float]) -> list[float]:
    if not all(map(math.isfinite, row)):
        checks.reject(ValueError, "weights", "be finite", list(row))
    return [round(weight, 4) for weight in row]
