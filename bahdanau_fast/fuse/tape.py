"""A tape: the calls of a kind of call, those of a fused piece put off until the operator runs.

Each call is compared with the noted one by a function made of it. Equal ones are put off without
further rules; any other is made as the user wrote it, after all that was put off.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode

from bahdanau_fast.fuse.caches import Caches
from bahdanau_fast.fuse.find import Piece
from bahdanau_fast.fuse.graph import Graph, Node, Ref, State, Value, mapped, need, tensors
from bahdanau_fast.fuse.late import KEPT, QUERIES, Late, become, compute, make
from bahdanau_fast.fuse.plan import Plan
from bahdanau_fast.fuse.prove import as_before

__all__ = ["Player", "Tape", "fits"]

REAL, NOTED, PUT_OFF, SAME, CHANGED, RUN = range(6)
_NONE: dict[str, Any] = {}
_ANOTHER: tuple[Any, int, Any, Any] = None, REAL, None, None


class _Fused:
    """A piece on a tape.

    Attributes:
        run: what computes it.
        get: its inputs, of the calls that were put off.
        weights: the call whose late result becomes the weights, or None.
        internal: calls whose results nobody but the piece may keep.
        counted: references to each, at the end of the piece, in a call that kept none of them.
        record: of the module that it is of.
        failed: what the operator says where it does not take the inputs; or None.
    """

    def __init__(self, end: int, run: Any, get: Any, weights: int | None, record: Any) -> None:
        self.end, self.run, self.get, self.weights, self.record = end, run, get, weights, record
        self.internal: list[int] = []
        self.counted: list[int] | None = None
        self.failed: str | None = None

    def give(self, out: dict[int, Late]) -> Any:
        """What makes the weights those that the user holds already."""

        def given(weights: Any) -> Any:
            late: Any = weights if self.weights is None else out[self.weights]
            if type(late) is Late:
                become(late, weights)
            return late

        return given


class Tape:
    """Of a kind of call.

    Attributes:
        steps: (function, what to do, comparison, state) of each call.
        told: the same, as it can be compared with that of another tape.
        fits: tells whether arguments are those of the kind; or None.
    """

    def __init__(
        self,
        graph: Graph,
        begin: int,
        end: int,
        pieces: list[tuple[Piece, Plan, Any, Any]],
        caches: Caches,
    ) -> None:
        nodes = graph.nodes[begin:end]
        self.caches = caches
        self.fits: Any = None
        self.steps: Any = [(n.func, REAL, None, n.state) for n in nodes]
        self.told: list[tuple[Any, ...]] = [(n.func, REAL, "") for n in nodes]
        self.length = len(nodes)
        self.made: dict[int, tuple[Any, torch.dtype, torch.device]] = {}
        self.pieces: dict[int, _Fused] = {}
        self.pool: list[dict[int, Late]] = []
        late: dict[int, int] = {}  # the call that made a late tensor, by number
        for piece, *_ in pieces:
            for i in sorted(piece.late):
                node = graph.nodes[i]
                for before, after in node.writes:
                    late[after] = late[before]
                for v in node.out:
                    if graph.values[v].maker == i:  # not what it was given
                        late.setdefault(v, i - begin)
        comparisons = _Comparisons(graph, late)
        for piece, made, _, record in pieces:
            self._add(graph, begin, piece, made, comparisons, record)
        self.steps.append(_ANOTHER)
        self.numbers = sorted(self.made)

    def _add(
        self,
        graph: Graph,
        begin: int,
        piece: Piece,
        made: Plan,
        comparisons: _Comparisons,
        record: Any,
    ) -> None:
        own = sorted({*piece.late, *piece.before, piece.end})
        given = [(graph.nodes[i].args, graph.nodes[i].kwargs) for i in own]
        where = [
            p for i, x in zip(own, given, strict=True) for p in _parts(x, f"seen[{i - begin}]")
        ]
        paths = {int(x): path for path, x in reversed(where) if type(x) is Ref}
        need(paths.keys() >= {*made.inputs}, "an input is no argument of its calls")
        get = eval(f"lambda seen: ({', '.join(paths[v] for v in made.inputs)},)")
        weights = None if piece.weights is None else comparisons.late.get(piece.weights)
        fused = self.pieces[piece.end - begin] = _Fused(
            piece.end - begin, made.run, get, weights, record
        )
        places: dict[int, str] = {}
        for i in own:
            node, at = graph.nodes[i], i - begin
            kind = SAME if node.single and node.out[0] in tensors(node.args) else PUT_OFF
            kind = CHANGED if node.writes else kind
            kind = NOTED if i in piece.before else RUN if i == piece.end else kind
            if kind == PUT_OFF:
                need(node.single, "gives several tensors")
                value = graph.values[node.out[0]]
                self.made[at] = torch.Size(value.shape), value.dtype, value.device
                if node.out[0] not in piece.soft:
                    fused.internal.append(at)
            source = comparisons.source(node, at, places)
            values = [graph.values[v] for v in node.refs()]
            of = [(v.shape, v.dtype, v.kind, v.requires_grad) for v in values]
            given = mapped(comparisons.alias, (node.args, node.kwargs))
            self.told[at] = node.func, kind, source, repr(given), of
            self.steps[at] = node.func, kind, eval(source, comparisons.names), node.state

    def late(self, player: Player) -> dict[int, Late]:
        """The late tensors of a call: those that nobody kept of an earlier one are used again."""
        found = self.pool.pop() if self.pool else {}
        for i in self.numbers:
            one = found.get(i)
            if one is None:
                one = found[i] = make(*self.made[i])
            one.put_off = player, i
        return found


class Player(TorchFunctionMode):
    """Carries out a call that has tapes.

    Attributes:
        missed: the function that was called where another was noted; None as long as all are equal.
        kept: calls of pieces whose results were kept by somebody.
        noting: what notes a call that is another one from the first function on; or None.
    """

    def __init__(self, tape: Tape, tapes: list[Tape], record: Any, note: Any) -> None:
        super().__init__()
        self.tape, self.steps, self.at = tape, tape.steps, 0
        self.tapes, self.record = tapes, record
        self.missed: str | None = None
        self.noting: Any = None
        self._note = note
        self.kept: set[int] = set()
        self.seen: dict[int, Any] = {}
        self.changes: dict[int, list[int]] = {}
        self.counting: list[tuple[_Fused, list[int]]] = []
        self.out = tape.late(self)

    def __torch_function__(  # noqa: PLR0911  a way for each kind of call
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or _NONE
        if self.missed is not None:
            other = self.noting
            if other is not None:
                return other.__torch_function__(func, types, args, kwargs)
            return func(*args, **kwargs)
        i = self.at
        known, kind, check, _ = self.steps[i]
        if known is not func and func in QUERIES:
            return func(*args, **kwargs)
        self.at = i + 1
        if known is func or known == func:  # what reads an attribute is a new object each time
            if kind == REAL:
                return func(*args, **kwargs)
            if check(args, kwargs, self.out, self.seen):
                self.seen[i] = args, kwargs
                if kind == PUT_OFF:
                    return self.out[i]
                if kind == RUN:
                    return self._run(self.tape.pieces[i])
                if kind == CHANGED:
                    self.changes.setdefault(args[0].put_off[1], []).append(i)
                return func(*args, **kwargs) if kind == NOTED else args[0]
        if not self._changes_tape(i, func, args, kwargs):
            self._miss(i, func)
        return self.__torch_function__(func, types, args, kwargs)

    def _changes_tape(self, i: int, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether another tape has begun alike, and has this call next."""
        begun = self.tape.told[:i]
        for tape in self.tapes:
            known, kind, check, _ = tape.steps[i] if i < len(tape.steps) else _ANOTHER
            if tape is self.tape or known != func or tape.told[:i] != begun:
                continue
            out = {n: one for n, one in self.out.items() if n < i}
            out |= {n: one for n, one in tape.late(self).items() if n >= i}
            if kind == REAL or check(args, kwargs, out, self.seen):
                self.tape, self.steps, self.out, self.at = tape, tape.steps, out, i
                return True
        return False

    def _miss(self, i: int, func: Any) -> None:
        """Another way: whatever this call does, what was put off is done before."""
        self.noting = self._note() if i == 0 else None
        self.missed = str(getattr(func, "__name__", func))
        for j in sorted(self.seen):
            if j in self.out:
                compute(self.out[j])

    def _run(self, fused: _Fused) -> Any:
        seen, out = self.seen, self.out
        counts = [sys.getrefcount(out[i]) for i in fused.internal]
        if fused.counted is None:  # the first time, only who holds what is looked at
            self.counting.append((fused, counts))
        elif fused.failed is None and all(map(operator.le, counts, fused.counted)):
            try:
                made, _ = fused.run(self.tape.caches, fused.give(out), *fused.get(seen))
            except Exception as error:  # the user's own call says what is wrong, if it is his
                fused.failed = f"the operator fails: {error}"
            else:
                fused.record.fused += 1
                for record in () if made.grad_fn is None else {self.record, fused.record}:
                    if not record.trained:
                        made.grad_fn.register_prehook(record.train)
                return made
        args, kwargs = seen[fused.end]
        return self.tape.steps[fused.end][0](*args, **kwargs)

    def compute(self, late: Late) -> None:
        """A late tensor becomes the value of its own call."""
        i = late.put_off[1]
        value = self._call(i)
        held = any(value is x for x in tensors(self.seen[i]))  # ``contiguous`` gave what it took
        become(late, value.view_as(value) if held else value)
        for j in self.changes.get(i, ()):
            self._call(j)

    def _call(self, i: int) -> Any:
        args, kwargs = self.seen[i]
        func, _, _, then = self.tape.steps[i]
        compute((args, kwargs))
        with contextlib.ExitStack() as stack:
            if torch._C._are_functorch_transforms_active():  # it was put off outside of them
                stack.enter_context(temporarily_clear_interpreter_stack())
            stack.enter_context(as_before(then))
            return func(*args, **kwargs)

    def end(self) -> None:
        """Late tensors that somebody holds become values; the others may be used again."""
        out, seen, kept = self.out, self.seen, set()
        changed = {j: i for i, calls in self.changes.items() for j in calls}
        while seen:
            j, given = seen.popitem()  # the last first: it may hold those before
            i = changed.get(j, j)
            one: Any = out.pop(i, None)
            if one is None:
                continue
            held = sys.getrefcount(one) - KEPT
            if held > 0:
                held -= sum(call <= j for call in self.changes.get(i, ()))
                held -= type(one) is not Late and one._use_count() > 1  # by a graph
            if held <= 0:
                out[i] = one
                continue
            kept.add(i)
            if type(one) is Late:
                seen[j] = given
                with contextlib.suppress(Exception):  # it says so to who reads it
                    self.compute(one)
                del seen[j]
        one = given = None
        self.tape.pool.append({i: one for i, one in out.items() if type(one) is Late})
        for fused, counts in self.counting:
            fused.counted = counts
            self.kept |= kept.intersection(fused.internal)


