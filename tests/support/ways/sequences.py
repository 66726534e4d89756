"""Random sequences of calls, changes and backward passes, on the plain module and on ours.

``PYTHONPATH=tests/support python -m ways.sequences 50000`` runs so many. A sequence that fails is
shortened and printed as lines that run.
"""

import argparse
import contextlib
import copy
import random
import sys
import time
from collections import Counter
from typing import NamedTuple

import torch

from ways.changes import array
from ways.sides import REMEMBERED, SMALL, Pair
from ways.table import WAYS

# Not among sequences: what starts processes, or needs a place where keys come from.
CHANGES = {
    f"{way.what}, {way.how}": way
    for way in WAYS
    if way.ranks == 1
    and way.prepare is None
    and way.how not in ("the same bytes in another shape",)
}


class Step(NamedTuple):
    """An action of ACTIONS by name, and its arguments."""

    action: str
    arguments: dict


class Plan(NamedTuple):
    """A sequence: how the sides are made, and what they are taken through."""

    options: dict
    steps: list


def mode_of(side):
    """The context that calls and changes are under."""
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    return modes.get(side.notes["mode"], torch.inference_mode)()


def keep(side, context):
    """A result whose backward may come."""
    if context.requires_grad:
        side.pending.append(context)


def call(side, queries_len, steps=1):
    """A call, or several on the same keys that become one result."""
    with mode_of(side):
        contexts, weights = [], []
        for _ in range(steps):
            found = side.call(side.queries[:, :queries_len])
            contexts.append(found[0])
            weights.append(found[1])
        context = torch.cat(contexts, 1)
        keep(side, context)
    return context, torch.cat(weights, 1)


def remembered(side, queries_len, steps):
    """The same by ``memory()`` and ``attend()``, where the module has them."""
    if not hasattr(side.module, "memory"):
        return call(side, queries_len, steps)
    with mode_of(side):
        queries, contexts, weights = side.queries[:, :queries_len], [], []
        memory = side.module.memory(side.keys, side.values, side.lens_for(queries))
        for _ in range(steps):
            contexts.append(side.module.attend(queries, memory))
            weights.append(side.module.attention_weights)
        context = torch.cat(contexts, 1)
        keep(side, context)
    return context, torch.cat(weights, 1)


