"""How a way of table.py is run: calls, the change, and calls again, in each mode."""

import torch

from ways.kinds import KINDS
from ways.sides import AFTER, SMALL, UNFUSED, Pair

MOVED = 1e-5  # of its size; by so much a change has to move the plain module's result


def attend(module, *inputs):
    return module(*inputs)


# One compiled function for every module: a way costs a compilation only where it changes the code.
compiled = torch.compile(attend, backend="aot_eager")


class Run:
    """A way on a pair of sides, at one of its times; ``options`` are those of sides.Pair."""

    def __init__(self, way, when=AFTER, training=True, **options):
        self.way, self.when = way, when
        self.contexts = []  # the plain results, in order; None for a call that failed
        # There is a change between calls; else it is made before them.
        self.between = when == AFTER or way.times > 1
        self.pair = Pair(dtype=way.dtype, **options)
        for side in self.pair.sides:
            side.module.train(training)
        if when != UNFUSED and not self.pair.fuse():
            self.pair.wrong.append("the plain module cannot be fused")

    def prepare(self):
        if self.way.prepare is not None and not self.pair.do("prepare", self.way.prepare):
            self.pair.wrong.append("the plain module cannot be prepared")
        if self.when != AFTER:
            self._change()
        if self.when == UNFUSED:
            self.pair.fuse()

    def call(self, name):
        """A call of each side; its context is pending."""

        def step(side):
            side.pending.append(None)
            context, weights = side.call()
            side.pending[-1] = context
            return context, weights

        self.pair.do(name, step)
        context = self.pair.sides[0].pending[-1]
        self.contexts.append(None if context is None else context.detach().clone())

    def change(self):
        """The way, unless that is done; that the plain module can have it."""
        if self.between:
            self._change()

    def _change(self):
        def step(side):
            with torch.set_grad_enabled(self.way.graph and torch.is_grad_enabled()):
                self.way.change(side)

        if not self.pair.do("change", step):
            self.pair.wrong.append("the plain module cannot have this change")

    def backward(self, name, *which):
        """Backward of the sum of some results."""

        def step(side):
            losses = [side.pending[i].square().sum() for i in which]
            torch.stack(losses).sum().backward()

        self.pair.backward(name, step)

    def ask(self, *names):
        """Gradients of inputs."""
        for side in self.pair.sides:
            for name in names:
                getattr(side, name).requires_grad_()


def _twice_and_twice(run):
    run.prepare()
    for name in ("first", "second"):
        run.call(name)
    run.change()
    for name in ("third", "fourth"):
        run.call(name)


def eager(run):
    with torch.no_grad():
        _twice_and_twice(run)


def trained(run):
    run.ask("queries", "keys", "values")
    run.prepare()
    _train(run)


def encoder(run):
    run.ask("queries", "values")
    run.prepare()
    for side in run.pair.sides:
        side.encode()
    _train(run)


def _train(run):
    for _ in range(run.way.times):
        for side in run.pair.sides:
            side.pending.clear()
        _around_a_change(run)


def _around_a_change(run):
    """Of four calls the first has its backward after the change, the next two together."""
    pending = run.way.pending and run.between
    for name in ("first", "second"):
        run.call(name)
    if not pending:
        run.backward("backward of 0", 0)
        run.backward("backward of 1", 1)
    if not run.between:
        return
    run.change()
    for name in ("third", "fourth", "fifth"):
        run.call(name)
    results = [list(side.pending) for side in run.pair.sides]
    for which in ((4,), (0,), (1, 2), (3,)) if pending else ((4,), (2,), (3,)):
        for side, contexts in zip(run.pair.sides, results, strict=True):
            side.pending = list(contexts)  # plain's errors clear them
        run.backward(f"backward of {', '.join(map(str, which))}", *which)


