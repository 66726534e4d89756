"""Modules in place: the class becomes a subclass of it, of the same name, that watches calls.

Attributes, parameters, buffers and hooks are not touched, and ``copy``, ``pickle`` and
``nn.DataParallel``, which make modules anew from class and attributes, keep working. The user's
forward runs once per call, on the real objects. First calls of a kind run as they are and are
noted; what was found is proved and timed afterwards; later calls have a tape.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast import checks
from bahdanau_fast.fuse.find import Piece, summed
from bahdanau_fast.fuse.graph import ACTIVATIONS, Graph, Left, Recorder, Ref, Sizes, state
from bahdanau_fast.fuse.late import AVAILABLE, replace_functions, restore_functions
from bahdanau_fast.fuse.plan import Plan, find_plan, plan
from bahdanau_fast.fuse.probe import small_sizes
from bahdanau_fast.fuse.prove import Times, prove, times
from bahdanau_fast.fuse.report import NOTED, Kind, Record
from bahdanau_fast.fuse.tape import Player, Tape, fits
from bahdanau_fast.modules.base import Unscriptable

__all__ = ["put_back", "record_of", "watch"]

_RECORD = "_bahdanau_fast"
# Attributes that every module has.
_INSIDE = {_RECORD, *vars(nn.Module())}
_here = threading.local()

# Seconds of a call put off and of any other, on a tape.
_PUT_OFF, _CALL = 4e-6, 1.5e-6
# Calls that show no sum under an activation, after which a module is no longer watched.
_DULL = 2
# The same where there is a sum against a vector, which may be fused in calls of another kind.
_NEAR = 8
# Arguments besides tensors that tell a kind of call.
_USUAL = (bool, int, type(None))
# First calls are looked at once they have taken so many seconds, or have a sum of so many elements.
_SECONDS, _ELEMENTS = 3e-3, 1 << 17
_SHARE = 4
# Elements of a sum that is looked at in its own sizes, at most, where it has no smaller ones.
_LARGEST = 1 << 20
# Kinds of calls of a module that are remembered.
_KINDS = 512
# Ways of a kind that are remembered.
_TAPES = 4


class _Watched(Unscriptable):
    """In front of the class of a module that is watched."""

    _original: type[nn.Module]
    _instead = "its own code is back after bahdanau_fast.unfuse(model): call that first"

    def __init_subclass__(cls, **_: Any) -> None:
        """No registry of the user's hears of it."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, kept, *others = tuple(super().__reduce_ex__(protocol))
        named = {name: each for name, each in kept.items() if name != _RECORD}
        record = kept.get(_RECORD)
        given = None if record is None else (record.name, record.always)
        return (_make, (self._original, given), named, *others)


def _make(original: type[nn.Module], given: tuple[str, bool] | None) -> nn.Module:
    """An empty module of a watched class, for ``copy`` and ``pickle`` to fill."""
    made: nn.Module = object.__new__(_class_of(original))
    if given is not None:
        _set(made, Record(given[0], original.__name__, given[1]))
    return made


def _set(module: nn.Module, record: Record) -> None:
    replace_functions()
    _watched[id(module)] = module
    module.__dict__[_RECORD] = record


# While there is one, functions of torch are replaced.
_watched: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
# One class for all modules of a class, so that copies are of the same class.
_classes: dict[Any, Any] = {}


