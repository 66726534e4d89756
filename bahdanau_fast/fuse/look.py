"""A module's first calls, which run as they are: do they show additive attention, and whose?"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn

from bahdanau_fast.fuse.report import Record
from bahdanau_fast.graphs.find import activates_sum, find
from bahdanau_fast.graphs.graph import ACTIVATIONS, Graph, reason
from bahdanau_fast.graphs.notes import CallRecorder
from bahdanau_fast.graphs.pooling import activates_projection
from bahdanau_fast.graphs.probe import small_sizes

# Calls that show no sum under an activation, after which a module is left for good; the same where
# there is a sum against a vector, which may be fused in calls of another kind.
_DULL, _NEAR = 2, 8
# A module is compiled once its calls took so many seconds, or have a sum of so many elements.
_SECONDS, _ELEMENTS = 0.01, 1 << 20

_thread = threading.local()  # has the recorder of this thread's calls


class _Span:
    """The calls of a module, among all that were recorded."""

    def __init__(self, graph: Graph, record: Record) -> None:
        self.record = record
        self.begin = self.end = len(graph.nodes)

    def __len__(self) -> int:
        return self.end - self.begin


class Look:
    """How a module is called until it is compiled or left."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.looks, self.maybe_later = 0, False
        self.seconds = 0.0  # that calls took which have additive attention

    def __call__(self, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a module."""
        observed, result = looked_at(self.record, module, forward, args, kwargs)
        if observed:
            return result
        begin = time.perf_counter()
        if self.seconds or any(
            isinstance(p, nn.UninitializedParameter) for p in module.parameters()
        ):
            result = forward(module, *args, **kwargs)  # lazy layers get their sizes
            self.took(bool(self.seconds) * (time.perf_counter() - begin))
            return result
        _thread.recorder = recorder = CallRecorder()
        try:
            with recorder:
                _, result = looked_at(self.record, module, forward, args, kwargs)
                seconds = time.perf_counter() - begin
        finally:
            _thread.recorder = None
        try:
            with torch._C.DisableTorchFunction():
                _look(recorder.graph, recorder.spans, seconds)
        except Exception as error:  # of ours: the user's call has returned
            self.record.leave("", f"cannot be looked at: {reason(error)}", True)
        return result

    def took(self, seconds: float, elements: int = 0) -> None:
        """Calls with additive attention took so long: is there something to gain by compiling?"""
        self.seconds += seconds
        if self.seconds and (
            self.record.shared.always or self.record.at_once
            or self.seconds >= _SECONDS or elements >= _ELEMENTS
        ):  # fmt: skip
            self.record.state, self.record.way = "looked", None


def looked_at(
    record: Record, module: Any, forward: Any, args: Any, kwargs: Any
) -> tuple[bool, Any]:
    """Whether a module around this one is looked at, and what this one gives then."""
    recorder = getattr(_thread, "recorder", None)
    if recorder is None:
        return False, None
    span = _Span(recorder.graph, record)
    try:
        return True, forward(module, *args, **kwargs)
    finally:
        span.end = len(recorder.graph.nodes)
        recorder.spans.append(span)


def _look(graph: Graph, spans: list[_Span], seconds: float) -> None:
    """What the calls of some modules show; the last is around the others."""
    activations = [i for i, n in enumerate(graph.nodes) if n.name in ACTIVATIONS]
    sums = {
        i: several and repeats
        for i in activations for several, repeats in [activates_sum(graph, i)]
        if several or activates_projection(graph, i)
    }  # fmt: skip
    firsts = {id(span.record): span for span in reversed(spans)}
    owners: list[_Span] = []
    around = set[int]()  # modules with a sum in them
    for i, repeats in sums.items():
        inside = sorted((s for s in spans if s.begin <= i < s.end), key=_Span.__len__)
        around |= {id(span.record) for span in inside}
        first = inside[0].record
        if firsts[id(first)] is not inside[0]:
            continue  # what is called in a loop is looked at once
        owner, why, maybe_later = _owner(graph, i, inside)
        if owner is not None:
            owners.append(owner)
            if isinstance(owner.record.way, Look):
                owner.record.way.took(seconds, graph.values[graph.nodes[i].out[0]].numel)
        elif isinstance(first.way, Look):
            first.way.maybe_later |= maybe_later
            if repeats or maybe_later:
                first.leave(graph.nodes[i].source, why)
    fused = {id(owner.record) for owner in owners}
    for key, span in firsts.items():
        record, look = span.record, span.record.way
        if key in fused or not isinstance(look, Look):
            continue
        look.looks += 1
        record.state = "left" if record.reasons else "none"
        part = any(owner.begin <= span.begin and span.end <= owner.end for owner in owners)
        others = key in around and bool(owners)
        record.done = part or others or look.looks >= (_NEAR if look.maybe_later else _DULL)


def _owner(graph: Graph, i: int, inside: list[_Span]) -> tuple[_Span | None, str, bool]:
    """The module that is to be compiled for a sum: the innermost that has as much as there is."""
    best, whole, why, maybe_later = None, False, "", False
    for span in inside:
        try:
            piece = find(graph, i, small_sizes(graph, i), range(span.begin, span.end), True)
        except Exception as error:  # of the finder
            if span is inside[0]:
                why, maybe_later = reason(error), getattr(error, "maybe_later", False)
            continue
        if best is None or (piece.context is not None and not whole):
            best, whole = span, piece.context is not None
    return best, why, maybe_later
