"""Ways to change what a call depends on, between two calls; those of layers are in layers.py."""

import copy
import ctypes
import pickle
from contextlib import ExitStack
from operator import attrgetter

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from ways.kinds import KINDS
from ways.layers import GRADIENTS, LAYERED, MADE_ANEW
from ways.sides import AFTER, BEFORE, WATCHED, Way

# For keys that no gradient is asked of; and a graph holds the tensors: they cannot be swapped.
DATA = ("trained", "encoder", "compiled")
INFERENCE = ("inference", "born in inference")  # of its tensors no gradient can be asked
OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
WAYS = []


def way(what, how, prepare=None, **options):
    """Registers a change of a side (sides.py); options are those of Way."""

    def add(change):
        WAYS.append(Way(what, how, change, prepare, **options))
        return change

    return add


def array(tensor):
    """Its memory as numpy sees it."""
    return tensor.detach().numpy()


def times(name):
    """A tensor of a side, in place."""
    return lambda s: attrgetter(name)(s).mul_(-1.5)


def numpy_times(name):
    return lambda s: array(attrgetter(name)(s)).__imul__(-1.5)


def renew_data(name):
    """``x.data = new``, which in general is at another address."""

    def change(s):
        x = attrgetter(name)(s)
        x.data = s.draw(*x.shape)

    return change


def w_k(s):
    return s.module.W_k.weight


# ---- keys


def fill_storage(s):
    fresh = s.draw(*s.keys.shape)
    s.keys.untyped_storage().copy_(fresh.untyped_storage())


for how, change in {
    "`keys.mul_(-1.5)`": times("keys"),
    "`keys[1, 3] = 7`": lambda s: s.keys[1].__setitem__(3, 7.0),
    "written through a view": lambda s: s.keys[:, 2:4].zero_(),
    "`keys.copy_(new)`": lambda s: s.keys.copy_(s.draw(*s.keys.shape)),
    "`torch.mul(keys, 2, out=keys)`": lambda s: torch.mul(s.keys, 2.0, out=s.keys),
    "`keys.detach().mul_(-1.5)`": lambda s: s.keys.detach().mul_(-1.5),
    "`keys.data.mul_(-1.5)`": times("keys.data"),
    "`keys.data = new`": renew_data("keys"),
    "`keys.set_(new)`": lambda s: s.keys.set_(s.draw(*s.keys.shape)),
    "`keys.numpy()`": numpy_times("keys"),
    "DLPack": lambda s: torch.from_dlpack(s.keys.detach()).mul_(-1.5),
    "`untyped_storage().copy_()`": fill_storage,
    "`ctypes.memset` at `data_ptr()`": lambda s: ctypes.memset(s.keys.data_ptr(), 0, 400),
}.items():
    way("keys", how)(change)
way("keys", "in place in the autograd graph", graph=True, without=("trained", "compiled"))(
    times("keys")
)


@way("keys", "`keys.data` of other strides at the same address")
def other_strides(s):
    """The same address, shape and bytes, read in another order."""
    rows, columns = s.keys.shape[1:]
    s.keys.data = s.keys.data.as_strided(s.keys.shape, (rows * columns, 1, rows))


@way("keys", "`keys.resize_()`, fewer of them", without=DATA)
def shorter(s):
    # Weights of a call hold the node of its values, which knows their shape (compatibility.md).
    s.module.attention_weights = None
    for x in (s.keys, s.values):
        x.resize_(x.shape[0], x.shape[1] - 3, x.shape[2])


way("keys", "`torch.utils.swap_tensors(keys, new)`", without=DATA)(
    lambda s: torch.utils.swap_tensors(s.keys, s.draw(*s.keys.shape))
)


@way("keys", "a new tensor where the old one died")
def keys_of_the_same_address(s):
    """The old keys die first: what comes next is often where they were."""
    fresh, asked = 2 * s.draw(*s.keys.shape), s.keys.requires_grad
    s.keys = None
    s.keys = fresh.clone().requires_grad_(asked)


@way("keys", "the same bytes in another shape")
def as_one_row(s):
    """The same bytes as one row of all the keys."""
    s.keys, s.values = (x.detach().view(1, -1, x.shape[2]) for x in (s.keys, s.values))
    s.queries, s.lens = s.queries.detach()[:1], s.lens[1:2]


def complex_pair(s):
    s.notes["complex"] = torch.complex(s.draw(*s.keys.shape), s.keys.detach().clone())
    s.keys = s.notes["complex"].imag


# A flag of the tensor alone tells them apart.
way("keys", "the negative view of the same bytes", complex_pair, without=DATA)(
    lambda s: setattr(s, "keys", s.notes["complex"].conj().imag)
)


