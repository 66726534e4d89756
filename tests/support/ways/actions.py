"""What sequences.py takes a side through: calls, changes and backward passes, by name."""

import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.autograd.functional import hessian, jacobian

from ways.layers import OF_A_LAYER
from ways.sides import AFTER, WATCHED
from ways.table import WAYS, array

# Not among sequences: what needs a place where keys come from. What may come before the first call
# has an action of its own.
CHANGES = {
    f"{way.what}, {way.how}": way
    for way in WAYS
    if way.prepare is None
    and way.whens == (AFTER,)
    and way.how not in ("the same bytes in another shape",)
}


def mode_of(side):
    """The context that calls and changes are under."""
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    return modes.get(side.notes["mode"], torch.inference_mode)()


def _joined(side, step, steps):
    """Results of some steps, as one; its backward may come."""
    contexts, weights = zip(*(step() for _ in range(steps)), strict=True)
    context = torch.cat(contexts, 1)
    if context.requires_grad:
        side.pending.append(context)
    return context, torch.cat(weights, 1)


def call(side, queries_len, steps=1):
    """A call, or several on the same keys that become one result."""
    with mode_of(side):
        return _joined(side, lambda: side.call(side.queries[:, :queries_len]), steps)


def remembered(side, queries_len, steps):
    """The same by ``memory()`` and ``attend()``, where the module has them."""
    if not hasattr(side.module, "memory"):
        return call(side, queries_len, steps)
    with mode_of(side):
        queries = side.queries[:, :queries_len]
        memory = side.module.memory(side.keys, side.values, side.lens_for(queries))

        def step():
            context = side.module.attend(queries, memory)
            side.watch(context, side.module.attention_weights)
            return context, side.module.attention_weights

        return _joined(side, step, steps)


def change(side, how):
    way = CHANGES[how]
    with mode_of(side), contextlib.nullcontext() if way.graph else torch.no_grad():
        way.change(side)
    # Data that replaces that of values before a backward: plain code saves the values by name and
    # mixes new values with old weights; ours computes the gradient of the call (compatibility.md).
    if not way.pending or (".data" in how and side.values is side.keys):
        side.pending.clear()


def layer(side, name, how):
    """A layer replaced, hooked or patched."""
    side.place = name
    with mode_of(side), torch.no_grad():
        OF_A_LAYER[how].change(side)


def look(side, how):
    """What is done with the weights of later calls."""
    side.look = WATCHED[how]


def lens(side, kind):
    """Lengths of another shape."""
    batch, rows = side.keys.shape[:2]
    drawn = torch.rand((batch, side.queries.shape[1]), generator=side.generator) * (rows + 4) - 2
    kinds = {"none": None, "row": drawn[:, 0].long(), "query": drawn, "few": drawn[:, 0] / 9}
    side.lens = kinds[kind]


def values(side, kind):
    """The keys themselves, or numbers of their own."""
    batch, rows = side.keys.shape[:2]
    side.values = side.keys if kind == "keys" else side.draw(batch, rows, 4)
    if kind == "leaf":
        side.values.requires_grad_()


def keys(side, kind):
    """The other keys, which were put aside; new ones; or an encoder's."""
    if kind == "other":
        before = (side.keys, side.values)
        side.keys, side.values = side.notes.get("aside") or before
        side.notes["aside"] = before
    elif kind == "encoder":
        with mode_of(side):
            side.encode()
    elif kind == "data":
        side.keys = side.keys.detach().clone()
    else:
        side.keys = side.draw(*side.keys.shape).requires_grad_()


def backward(side, which, retain):
    """Of the sum of some results; those are done with, unless their graph is retained."""
    chosen = _take(side, which, retain)
    if chosen:
        torch.stack([x.square().sum() for x in chosen]).sum().backward(retain_graph=retain)


def _take(side, which, retain):
    pending = side.pending
    places = sorted({i % len(pending) for i in which}) if pending else []
    chosen = [pending[i] for i in places]
    if not retain:
        side.pending = [x for i, x in enumerate(pending) if i not in places]
    return chosen


def gradients(side, which, of, again):
    """``torch.autograd.grad`` by some inputs; ``again``: backward of the gradients, too.

    Not again where something changed since: second derivatives of ours compute the scores anew,
    from inputs that may be others by then without a version counter that says so. Not of the values
    alone where the gradient of the weights is looked at: plain code does not come to it, ours does
    (compatibility.md).
    """
    chosen = _take(side, which, False)
    again = again and not any(old is x for old in side.notes.get("before", ()) for x in chosen)
    again = again and not side.notes["single"]  # sums in another order, squared, would show
    leaves = side.leaves() | {"keys": side.keys}
    inputs = {name: leaves[name] for name in of if name in leaves and leaves[name].requires_grad}
    if not chosen or not inputs or (side.seen and inputs.keys() <= {"values"}):
        return None
    loss = torch.stack([x.square().sum() for x in chosen]).sum()
    grads = torch.autograd.grad(loss, list(inputs.values()), create_graph=again, allow_unused=True)
    if again:
        sums = [g.square().sum() for g in grads if g is not None and g.requires_grad]
        if sums:
            torch.stack(sums).sum().backward()
    return dict(zip(inputs, grads, strict=True))