def fits(graph: Graph, args: Any, kwargs: Any, then: State) -> Any:
    """A comparison of a call's arguments with these."""
    comparisons = _Comparisons(graph, {})
    node = Node(None, "", args, kwargs, (), (), True, then)
    return eval(comparisons.source(node, 0, {}), comparisons.names)


# What is compared by its value; anything else has to be the same object.
_PLAIN = (int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, torch.layout)


class _Comparisons:
    """Sources of tests of (args, kwargs, late tensors, earlier arguments).

    Attributes:
        names: of the sources.
    """

    def __init__(self, graph: Graph, late: dict[int, int]) -> None:
        self.values, self.late = graph.values, late
        self.aliases: dict[int, int] = {}
        self.names: dict[str, Any] = dict(
            G=torch.is_grad_enabled, A=torch._C._is_any_autocast_enabled,
            D=torch.get_autocast_dtype, H=torch._C._autograd._top_saved_tensors_default_hooks,
        )  # fmt: skip

    def source(self, node: Node, at: int, places: dict[int, str]) -> str:
        """Of call ``at``. A tensor that is in ``places`` has to be the one that was there."""
        then = node.state
        tests = ["G()" if then.grad else "not G()", "A()" if then.autocast else "not A()"]
        tests += [f"D({kind!r}) is {self.name(dtype)}" for kind, dtype in then.autocast]
        tests += ["H(True) is None"] if then.grad else []
        here: dict[int, str] = {}
        given = (("args", node.args), ("kwargs", node.kwargs))
        parts = [part for path, x in given for part in _parts(x, path)]
        for path, x in parts:
            if type(x) is not Ref:
                tests.append(self.equal(path, x))
            elif x in self.late:
                tests.append(f"{path} is out[{self.late[x]}]")
            elif x in here or x in places:
                tests.append(f"{path} is {here.get(x) or places[x]}")
            else:
                here[x] = path
                tests += self.alike(path, self.values[x])
                tests += [f"{path}.requires_grad is {self.values[x].requires_grad}"] * then.grad
        for x, path in here.items():
            of, rest = (1, path[6:]) if path.startswith("kwargs") else (0, path[4:])
            places.setdefault(x, f"seen[{at}][{of}]{rest}")
        return f"lambda args, kwargs, out, seen: {' and '.join(tests)}"

    def alias(self, x: Any) -> Any:
        """The same in any notes: tensors by the order in which they come."""
        return f"#{self.aliases.setdefault(x, len(self.aliases))}" if type(x) is Ref else x

    def name(self, x: Any) -> str:
        """Of an object, in the sources."""
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name

    def alike(self, path: str, value: Value) -> list[str]:
        """A tensor of the same kind."""
        if not value.usual:
            return ["False"]
        shape, name = torch.Size(value.shape), self.name
        same = f"type({path}) is {name(value.kind)} and {path}.shape == {name(shape)} and "
        same += f"{path}.dtype is {name(value.dtype)}"
        parameter = issubclass(value.kind, nn.Parameter)
        return [f"({path} is {name(value.tensor)} or {same})" if parameter else same]

    def equal(self, path: str, x: Any) -> str:
        """The same value; of what holds others, the same type and length."""
        if type(x) in (tuple, list, dict):
            if path == "kwargs" and not x:
                return "not kwargs"
            tests = [f"type({path}) is {type(x).__name__} and len({path}) == {len(x)}"]
            return " and ".join(tests + [f"{name!r} in {path}" for name in x if type(x) is dict])
        if type(x) is slice:
            return f"type({path}) is slice"
        if x is None or type(x) is bool:
            return f"{path} is {x}"
        name = self.name(x)
        same = f"type({path}) is type({name}) and {path} == {name}"
        return same if isinstance(x, _PLAIN) else f"{path} is {name}"


def _parts(x: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All of some arguments, with the paths to them."""
    yield path, x
    pairs: Any = ()
    if type(x) in (tuple, list):
        pairs = ((f"[{i}]", each) for i, each in enumerate(x))
    elif type(x) is dict:
        pairs = ((f"[{name!r}]", each) for name, each in x.items())
    elif type(x) is slice:
        pairs = ((f".{name}", getattr(x, name)) for name in ("start", "stop", "step"))
    for step, each in pairs:
        yield from _parts(each, path + step)