@way("keys", "a version counter that is held back", without=("born in inference",))
def hidden_from_versions(s):
    with torch.autograd._unsafe_preserve_version_counter(s.keys):
        s.keys.mul_(-1.5)


@way("keys", "storage freed, made anew and filled")
def storage_freed_and_filled(s):
    fresh, storage = s.draw(*s.keys.shape), s.keys.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    s.keys.data.copy_(fresh)


@way("keys", "two rows exchanged through numpy")
def swap_rows(s):
    """The same numbers, in another order: a sum over bytes stays what it was."""
    numbers = array(s.keys)
    numbers[1, [3, 4]] = numbers[1, [4, 3]]


# ---- the graph


STILL = {"graph": True, "moves": False}
ONLY_ENCODED = ("eager", "trained", "compiled", *INFERENCE)
way("graph", "`keys.detach_().requires_grad_()`", **STILL, without=ONLY_ENCODED)(
    lambda s: s.keys.detach_().requires_grad_()
)
way("graph", "`keys.detach_()`", **STILL)(lambda s: s.keys.detach_())


def turned_round(name):
    """``requires_grad`` of an input, or of the module's bias."""

    def change(s):
        x = s.module.bias if name == "bias" else getattr(s, name)
        x.requires_grad_(not x.requires_grad)

    return change


for name in ("keys", "values", "queries", "bias"):
    options = {"whens": (AFTER, BEFORE), "times": 3}
    options["without"] = INFERENCE if name == "bias" else ("encoder", *INFERENCE)
    options["kinds"] = ("additive", "location") if name == "bias" else tuple(KINDS)
    how = f"`{name}.requires_grad_()` turned round, and again"
    way("graph", how, **STILL, **options)(turned_round(name))
WAYS.append(GRADIENTS)
for how, look in WATCHED.items():
    if look is not None:
        # Outputs of compiled code have no gradients of each other.
        options = {"without": ("compiled",), "kinds": tuple(KINDS), "whens": (AFTER, BEFORE)}
        way("graph", f"`attention_weights`: {how}", moves=False, **options)(
            lambda s, look=look: setattr(s, "look", look)
        )


def called_under(*modes):
    """A call under contexts, each of which a function makes."""

    def change(s):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            s.call()

    return change


def turned_gradients():
    return torch.set_grad_enabled(not torch.is_grad_enabled())


for how, modes, options in (
    ("with gradients turned round", [turned_gradients], {"graph": True}),
    ("in `inference_mode`", [torch.inference_mode], {}),
    ("in `inference_mode` with `enable_grad`", [torch.inference_mode, torch.enable_grad], {}),
    ("under autocast", [lambda: torch.autocast("cpu", torch.bfloat16)], {"dtype": torch.float32}),
):
    way("graph", f"a call {how}", moves=False, **options)(called_under(*modes))
# ---- values, lengths, weights and bias

WEIGHTS = "W_k.weight", "W_q.weight", "w_v.weight"
WEIGHTS += tuple(f"{name}.data" for name in WEIGHTS)

for what, named in {
    "values": {
        "`values.mul_(-1.5)`": times("values"),
        "`values.data.mul_(-1.5)`": times("values.data"),
        "`values.numpy()`": numpy_times("values"),
        "another tensor": lambda s: setattr(s, "values", 2 * s.values),
    },
    "lengths": {
        "`lens.add_(1)`": lambda s: s.lens.add_(1),
        "`lens.data.add_(1)`": lambda s: s.lens.data.add_(1),
        "`lens.numpy()`": lambda s: array(s.lens).__iadd__(1),
        "another tensor": lambda s: setattr(s, "lens", s.lens + 1),
        "none any more": lambda s: setattr(s, "lens", None),
    },
    "weights": {
        **{f"`{name}.mul_(-1.5)`": times(f"module.{name}") for name in WEIGHTS},
        "`W_k.weight.data = new`": renew_data("module.W_k.weight"),
        "`W_k.weight = Parameter(new)`": lambda s: setattr(
            s.module.W_k, "weight", nn.Parameter(s.draw(*w_k(s).shape))
        ),
        "`W_k.weight.numpy()`": numpy_times("module.W_k.weight"),
        "`ctypes.memset` at `W_k.weight.data_ptr()`": lambda s: ctypes.memset(
            w_k(s).data_ptr(), 0, 400
        ),
    },
    "bias": {
        "`bias.mul_(-1.5)`": times("module.bias"),
        "`bias.data.mul_(-1.5)`": times("module.bias.data"),
        "`bias.numpy()`": numpy_times("module.bias"),
        "`bias = None`": lambda s: setattr(s.module, "bias", None),
    },
}.items():
    for how, change in named.items():
        way(what, how)(change)