def threads(side, count, before):
    """Calls in several threads, each with a backward of its own; or made in front of them.

    The threads meet in front of each backward, and in it where it comes to the queries.
    """
    shape = side.queries.shape
    queries = [side.draw(*shape).requires_grad_() for _ in range(2 * count)]
    shared = [x for x in (side.keys, *side.module.parameters()) if x.requires_grad]
    meeting, errors = threading.Barrier(count, timeout=20), []

    def meet(_):
        meeting.wait()

    def called(queries):
        queries.register_hook(meet)
        with torch.enable_grad():
            return side.module(queries, side.keys, side.values, side.lens_for(queries))

    made = [called(each) if before else None for each in queries]

    def work(first):
        found = []
        try:
            for i in range(first, len(queries), count):
                context = made[i] if before else called(queries[i])
                meeting.wait()
                loss, inputs = context.square().sum(), (queries[i], *shared)
                found.append((context, *torch.autograd.grad(loss, inputs, allow_unused=True)))
        except Exception as error:
            errors.append(error)  # the first one is the cause of the others
            meeting.abort()
        return found

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(work, range(count)))
    if errors:
        raise errors[0]
    return found


def batched(side, kind):
    """Gradients with respect to the keys that ``vmap`` takes many of at once."""
    queries = side.queries[:, :1]

    def called(keys):
        return side.module(queries, keys, side.values, side.lens_for(queries))

    with torch.enable_grad():
        if kind == "jacobian":
            return jacobian(called, side.keys, vectorize=True)
        if kind == "hessian":
            if side.notes["single"]:  # sums in another order, squared, would show
                return None
            row, rest = side.keys.detach().split((1, side.keys.shape[1] - 1), 1)

            def joined(row):
                return called(torch.cat([row, rest], 1)).square().sum()

            return hessian(joined, row, vectorize=True)
        context = called(side.keys)
        inputs = [x for x in (side.keys, *side.module.parameters()) if x.requires_grad]
        if not inputs:
            return None
        drawn = side.draw(3, *context.shape)
        return torch.autograd.grad(context, inputs, drawn, is_grads_batched=True, allow_unused=True)


def train(side, kind, how):
    """A call, its backward, and a step of an optimizer that the loop made before."""
    if side.notes["single"]:  # the others divide by gradients: a rounding becomes a step
        kind = "SGD"
    with torch.enable_grad():
        context, _ = side.call()
        context.square().sum().backward()
    options = {"eps": 1e-3} if kind != "SGD" else {}  # of zero and of nearly zero: the same step
    options |= {name: name == how for name in ("foreach", "fused")}
    with torch.no_grad():
        optimizer = getattr(torch.optim, kind)(side.module.parameters(), lr=0.05, **options)
        optimizer.step()
        optimizer.zero_grad()
    return context


def zero(side, none):
    for leaf in side.leaves().values():
        if none or leaf.grad is None:
            leaf.grad = None
        else:
            leaf.grad.zero_()


def mode(side, name):
    side.notes["mode"] = name


def training(side, on):
    side.module.train(on)


def copied(side):
    """The module goes on as a copy of itself; results of the old one stay."""
    side.module.attention_weights = None
    side.module.zero_grad()
    side.module = copy.deepcopy(side.module)


def reload(side, assign):
    state = {name: x.clone() for name, x in side.module.state_dict().items()}
    side.module.load_state_dict(state, assign=assign)


def frozen(side, name):
    leaf = side.leaves()[name]
    leaf.requires_grad_(not leaf.requires_grad)


def queries(side, how):
    """The next step's queries: another tensor, or the same one written to."""
    if how == "new":
        side.queries = side.draw(*side.queries.shape).requires_grad_()
    elif how == "numpy":
        array(side.queries).__imul__(-0.9)
    else:
        with torch.no_grad():
            side.queries.mul_(-0.9)


ACTIONS = {
    function.__name__: function
    for function in (
        call, remembered, change, layer, look, lens, values, keys, backward, gradients, threads,
        batched, train, zero, mode, training, copied, reload, frozen, queries,
    )
}  # fmt: skip
