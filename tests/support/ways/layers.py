"""What is done to a layer of a module: it is replaced, hooked or patched; and the ways of that."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from ways.kinds import KINDS, TAPS
from ways.sides import AFTER, BEFORE, UNFUSED, Way


class Turned:
    """In front of a layer's class: a ``forward`` of its own."""

    def forward(self, x):
        return -0.5 * super().forward(x)


class Around(nn.Module):
    """A layer, scaled."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    @property
    def weight(self):
        return self.layer.weight

    def forward(self, x):
        return -1.5 * self.layer(x)


class Adapted(Around):
    """A low-rank addition around a layer, as LoRA libraries put in its place."""

    def __init__(self, layer, down, up):
        super().__init__(layer)
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, x):
        return self.layer(x) + x @ self.down @ self.up


class Half(nn.Module):
    def forward(self, x):
        return 0.5 * x


def there(function):
    """What is done to a layer where it is."""

    def change(s):
        function(s.layer)

    return change


def hooked(kind, hook):
    return there(lambda layer: getattr(layer, f"register_{kind}")(hook))


def replaced(make):
    """A layer made of the one that was there, by a side that draws."""

    def change(s):
        parent, _, name = s.place.rpartition(".")
        made = make(s, s.layer)
        setattr(s.module.get_submodule(parent), name, made.train(s.module.training))

    return change


def inner(layer, kind):
    """The layer of a kind that a module is, or is around."""
    return next(each for each in layer.modules() if isinstance(each, kind))


def drawn(s, layer):
    for p in layer.to(s.keys.dtype).parameters():
        p.copy_(s.draw(*p.shape))
    return layer


def linear(bias):
    def make(s, layer):
        old = inner(layer, nn.Linear)
        return drawn(s, nn.Linear(old.in_features, old.out_features, bias=bias))

    return replaced(make)


def convolution(taps=TAPS, padding=TAPS // 2, padded=nn.Identity, **options):
    """Another convolution, ``padded`` in front of it."""

    def make(s, layer):
        old = inner(layer, nn.Conv1d)
        sizes = old.in_channels, old.out_channels, taps
        made = drawn(s, nn.Conv1d(*sizes, padding=padding, **({"bias": False} | options)))
        return made if padded is nn.Identity else nn.Sequential(padded(), made)

    return replaced(make)


def adapted(s, layer):
    old = inner(layer, nn.Linear)
    return Adapted(layer, s.draw(old.in_features, 2), s.draw(2, old.out_features))


def lazy(s, layer):
    """A layer that has no weight before its first call."""
    old = inner(layer, nn.Linear)
    made = nn.LazyLinear(old.out_features, bias=False, dtype=s.keys.dtype)
    made.reset_parameters = lambda: made.weight.copy_(s.draw(*made.weight.shape))
    return made


def parametrized(function):
    """The weight of a layer by a formula, whose own numbers are drawn by torch's generator."""

    def change(s):
        torch.manual_seed(5)
        function(inner(s.layer, nn.Linear))

    return change


def subclass(_, layer):
    made = copy.copy(layer)
    made.__class__ = type("Turned", (Turned, type(layer)), {})
    return made


def patched(layer):
    before = layer.forward
    layer.forward = lambda x: -1.5 * before(x)


def dilated(layer):
    layer = inner(layer, nn.Conv1d)
    layer.dilation, layer.padding = (2,), (2 * layer.padding[0],)


def without_dropout(s):
    s.layer.p = 1.0


def turned_round(s):
    for p in s.layer.parameters():
        p.requires_grad_(not p.requires_grad)


LINEAR = ("W_k", "W_q", "w_v", "W_f")
EVERY = ("W_k", "dropout", *LINEAR[1:], "conv", "location")
LATER = ("compiled",)  # compiled code does not ask for hooks that came later


def ways(layers, changes, **options):
    """Each change of those layers, wherever they are, before the first call and after it."""
    names = ", ".join(f"`{name}`" for name in layers if name != "location")
    options = {"kinds": tuple(KINDS), "layers": layers, "whens": (AFTER, BEFORE, UNFUSED)} | options
    return [Way("layers", f"{names}: {how}", change, **options) for how, change in changes.items()]