way("values", "`values.data = new`", pending=False)(renew_data("values"))


@way("weights", "`W_k.weight.data = new` at the same address")
def data_at_the_same_address(s):
    """The allocator often gives back what was freed last; here it is asked until it does."""
    weight = w_k(s)
    fresh, address = s.draw(*weight.shape), weight.data_ptr()
    weight.data = torch.empty(0, dtype=weight.dtype)
    tried = [torch.empty_like(fresh) for _ in range(64)]
    weight.data = next((x for x in tried if x.data_ptr() == address), tried[-1]).copy_(fresh)


@way("weights", "`vector_to_parameters` of another vector", pending=False)
def of_another_vector(s):
    size = sum(p.numel() for p in s.module.parameters())
    vector_to_parameters(s.draw(size), s.module.parameters())


def to_vector(s):
    s.notes["vector"] = parameters_to_vector(s.module.parameters()).detach().clone()
    vector_to_parameters(s.notes["vector"], s.module.parameters())


@way("weights", "`vector_to_parameters` again, the vector changed", to_vector)
def vector_again(s):
    s.notes["vector"].mul_(-1.5)
    vector_to_parameters(s.notes["vector"], s.module.parameters())


def swapping(function):
    """The same while conversions swap tensors in place of setting their data."""

    def change(s):
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            function(s)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return change


@way("weights", "`load_state_dict`")
def load(s, **how):
    s.module.load_state_dict({n: s.draw(*x.shape) for n, x in s.module.state_dict().items()}, **how)


way("weights", "`load_state_dict(assign=True)`")(lambda s: load(s, assign=True))
way("weights", "`load_state_dict`, tensors swapped", without=DATA)(swapping(load))


def halved(s):
    """The parameters through fp16; their new memory may be where the old was."""
    s.module.half().double()


way("weights", "`half().double()`", pending=False)(halved)
way("weights", "`half().double()`, tensors swapped", without=DATA)(swapping(halved))


@way("weights", "all in float32", moves=False, pending=False)
def in_float32(s):
    s.module.float()
    s.encoder.float()
    for name in ("source", "queries", "keys", "values"):
        x = getattr(s, name)
        setattr(s, name, x.detach().float().requires_grad_(x.requires_grad))


def optimizer(kind, how):
    """One step of an optimizer, with drawn gradients."""

    def change(s):
        parameters = list(s.module.parameters())
        for parameter in parameters:
            parameter.grad = s.draw(*parameter.shape)
        kind(parameters, lr=0.5, **{name: name == how for name in ("foreach", "fused")}).step()
        for parameter in parameters:
            parameter.grad = None

    return change


for kind in OPTIMIZERS:
    for how in ("fused", "foreach", "plain"):
        way("weights", f"`{kind.__name__}`, {how}")(optimizer(kind, how))


@way("weights", "`prune.remove`")
def pruned(s):
    prune.l1_unstructured(s.module.W_k, "weight", 0.5)
    prune.remove(s.module.W_k, "weight")


@way("bias", "`bias = Parameter(new)`")
def new_bias(s):
    s.module.bias = nn.Parameter(s.draw(*s.module.bias.shape))


@way("bias", "`bias = Parameter(new)` of the same id", new_bias)
def bias_of_the_same_id(s):
    """And of the same memory; Python often puts a new object where one of its size has died."""
    memory, identity = s.module.bias.detach(), id(s.module.bias)
    array(memory)[:] = array(s.draw(*memory.shape))
    s.module.bias = None
    tried = [nn.Parameter(memory)]
    while id(tried[-1]) != identity and len(tried) < 64:
        tried.append(nn.Parameter(memory))
    s.module.bias = tried[-1]


# ---- layers and modules

WAYS += [*LAYERED, *MADE_ANEW]


def other_module(copied, original):
    """The weights of a copy change; the next call is by the copy, or by the original."""

    def change(s):
        s.module.attention_weights = None  # of the graph: the plain module cannot copy it
        other = copied(s.module)
        with torch.no_grad():
            other.W_k.weight.mul_(-1.5)
        s.module = s.module if original else other

    return change


def pickled(module):
    return pickle.loads(pickle.dumps(module))


way("layers", "`deepcopy`, the copy changed and called")(other_module(copy.deepcopy, False))
way("layers", "`deepcopy`, the copy changed", moves=False)(other_module(copy.deepcopy, True))
way("layers", "`pickle`, the copy changed and called")(other_module(pickled, False))


@way("layers", "`functional_call` with other weights", moves=False)
def called_with_others(s):
    others = {name: s.draw(*p.shape) for name, p in s.module.named_parameters()}
    return torch.func.functional_call(s.module, others, (s.queries, s.keys, s.values, s.lens))