def _class_of(original: Any) -> Any:
    """The class of a watched module."""
    if original in _classes:
        return _classes[original]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = self.__dict__.get(_RECORD)
        if record is None or not _is_plain():
            return original.forward(self, *args, **kwargs)
        outer = getattr(_here, "outer", None)
        if outer is None:
            return _forward(self, record, original.forward, args, kwargs)
        if type(outer) is not Recorder:
            return original.forward(self, *args, **kwargs)
        span = _Span(outer.graph, self, record, args, kwargs)
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            span.end = len(outer.graph.nodes)
            outer.spans.append(span)

    body = {
        "forward": forward,
        "_original": original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    made = _classes[original] = type(original)(original.__name__, (_Watched, original), body)
    return made


def _is_plain() -> bool:
    """Whether a call may be watched: nobody else watches, or traces, or saves tensors his way."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not checks.in_transform(False)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


class _Span:
    """The calls that a watched module made, of all that were noted."""

    def __init__(self, graph: Graph, module: Any, record: Record, args: Any, kwargs: Any) -> None:
        self.module, self.record, self.graph = module, record, graph
        with torch._C.DisableTorchFunction():
            self.kind = _kind(module, record, args, kwargs)
            self.given = graph.noted((args, kwargs))
        self.begin = self.end = len(graph.nodes)
        self.pieces: list[tuple[Piece, Plan, Times, Record]] = []
        self.own = self.near = False  # whether a piece is of no module within; or nearly one

    def __len__(self) -> int:
        return self.end - self.begin


def _kind(module: nn.Module, record: Record, args: Any, kwargs: Any) -> Any:
    """What decides about the way that a module takes, as far as that can be seen before."""
    return _mode(module, record), state(), *map(_kind_of, args), *map(_kind_of, kwargs.values())


def _mode(module: nn.Module, record: Record) -> Any:
    """Of a module; where its calls took several ways, what it holds from call to call may tell."""
    if not record.varies:
        return module.training
    held = [type(x) for name, x in vars(module).items() if name not in _INSIDE]
    return module.training, *held


def _kind_of(x: Any) -> Any:
    if isinstance(x, Tensor):
        shape = None if x.is_nested else x.shape
        return shape, x.layout, x.dtype, x.device, x.requires_grad
    if type(x) in (tuple, list):
        return tuple(map(_kind_of, x[:8]))
    if isinstance(x, dict):
        return tuple((name, _kind_of(each)) for name, each in x.items() if isinstance(name, str))
    return x if x is None or isinstance(x, (bool, str)) else type(x)


def _forward(module: Any, record: Record, own: Any, args: Any, kwargs: Any) -> Any:
    last = record.last
    same = last is not None and last[0] == _mode(module, record)
    if same and last[1].fits(args, kwargs, None, None):
        if last[2].pays or _captured(args):
            return _play(last[1], last[2], record, own, module, args, kwargs)
        return own(module, *args, **kwargs)
    name = _kind(module, record, args, kwargs)
    kind = record.kinds.get(name)
    wanted = kind is None or kind.wanted
    if wanted and (record.always or record.due <= 0) and not _captured(args):
        return _first(record, own, module, args, kwargs)
    if kind is not None and kind.tapes:
        tape = kind.tapes[0]
        record.last = None if tape.fits is None else (name[0], tape, kind)
        if kind.pays or _captured(args):
            return _play(tape, kind, record, own, module, args, kwargs)
    begin = time.perf_counter()
    result = own(module, *args, **kwargs)
    seconds = time.perf_counter() - begin
    record.due -= seconds
    record.seconds += seconds
    if kind is not None:
        kind.wanted |= seconds > kind.limit
    return result


def _captured(args: Any) -> bool:
    """Whether a CUDA graph is captured, in which the host's time does not count."""
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in args)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _play(
    tape: Tape, kind: Kind, record: Record, own: Any, module: Any, args: Any, kwargs: Any
) -> Any:
    spans: list[_Span] = []

    def note() -> Recorder | None:
        """Another way, of which every call may be noted."""
        if kind.noted >= NOTED or record.due > 0:
            return None
        recorder = Recorder()
        spans.append(_Span(recorder.graph, module, record, args, kwargs))
        return recorder

    player, begin = Player(tape, kind.tapes, record, note), time.perf_counter()
    _here.outer = player
    try:
        with player:
            return own(module, *args, **kwargs)
    finally:
        _here.outer = None
        player.end()
        why = next((each.failed for each in player.tape.pieces.values() if each.failed), None)
        if player.kept:
            why = "something of it is kept after the call"
        elif player.missed is not None or player.at != player.tape.length:
            why = f"its calls take many ways, by {player.missed}"
        if why is not None:
            seconds = time.perf_counter() - begin
            record.due -= seconds
            record.miss(kind, player.tape, why, player.kept)
            for span in spans:
                span.end = len(span.graph.nodes)
                _look_safely(span.graph, spans, seconds)
        else:
            kind.hits += 1
            if player.tape is not tape:  # the next call begins as this one did
                kind.tapes.sort(key=lambda each: each is not player.tape)
                record.last = None