def by_compiled(run, code=compiled):
    """Compiled training between eager calls, as where an epoch ends in a validation.

    The last eager calls before the change and the first after it are in the same mode, so that what
    the former leave is there for the latter.
    """
    run.ask("queries", "keys", "values")
    run.prepare()
    run.call("eager with gradients, before")
    _eager_twice(run, "before")
    _train_compiled(run, code, "before")
    run.change()
    _eager_twice(run, "after")
    _train_compiled(run, code, "after")
    run.call("eager with gradients, after")
    run.backward("backward of the eager", -1)


@torch.no_grad()
def _eager_twice(run, when):
    run.call(f"eager, {when}")
    run.call(f"eager again, {when}")


def _train_compiled(run, code, when):
    run.pair.ours.step = code
    with torch.no_grad():
        run.call(f"compiled, {when}")
    run.call(f"compiled with gradients, {when}")
    run.backward(f"backward of the compiled, {when}", -1)
    run.pair.ours.step = None


def inference(run):
    with torch.inference_mode():
        _twice_and_twice(run)
    run.call("trained afterwards")
    run.backward("backward", -1)


def born_in_inference(run):
    """The inputs are inference tensors, which count no versions."""
    with torch.inference_mode():
        for side in run.pair.sides:
            for name in ("queries", "keys", "values", "lens"):
                setattr(side, name, getattr(side, name).clone())
        _twice_and_twice(run)


MODES = {
    "eager": eager,
    "trained": trained,
    "encoder": encoder,
    "compiled": by_compiled,
    "inductor": lambda run: by_compiled(run, torch.compile(attend)),
    "inference": inference,
    "born in inference": born_in_inference,
}


# Ways that leave what is remembered of the keys as it is.
BESIDE_KEYS = ("graph", "values", "lengths", "bias")


def variants(way, mode, every=False):
    """Options of ``play``, by name: for each kind of module and each layer that a way is for.

    In training also with the change at other times, in evaluation mode, and at the size of one
    operator. Rarer modes take two layers of a kind, and compiled code the first of all: each is
    compiled by itself, which takes seconds. Unless ``every``, layers are not changed in a module
    with ReLU, which has those of the one with tanh, before the first call two of a kind are, and
    modules that remember no keys are compiled only where a way is about keys.
    """
    found, compiles = [], mode in ("compiled", "inductor")
    for kind in way.kinds:
        if way.layers and kind == "relu" and not every:
            continue
        known = KINDS[kind].layers
        places = [x for name in way.layers for x in known.get(name, ())] if way.layers else [None]
        for place in places if mode in ("eager", "trained") else places[:2]:
            plain = {"kind": kind, "place": place}
            found.append(plain)
            if kind == "additive" and not compiles and (mode == "trained" or not way.layers):
                found.append(plain | {"size": SMALL})
            if mode == "trained":
                fused = KINDS[kind].ours is None
                early = every or place in places[:2]
                found += [
                    plain | {"when": when}
                    for when in way.whens[1:]
                    if (fused if when == UNFUSED else early)
                ]
                if place == "dropout":
                    found.append(plain | {"training": False})
    if compiles:
        found = found[:1]
    if not way.layers and (every or not compiles or way.what not in BESIDE_KEYS):
        found.append(found[0] | {"cache_keys": False})
    return [
        (", ".join(f"{n}={x}" for n, x in each.items() if x is not None), each) for each in found
    ]


def play(way, mode, **options):
    """What is wrong with a way in a mode, a line each; ``options`` are those of Run."""
    run = Run(way, **options)
    MODES[mode](run)
    results = [context for context in run.contexts if context is not None]
    if len(results) < (4 if run.between else 2):
        run.pair.wrong.append("the plain module cannot be called")
        return run.pair.wrong
    first, last = results[0], results[-1]
    moves = way.moves and run.when == AFTER and options.get("training", True)
    if moves and first.shape == last.shape and first.dtype == last.dtype:
        moved = float((first - last).abs().max() / first.abs().max())
        if not moved > MOVED:
            run.pair.wrong.append(f"the change moves the result by {moved:.2g} of its size alone")
    return run.pair.wrong