def change(side, how):
    way = CHANGES[how]
    with mode_of(side), contextlib.nullcontext() if way.graph else torch.no_grad():
        way.change(side)
    # Data that replaces that of values before a backward: plain code saves the values by name and
    # mixes new values with old weights; ours computes the gradient of the call (compatibility.md).
    if not way.pending or (".data" in how and side.values is side.keys):
        side.pending.clear()


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

    Not again where something changed since: second derivatives of ours compute the forward pass
    anew, from inputs that may be others by then without a version counter that says so.
    """
    chosen = _take(side, which, False)
    again = again and not any(old is x for old in side.notes.get("before", ()) for x in chosen)
    again = again and not side.notes["single"]  # sums in another order, squared, would show
    leaves = side.leaves() | {"keys": side.keys}
    inputs = {name: leaves[name] for name in of if leaves[name].requires_grad}
    if not chosen or not inputs:
        return None
    loss = torch.stack([x.square().sum() for x in chosen]).sum()
    grads = torch.autograd.grad(loss, list(inputs.values()), create_graph=again, allow_unused=True)
    if again:
        sums = [g.square().sum() for g in grads if g is not None and g.requires_grad]
        if sums:
            torch.stack(sums).sum().backward()
    return dict(zip(inputs, grads, strict=True))


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
    parameter = dict(side.module.named_parameters())[name]
    parameter.requires_grad_(not parameter.requires_grad)


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
        call, remembered, change, lens, values, keys, backward, gradients, train, zero, mode,
        training, copied, reload, frozen, queries,
    )
}  # fmt: skip
LEAVES = ("queries", "keys", "values", "W_k.weight", "W_q.weight", "w_v.weight")


def draw_step(draw):
    """One action; about two in five are calls."""
    number, of = draw.random(), draw.choice
    if number < 0.4:
        return Step("call", {"queries_len": of((1, 1, 2)), "steps": of((1, 1, 2))})
    if number < 0.45:
        return Step("remembered", {"queries_len": of((1, 2)), "steps": of((1, 2))})
    if number < 0.62:
        return Step("change", {"how": of(list(CHANGES))})
    if number < 0.78:
        which = draw.sample(range(4), of((1, 1, 2, 4)))
        if draw.random() < 0.6:
            return Step("backward", {"which": which, "retain": draw.random() < 0.3})
        named = draw.sample(LEAVES, of((1, 2, 3)))
        return Step("gradients", {"which": which, "of": named, "again": draw.random() < 0.3})
    return of(
        (
            Step("train", {"kind": of(KINDS), "how": of(("fused", "foreach", "plain"))}),
            Step("train", {"kind": of(KINDS), "how": "fused"}),
            Step("lens", {"kind": of(("none", "row", "query", "few"))}),
            Step("values", {"kind": of(("keys", "leaf", "data"))}),
            Step("keys", {"kind": of(("other", "other", "encoder", "data", "leaf"))}),
            Step("zero", {"none": of((True, False))}),
            Step("mode", {"name": of(("grad", "grad", "no_grad", "inference"))}),
            Step("training", {"on": of((True, False))}),
            Step("copied", {}),
            Step("reload", {"assign": of((True, False))}),
            Step("frozen", {"name": of(LEAVES[3:])}),
            Step("queries", {"how": of(("new", "numpy", "in place"))}),
        )
    )


KINDS = ("SGD", "Adam", "AdamW", "Adagrad")


def draw_plan(seed):
    """A sequence of 3 to 12 actions; one in ten in float32."""
    draw = random.Random(seed)
    options = {
        "seed": draw.randrange(1000),
        "size": SMALL if draw.random() < 0.2 else REMEMBERED,
        "bias": draw.random() < 0.5,
        "cache_keys": draw.random() < 0.85,
        "dtype": torch.float32 if draw.random() < 0.1 else torch.float64,
    }
    steps = [
        Step("mode", {"name": draw.choice(("grad", "grad", "grad", "no_grad", "inference"))}),
        Step("keys", {"kind": draw.choice(("leaf", "leaf", "encoder", "data"))}),
        Step("call", {"queries_len": 1}),
    ]
    return Plan(options, steps + [draw_step(draw) for _ in range(draw.randrange(3, 13))])


def run(plan, ended=None):
    """What is wrong after the first step that is; nothing where all is right."""
    options = plan.options
    pair = Pair(**options, exact=options.get("dtype") == torch.float32)
    for side in pair.sides:
        side.notes |= {"mode": "grad", "single": options.get("dtype") == torch.float32}
        for name in ("queries", "values"):
            getattr(side, name).requires_grad_()
    for number, (action, arguments) in enumerate(plan.steps):
        done = take(pair, action, arguments, f"step {number}, {action}", ended)
        if pair.wrong:
            return pair.wrong
        if not done and action in ("change", "train"):
            return []  # half done, maybe, and on one side further than on the other
    return []


def take(pair, action, arguments, name, ended):
    """One step of every side, and what it left; whether the plain side could."""

    def step(side):
        return ACTIONS[action](side, **arguments)

    if action in ("change", "train", "queries"):
        for side in pair.sides:
            side.notes["before"] = list(side.pending)
    if action in ("backward", "gradients", "train"):
        done = pair.do(name, step)
        if done:
            pair.do(f"gradients after {name}", lambda side: side.grads())
        else:  # of an error in the middle of a graph, part of which is gone
            for side in pair.sides:
                side.forget()
                side.keys, side.values = (
                    x.detach().clone().requires_grad_(x.requires_grad)
                    for x in (side.keys, side.values)
                )
                side.notes.pop("aside", None)
    else:
        done = pair.do(name, step)
        if not done:  # a call that plain code refuses leaves a result on the other side alone
            for side in pair.sides:
                side.pending.clear()
    if ended is not None:
        ended[action, done] += 1
    return done


def shorten(plan):
    """The plan with fewer steps, as long as it fails."""
    steps, at = list(plan.steps), 0
    while at < len(steps):
        fewer = Plan(plan.options, steps[:at] + steps[at + 1 :])
        if run(fewer):
            steps = fewer.steps
        else:
            at += 1
    return Plan(plan.options, steps)


def told(seed, plan):
    """A failure, as lines that run."""
    short = shorten(plan)
    steps = "".join(f"    Step({s.action!r}, {s.arguments!r}),\n" for s in short.steps)
    words = "".join(f"# {line}\n" for line in run(short)[:3])
    return (
        f"# seed {seed}\nimport torch\nfrom ways.sequences import Plan, Step, run\n"
        f"print(run(Plan({short.options!r}, [\n{steps}])))\n{words}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sequences", type=int, nargs="?", default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--show", type=int, default=5, help="failures to print")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, ended, failed = time.time(), Counter(), []
    for seed in range(arguments.seed, arguments.seed + arguments.sequences):
        plan = draw_plan(seed)
        if run(plan, ended):
            failed.append(seed)
            if len(failed) <= arguments.show:
                print(told(seed, plan), flush=True)
    done = {action: (ended[action, True], ended[action, False]) for action in ACTIONS}
    print("steps, and those that the plain module refused:", done)
    print(f"{arguments.sequences} sequences, {len(failed)} wrong, {time.time() - start:.0f} s")
    print("seeds:", *failed[:50])
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