def _first(record: Record, own: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """A first call of a kind: it runs as it is, and is noted; what it shows is looked at after."""
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        return own(module, *args, **kwargs)  # lazy layers get their sizes
    start, recorder = time.perf_counter(), Recorder()
    span = _Span(recorder.graph, module, record, args, kwargs)
    _here.outer = recorder
    try:
        with recorder:
            begin = time.perf_counter()
            result = own(module, *args, **kwargs)
            seconds = time.perf_counter() - begin
    finally:
        _here.outer = None
    span.end = len(recorder.graph.nodes)
    _look_safely(recorder.graph, [*recorder.spans, span], seconds)
    # What noting takes is at most some times what the calls take until the next is noted.
    record.due = min((time.perf_counter() - start - seconds) / _SHARE, _SECONDS)
    return result


def _look_safely(graph: Graph, spans: list[_Span], seconds: float) -> None:
    """Look; an error of ours is no error of the user's call, which has returned."""
    try:
        with torch._C.DisableTorchFunction():
            _look(graph, spans, seconds)
    except Exception as error:
        spans[-1].record.leave("", f"cannot be looked at: {type(error).__name__}: {error}")
        put_back(spans[-1].module)


def _look(graph: Graph, spans: list[_Span], seconds: float) -> None:
    """What the calls of some modules show."""
    found = {i: summed(graph, i) for i, n in enumerate(graph.nodes) if n.name in ACTIVATIONS}
    sums = {i: repeats for i, (several, repeats) in found.items() if several}
    record = spans[-1].record
    record.seconds += seconds
    large = any(graph.values[v].numel >= _ELEMENTS for i in sums for v in graph.nodes[i].out)
    if sums and not (record.at_once or large or record.seconds >= _SECONDS):
        return  # so small that looking costs more than there is to gain
    firsts = {(id(span.record), span.kind): span for span in reversed(spans)}
    for i, repeats in sums.items():
        # Of the innermost module that shows it; what is called in a loop, once.
        inside = sorted((s for s in spans if s.begin <= i < s.end), key=_Span.__len__)
        if inside[0] in firsts.values():
            _look_at(graph, i, inside, repeats)
    for span in firsts.values():
        record = span.record
        record.dull = 0 if span.own else record.dull + 1
        record.near |= span.near
        if span.own or record.near or record.kinds:
            _settle(graph, span, seconds)
        else:
            record.state = "left" if record.reasons else "none"
        if record.dull >= (_NEAR if record.near else _DULL) and not any(
            k.tapes for k in record.kinds.values()
        ):
            put_back(span.module)


def _look_at(graph: Graph, i: int, inside: list[_Span], repeats: bool) -> None:
    """One sum, in the modules that it is in, from the innermost."""
    left: list[tuple[str, bool]] = []  # no exceptions, which would hold what was noted
    for owner in inside:
        try:
            found = _piece(graph, i, owner)
        except Exception as error:  # of our own part: the user's forward has returned
            text = str(error) if isinstance(error, Left) else f"{type(error).__name__}: {error}"
            left.append((text, getattr(error, "near", False)))
            continue
        owner.own = True
        owner.record.found(graph, found[0], found[2])
        for span in inside[len(left) :]:
            span.pieces.append((*found, owner.record))
        return
    text, near = left[0]
    inside[0].near |= near
    if repeats or near:
        inside[0].record.leave(graph.nodes[i].place, text)


def _piece(graph: Graph, i: int, span: _Span) -> tuple[Piece, Plan, Times]:
    """What was found around an activation in the calls of a module, proved and timed."""
    sizes, record = small_sizes(graph, i), span.record
    n = graph.values[graph.nodes[i].refs()[0]].numel
    kind = record.kinds.get(span.kind)
    calls, kept = range(span.begin, span.end), set() if kind is None else kind.pinned
    form = i, *kept, *(_form(graph, j, sizes) for j in calls)
    known = record.proved.get(form)  # at these sizes or at others
    if known is not None:
        piece, timed, took = known
        made = plan(graph, piece, sizes, sizes.full)
    else:
        pinned = {span.begin + j for j in kept}
        try:
            piece, made = find_plan(graph, i, sizes, calls, pinned)
        except (Left, RuntimeError, LookupError):
            if not sizes.small or n > _LARGEST:
                raise
            sizes = Sizes({})
            piece, made = find_plan(graph, i, sizes, calls, pinned)
        span.near = True  # whatever fails from here on
        inside = {v for i in piece.late for v in graph.nodes[i].out}
        for v in inside - {piece.scores, piece.weights}:
            graph.values[v].loosen()  # it needs no memory any longer
        timed, took = 0, None
        prove(graph, piece, sizes, made)
    if not timed / 4 < n < 4 * timed:
        timed, took = n, times(graph, piece, sizes, made)
    if sizes.small:
        record.proved[form] = piece, timed, took
    return piece, made, Times(*(seconds * n / timed for seconds in took))


def _form(graph: Graph, i: int, sizes: Sizes) -> Any:
    """What is the same of a call at other sizes."""
    node = graph.nodes[i]
    values = [graph.values[v] for v in node.refs()]
    # What is counted by a size that stays holds for that one alone.
    told = {n: -new for n, new in sizes.small.items()}
    kinds = [(v.dtype, v.device, v.requires_grad, *map(told.get, v.shape, v.shape)) for v in values]
    return node.name, repr(sizes.arguments(node)), node.out, node.writes, node.state, *kinds


def _settle(graph: Graph, span: _Span, seconds: float) -> None:
    """What is known of a kind of call now: its tape, and whether that pays."""
    record, pieces = span.record, span.pieces
    if len(record.kinds) >= _KINDS:
        record.kinds.clear()
        record.proved.clear()
    kind = record.kinds.setdefault(span.kind, Kind())
    kind.note(seconds)
    if not span.own:
        return
    price = _CALL * len(span) + _PUT_OFF * sum(len(piece.late) for piece, *_ in pieces)
    took = Times(*map(sum, zip(*(took for *_, took, _ in pieces), strict=True)))
    kind.took = took._replace(fused=took.fused + price, fused_trained=took.fused_trained + price)
    try:
        tape = Tape(graph, span.begin, span.end, pieces, record.caches)
    except Left as why:
        record.leave("", str(why))
        return
    (args, kwargs), then = span.given, span.kind[1]
    if all(isinstance(x, (*_USUAL, Ref)) for x in (*args, *kwargs.values())):
        tape.fits = fits(graph, args, kwargs, then)
    if all(each.told != tape.told for each in kind.tapes):
        kind.tapes = [tape, *kind.tapes[: _TAPES - 1]]
    record.judge(kind)


def watch(module: nn.Module, record: Record) -> None:
    """Watch a module from its next call on."""
    if AVAILABLE:
        module.__class__ = _class_of(type(module))
        _set(module, record)
    else:
        record.leave("", "this PyTorch lacks what putting off rests on")


def record_of(module: nn.Module) -> Record | None:
    """Of a watched module; None for another."""
    return module.__dict__.get(_RECORD) if isinstance(module, _Watched) else None


def put_back(module: nn.Module) -> None:
    """Give a watched module its own class, and so its ``forward``, back."""
    if isinstance(module, _Watched):
        module.__dict__.pop(_RECORD, None)
        _watched.pop(id(module), None)
        if not _watched:
            restore_functions()
        if type(module) is _classes.get(module._original):  # else it is a subclass of the user's
            module.__class__ = module._original  # type: ignore[assignment]