LAYERED = (
    *ways(
        EVERY,
        {
            "a subclass with its own `forward`": replaced(subclass),
            "`Sequential(layer, another)`": replaced(lambda _, x: nn.Sequential(x, Half())),
            "a module around it": replaced(lambda _, x: Around(x)),
            "`forward` patched on the instance": there(patched),
        },
    ),
    *ways(
        EVERY,
        {
            "a forward hook": hooked("forward_hook", lambda _, __, out: -1.5 * out),
            "a forward pre-hook": hooked("forward_pre_hook", lambda _, args: (0.5 * args[0],)),
        },
        without=LATER,
    ),
    *ways(
        EVERY,
        {
            "a full backward hook": hooked(
                "full_backward_hook",
                lambda _, grads, __: (None if grads[0] is None else -0.5 * grads[0],),
            ),
            "a full backward pre-hook": hooked(
                "full_backward_pre_hook", lambda _, grads: (-0.5 * grads[0],)
            ),
        },
        without=LATER,
        moves=False,
    ),
    *ways(
        LINEAR,
        {
            "`Linear(...)`": linear(False),
            "`Linear(..., bias=True)`": linear(True),
            "an adapter around it": replaced(adapted),
        },
    ),
    *ways(
        ("dropout",),
        {
            "`p = 1.0`": without_dropout,
            "`Dropout(1.0)`": replaced(lambda *_: nn.Dropout(1.0)),
            "`Sequential(Dropout(1.0))`": replaced(lambda *_: nn.Sequential(nn.Dropout(1.0))),
            "a module `x * 0.5`": replaced(lambda *_: Half()),
        },
    ),
    *ways(
        ("dropout",),
        {"`Identity()` after `p = 1.0`": replaced(lambda *_: nn.Identity())},
        prepare=without_dropout,
    ),
    *ways(
        ("conv",),
        {
            "`Conv1d(...)`": convolution(),
            "`Conv1d(..., bias=True)`": convolution(bias=True),
            "of more taps": convolution(TAPS + 2, TAPS // 2 + 1),
            'of even taps, `padding="same"`': convolution(4, "same"),
            "`dilation=2`": convolution(padding=2 * (TAPS // 2), dilation=2),
            "`dilation` and `padding` set on the instance": there(dilated),
            '`padding_mode="circular"`': convolution(padding_mode="circular"),
            '`padding_mode="reflect"`': convolution(padding_mode="reflect"),
            "`groups=2`": convolution(groups=2),
            "`Sequential(ConstantPad1d, Conv1d)`": convolution(
                padding=0, padded=lambda: nn.ConstantPad1d(TAPS // 2, 0.3)
            ),
        },
    ),
)
# Whose weight is not there yet, or made anew in each call: nothing to write to in a sequence.
MADE_ANEW = (
    *ways(
        LINEAR,
        {
            "`LazyLinear(...)`": replaced(lazy),
            "`spectral_norm`": parametrized(parametrizations.spectral_norm),
            "`orthogonal`": parametrized(parametrizations.orthogonal),
            "`prune.l1_unstructured`": parametrized(
                lambda layer: prune.l1_unstructured(layer, "weight", 0.5)
            ),
        },
    ),
    *ways(LINEAR, {"`weight_norm`": parametrized(parametrizations.weight_norm)}, moves=False),
)
GRADIENTS = Way(
    "graph",
    "`W_k`, `W_q`, `w_v`, `W_f`, `conv`: `requires_grad_()` turned round, and again",
    turned_round,
    graph=True,
    moves=False,
    kinds=tuple(KINDS),
    layers=(*LINEAR, "conv"),
    whens=(AFTER, BEFORE),
    times=3,
)
# By what is done, for sequences.
OF_A_LAYER = {way.how.rpartition(": ")[2]: way for way in LAYERED}
