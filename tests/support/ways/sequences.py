"""Random sequences of calls, changes and backward passes, on the plain module and on ours.

A sequence that fails is shortened and printed as lines that run.
"""

import random
from typing import NamedTuple

import pytest
import torch

from ways.actions import ACTIONS, CHANGES
from ways.kinds import KINDS
from ways.layers import OF_A_LAYER
from ways.sides import REMEMBERED, SMALL, WATCHED, Pair, remember_small


class Step(NamedTuple):
    """An action of ACTIONS by name, and its arguments."""

    action: str
    arguments: dict


class Plan(NamedTuple):
    """A sequence: how the sides are made, and what they are taken through."""

    options: dict
    steps: list


LEAVES = ("queries", "keys", "values", "W_k.weight", "W_q.weight", "w_v.weight")
LAYERS = tuple(KINDS["additive"].layers)
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad")


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
            Step("train", {"kind": of(OPTIMIZERS), "how": of(("fused", "foreach", "plain"))}),
            Step("train", {"kind": of(OPTIMIZERS), "how": "fused"}),
            Step("lens", {"kind": of(("none", "row", "query", "few"))}),
            Step("values", {"kind": of(("keys", "leaf", "data"))}),
            Step("keys", {"kind": of(("other", "other", "encoder", "data", "leaf"))}),
            Step("zero", {"none": of((True, False))}),
            Step("mode", {"name": of(("grad", "grad", "no_grad", "inference"))}),
            Step("training", {"on": of((True, False))}),
            Step("copied", {}),
            Step("reload", {"assign": of((True, False))}),
            Step("frozen", {"name": of((*LEAVES, *LEAVES[3:], "bias"))}),
            _draw_layer(draw),
            Step("look", {"how": of(list(WATCHED))}),
            Step("threads", {"count": of((2, 3)), "before": of((True, False))}),
            Step("batched", {"kind": of(("grads", "jacobian", "hessian"))}),
            Step("queries", {"how": of(("new", "numpy", "in place"))}),
        )
    )


def _draw_layer(draw):
    name = draw.choice(LAYERS)
    hows = [how for how, way in OF_A_LAYER.items() if name in way.layers and way.prepare is None]
    return Step("layer", {"name": name, "how": draw.choice(hows)})


def draw_plan(seed):
    """A sequence of 3 to 12 actions; one in ten in float32."""
    draw = random.Random(seed)
    options = {
        "seed": draw.randrange(1000),
        "size": SMALL if draw.random() < 0.2 else REMEMBERED,
        "bias": draw.random() < 0.5,
        "cache_keys": draw.random() < 0.85,
        "dtype": torch.float32 if draw.random() < 0.1 else torch.float64,
        "kind": "fused course" if draw.random() < 0.15 else "additive",
    }
    # In fp32 a rounding may take a unit over the kink: such a plan stays in fp64.
    if seed % 4 == 3 and options["kind"] == "additive" and options["dtype"] == torch.float64:
        options["kind"] = "relu"
    steps = [
        Step("mode", {"name": draw.choice(("grad", "grad", "grad", "no_grad", "inference"))}),
        Step("keys", {"kind": draw.choice(("leaf", "leaf", "encoder", "data"))}),
        Step("call", {"queries_len": 1}),
    ]
    steps += [draw_step(draw) for _ in range(draw.randrange(3, 13))]
    if options["kind"] == "relu":
        steps = [x for x in steps if x != Step("change", {"how": "weights, all in float32"})]
    if options["kind"] == "fused course":  # guards of torch's compiler hold parameters weakly
        steps = [x for x in steps if "swap" not in str(x.arguments.get("how"))]
    return Plan(options, steps)


def run(plan, ended=None):
    """What is wrong after the first step that is; nothing where all is right."""
    with pytest.MonkeyPatch.context() as patch:
        remember_small(patch)
        return _run(plan, ended)


def _run(plan, ended):
    options = plan.options
    pair = Pair(**options, exact=options.get("dtype") == torch.float32)
    assert pair.fuse()
    for side in pair.sides:
        side.notes |= {"mode": "grad", "single": options.get("dtype") == torch.float32}
        for name in ("queries", "values"):
            getattr(side, name).requires_grad_()
    for number, (action, arguments) in enumerate(plan.steps):
        done = take(pair, action, arguments, f"step {number}, {action}", ended)
        if pair.wrong:
            return pair.wrong
        if not done and action in ("change", "layer", "train", "threads", "batched"):
            return []  # half done, maybe, and on one side further than on the other
    return []


def take(pair, action, arguments, name, ended):
    """One step of every side, and what it left; whether the plain side could."""

    def step(side):
        return ACTIONS[action](side, **arguments)

    if action in ("change", "layer", "train", "queries"):
        for side in pair.sides:
            side.notes["before"] = list(side.pending)
    if action in ("backward", "gradients", "threads", "batched", "train"):
        done = pair.do(name, step)
        if done:
            pair.do(f"gradients after {name}", lambda side: side.grads())
        else:  # of an error in the middle of a graph, part of which is gone
            for side in pair.sides:
                side.forget()
                side.module.attention_weights = None
                side.keys, side.values = (
                    x.detach().clone().requires_grad_(x.requires_grad)
                    for x in (side.keys, side.values)
                )
                side.notes.pop("aside", None)
            torch.zeros((), requires_grad=True).backward()  # takes what the other left in a queue
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
