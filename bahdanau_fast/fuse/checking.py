"""Does a module compute the same while it is watched? A trial on copies, both ways.

The copies share parameters and hold clones of what the module keeps; inputs are clones, too. So
nothing of the user's changes: no state, no graph, no hook is called, no random number is drawn.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bahdanau_fast import backends
from bahdanau_fast.fuse.promise import Leaked
from bahdanau_fast.fuse.report import Record
from bahdanau_fast.fuse.values import Product, Scores, Sum
from bahdanau_fast.fuse.watch import Caches, Watch, is_watched, put_values, within

__all__ = ["trial"]

# Largest difference of results, times the largest of them, by dtype.
SAME = {torch.float64: 2.0**-36, torch.float32: 2.0**-13}
SAME_16 = 2.0**-5
_HERE = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def trial(
    record: Record, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any
) -> bool:
    """Whether the module is to be fused; its record says what was found and why not.

    Args:
        record: of the module.
        module: watched.
        own: its own forward.
        args: of the call.
        kwargs: of the call.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    told = _Told(record, names)
    results = []
    try:
        for watch in (None, Watch(Caches(), 0, told)):
            with _apart(module):
                copied = _copied_module(module)
                leaves: list[Tensor] = []
                given = _copied((args, kwargs), leaves)
                if watch is None:
                    with within(record):
                        outputs = own(copied, *given[0], **given[1])
                else:
                    outputs = watch.run(own, copied, *given[0], **given[1])
                    put_values(copied)
                results.append(_results(outputs, copied, leaves))
    except Leaked:
        record.leave("something in it takes tensors past torch's functions")
        return False
    except Exception as error:
        what = "" if results else "a copy of it does not run: "
        record.leave(f"{what}{type(error).__name__}: {error}")
        return False
    why = _difference(*results)
    if why is not None:
        record.leave(why)
    elif record in told.fused:
        for each, places in told.fused.items():
            each.state = "fused"
            each.places |= places
    elif told.left:
        record.leave(told.left)
    elif record.state == "waiting" and record.expected:
        record.expected -= 1  # sizes of one hide it
        return True
    else:
        record.state = "none" if record.state == "waiting" else record.state
    return record.state == "fused"


class _Told:
    """Takes down what a watch finds."""

    def __init__(self, record: Record, names: dict[int, str]) -> None:
        self._record, self._names = record, names
        self.fused: dict[Record, dict[tuple[str, str], str]] = {}
        self.left = ""

    def __call__(self, state: Any, why: str | None) -> None:
        place, inside = _place(), is_watched()
        record = inside if isinstance(inside, Record) else self._record
        if why is not None:
            if not self.fused and record is self._record:
                self.left = f"{place}: {self._sum(state)}: {why}"
            return
        route = backends.decide(state.call(None)).reason
        places, text = self.fused.setdefault(record, {}), self.formula(state)
        if state.soft:  # says more than the row of its scores
            inner = self.formula(state._replace(soft=False, mask=None, after=()))
            for key in [key for key in places if key[1] == inner]:
                del places[key]
        places[place, text] = route.partition(";")[0]

    def formula(self, scores: Scores) -> str:
        """Scores in words."""
        text = f"{self._name(scores.vector, 'w')} . {self._sum(scores.sum, scores.parts.of_keys)}"
        for how, by in scores.after:
            text += f" {how} {self._name(by, 'c') if isinstance(by, Tensor) else f'{by:g}'}"
        if not scores.soft:
            return text
        return f"softmax({text}{', mask' if scores.mask is not None else ''})"

    def _sum(self, total: Sum, of_keys: tuple[int, ...] = ()) -> str:
        terms = []
        letters = iter("qrst"), iter("kfgh")
        for i, (value, axes, _) in enumerate(total.addends):
            if type(value) is not Product and sum(axis is not None for axis in axes) == 1:
                terms.append(self._name(value, "b"))
                continue
            letter = next(letters[i in of_keys], "x")
            name = type(value) is Product and self._name(value.weight, "W")
            terms.append(f"{name} {letter}" if name else letter)
        return f"{total.activation}({' + '.join(terms)})"

    def _name(self, x: Tensor, other: str) -> str:
        for each in (x, x._base):
            if each is not None and id(each) in self._names:
                return self._names[id(each)].removesuffix(".weight")
        return other


def _place() -> str:
    """File and line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(_HERE) and not path.is_relative_to(_TORCH):
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """No words, and no random numbers drawn from anybody's generators."""
    gpus = {p.device.index for p in module.parameters() if p.is_cuda}
    disabled, state = logging.root.manager.disable, random.getstate()
    numpy = sys.modules.get("numpy")
    numbers = None if numpy is None else numpy.random.get_state()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(gpus):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numbers)


def _copied(x: Any, leaves: list[Tensor] | None = None) -> Any:
    """Clones of tensors, also in lists, tuples and dictionaries."""
    if isinstance(x, Tensor):
        made = x.detach().clone()
        if x.requires_grad and leaves is not None:
            leaves.append(made.requires_grad_())
        return made
    if type(x) in (list, tuple):
        return type(x)(_copied(each, leaves) for each in x)
    return {k: _copied(v, leaves) for k, v in x.items()} if type(x) is dict else x


def _copied_module(module: nn.Module) -> nn.Module:
    """A module with the same parameters, copies of all else, and no hooks."""
    known: dict[int, nn.Module] = {}

    def copied(each: nn.Module) -> nn.Module:
        if id(each) in known:
            return known[id(each)]
        if isinstance(each, torch.jit.ScriptModule):
            return each
        made = known[id(each)] = object.__new__(type(each))
        own = {
            name: value if name == "_bahdanau_fast" else _copied(value)
            for name, value in vars(each).items()
            if name not in ("_parameters", "_modules")
        }
        own |= {name: type(own[name])() for name in _HOOKS if name in own}
        own["_parameters"] = dict(each._parameters)
        children = each._modules.items()
        own["_modules"] = {n: None if m is None else copied(m) for n, m in children}
        made.__dict__.update(own)
        return made

    return copied(module)


def _tensors(x: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, (list, tuple)):
        for i, each in enumerate(x):
            yield from _tensors(each, f"{name}[{i}]")
    elif isinstance(x, dict):
        for key, each in x.items():
            yield from _tensors(each, f"{name}[{key!r}]")


def _results(outputs: Any, module: nn.Module, leaves: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, what the module keeps, and gradients of inputs and parameters."""
    found = dict(_tensors(outputs, "its output"))
    for name, each in module.named_modules():
        for key, value in vars(each).items():
            if key not in ("_parameters", "_modules", "_bahdanau_fast"):
                found |= _tensors(value, f"what it keeps in {name}.{key}".replace(" .", " "))
    recorded = [t for t in found.values() if t.requires_grad and t.is_floating_point()]
    if recorded:
        wanted = {f"the gradient of input {i + 1}": t for i, t in enumerate(leaves)}
        wanted |= {f"the gradient of {n}": p for n, p in module.named_parameters()}
        wanted = {name: t for name, t in wanted.items() if t.requires_grad}
        seeds = [
            torch.cos(torch.arange(t.numel(), device=t.device)).to(t).view(t.shape)
            for t in recorded
        ]
        if wanted:
            grads = torch.autograd.grad(recorded, [*wanted.values()], seeds, allow_unused=True)
            found |= {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}
    return {name: t.detach() for name, t in found.items()}


def _difference(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> str | None:
    for name, exact in theirs.items():
        result = ours.get(name)
        if result is None or exact.shape != result.shape or exact.dtype is not result.dtype:
            return f"{name} is another kind of tensor when fused"
        if not exact.is_floating_point():
            if not torch.equal(exact, result):
                return f"{name} differs when fused"
            continue
        # Rows with nothing to look at are NaN in the code of others.
        known = torch.isfinite(exact)
        one, other = (torch.where(known, x, 0).double() for x in (exact, result))
        largest = float(one.abs().max()) if one.numel() else 0.0
        gap = float((one - other).abs().max()) if one.numel() else 0.0
        if not gap <= SAME.get(exact.dtype, SAME_16) * max(1.0, largest):
            return f"{name} differs by {gap:.2g} when fused"
    return None
