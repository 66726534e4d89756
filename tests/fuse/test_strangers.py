"""A fused module beside the plain one in what its users do around it: every number the same.

``STORIES`` take a module through calls, of which the later ones are replayed, and tell what came of
it. Told are besides: gradients and state of the module, and the next random number.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import MethodType, SimpleNamespace

import pytest
import torch
from beside import ran, same
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import weight_norm
from torch.utils.checkpoint import checkpoint

import bahdanau_fast as bf

B, T, H, CALLS = 3, 7, 16, 6
F64 = torch.float64


class Att(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, 1)

    def forward(self, q, k):
        return self.look(q, k, self.Ua(k))

    def look(self, q, k, u):
        return self.weigh(self.Wa(q).unsqueeze(1) + u, k)

    def weigh(self, both, k):
        w = torch.softmax(self.Va(torch.tanh(both)).squeeze(2), -1)
        return torch.bmm(w.unsqueeze(1), k).squeeze(1), w


def given(m, length=T, batch=B):
    """Queries and keys for a module."""
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode(False):
        return [
            torch.randn(shape, generator=generator, dtype=F64).to(next(m.parameters()))
            for shape in ((batch, H), (batch, length, H))
        ]


def back(*found):
    """A backward from all that asks for one."""
    asked = [x for x in found if isinstance(x, torch.Tensor) and x.requires_grad]
    if asked:
        sum(x.pow(2).sum() for x in asked).backward()


def calls(m, *more, by=range(CALLS), length=T, batch=B):
    """Calls on queries that differ by these numbers, each with its backward."""
    q, k = given(m, length, batch)
    told = [m(q + i, k, *more) for i in by]
    for found in told:
        back(*(found if isinstance(found, tuple | list) else [found]))
    return told


STORIES = {}


def story(kind=Att, fused=(True, False), name=None):
    """Registers what is done with a module; ``fused``: in which modes of gradients it has to be."""

    def add(function):
        STORIES[name or function.__name__] = function, kind, fused
        return function

    return add


def tell(function, kind, *, always):
    torch.manual_seed(0)
    module = kind().double()
    report = bf.fuse(module, always=True) if always else None
    told = [function(module)]
    told += [{name: p.grad for name, p in module.named_parameters()}, dict(module.state_dict())]
    return [*told, torch.rand(())], report


@pytest.mark.filterwarnings("ignore")  # of torch, about hooks, checkpoints and weight_norm
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("name", STORIES)
def test_a_fused_module_tells_the_same(name, grad):
    function, kind, fused = STORIES[name]
    with torch.set_grad_enabled(grad):
        want, _ = tell(function, kind, always=False)
        got, report = tell(function, kind, always=True)
    same(got, want)
    assert (ran(report) > 0) == (grad in fused), str(report)


# ---- hooks and functions


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * 0.1


def changed(change):
    """What makes a module that is changed."""

    def make():
        module = Att()
        change(module)
        return module

    return make


def hooked(layers, hook):
    """With a hook on the results of some layers."""

    def told(m):
        for layer in layers:
            m.get_submodule(layer).register_forward_hook(lambda _, __, o: hook(o))
        return calls(m)

    return told


def plot(x):
    x = x.detach()
    x.sub_(x.min())


sine = functools.partial(checkpoint, torch.sin, use_reentrant=True)
story(name="a function in a hook")(hooked(["Va"], Scale.apply))
small = changed(lambda m: [p.data.mul_(1e-3) for p in m.parameters()])
story(small, name="a function of small values")(hooked(["Ua"], Scale.apply))
story(fused=(False,), name="checkpoints in hooks")(hooked(["Wa", "Ua", "Va"], sine))
story(name="what is plotted is scaled")(hooked(["Ua"], plot))


class Late(Att):
    n = 0

    def forward(self, q, k):
        self.n += 1
        u = self.Ua(k)
        return self.look(q, k, Scale.apply(u) if self.n > 3 else u)


def checkpointed(reentrant, warm):
    def told(m):
        q, k = given(m)
        q.requires_grad_(torch.is_grad_enabled())
        found = [calls(m, by=range(warm))]
        for _ in range(3):
            found.append(checkpoint(m, q, k, use_reentrant=reentrant))
            back(*found[-1])
        return found, q.grad, calls(m)

    return told


for reentrant in (False, True):
    for warm in (0, 5):
        story(name=f"checkpoint {reentrant} {warm}")(checkpointed(reentrant, warm))


@story(fused=())
def full_backward_hooks(m):
    seen = []
    for layer in (m.Ua, m.Va, m.Wa):
        layer.register_full_backward_hook(lambda _, i, o: seen.append((i, o)) or None)
        layer.register_forward_hook(lambda *_: seen.append(1) or None)
    return calls(m), seen


@story()
def hooks_of_parameters_and_of_all_modules(m):
    seen = collections.Counter()
    for name, p in m.named_parameters():
        if torch.is_grad_enabled():
            p.register_hook(lambda _, name=name: seen.update([name]))
    hook = nn.modules.module.register_module_forward_hook(
        lambda part, _, __: seen.update([type(part).__name__])
    )
    told = calls(m)
    hook.remove()
    return told, dict(sorted(seen.items()))


# ---- what is kept, and what is written to


class Ret(Att):
    def forward(self, q, k):
        u = self.Ua(k)
        return self.look(q, k, u)[0], u


@story(Ret)
def projections_of_steps_keep_their_gradients(m):
    q, k = given(m)
    k.requires_grad_(torch.is_grad_enabled())
    told = []
    for _ in range(3):
        h, us, seen = q, [], []
        for _ in range(3):
            c, u = m(h, k)
            if u.requires_grad:
                u.retain_grad()
                u.register_hook(lambda g, seen=seen: seen.append(g.clone()))
            us.append(u)
            h = torch.tanh(c + h)
        if h.requires_grad:
            told.append(torch.autograd.grad(h.sum(), us, retain_graph=True))
        back(h)
        told += [us, seen, [u.grad for u in us]]
    return told


@story(Ret)
def projections_are_written_to(m):
    q, k = given(m)
    told = []
    for i in range(CALLS):
        c, u = m(q + i, k)
        told += [c.clone(), u.clone()]
        with torch.no_grad():
            u.mul_(0.5)
    return told


class Writing(Att):
    """Writes to its keys when they are projected, and to what it projected after the operator."""

    def forward(self, q, k, write):
        k = k.clone()
        u, q = self.Ua(k), self.Wa(q)
        write(k)
        found = self.weigh(q.unsqueeze(1) + u, k)
        write(q)
        write(u)
        return *found, q.sum() + u.sum()


WRITERS = {
    "mul_": lambda x: x.mul_(0.5),
    "data": lambda x: x.data.mul_(0.5),
    "a part": lambda x: x[0].zero_(),
    "an index": lambda x: x.__setitem__(0, 0.0),
    "numpy": lambda x: x.numpy().fill(0.5),
    "out": lambda x: torch.add(x, 1.0, out=x),
    "inplace": lambda x: nn.functional.relu(x, True),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
}


def written(write):
    return lambda m: torch.no_grad()(calls)(m, write)


for name, write in WRITERS.items():
    story(Writing, name=f"{name} writes")(written(write))


@story()
def scores_are_kept_while_weights_step(m):
    seen, told = [], []
    optimizer = torch.optim.SGD(m.parameters(), 0.5)
    m.Va.register_forward_hook(lambda _, __, o: seen.append((o, o.detach())) or None)
    for _ in range(CALLS):
        told += calls(m, by=[0])
        optimizer.step()
    return told, seen


LIST = []


@dataclasses.dataclass(slots=True)
class Found:
    s: torch.Tensor
    later: object


class Keeps(Att):
    """Scores and sums in whatever may hold them."""

    def __init__(self):
        super().__init__()
        self.state, self.log = SimpleNamespace(seen=0.0, n=0), collections.deque()
        self.maps, self.noise = collections.defaultdict(list), torch.Generator().manual_seed(1)

    def forward(self, q, k, given=None):
        both = self.Wa(q).unsqueeze(1) + self.Ua(k)
        s = self.Va(torch.tanh(both)).squeeze(2)
        w = s.softmax(-1)
        self._s, self.state.n = s, self.state.n + 1
        self.state.seen = self.state.seen + w.detach()
        self.log.append(both)
        self.maps["s"].append(s)
        LIST.append(w)
        if given is not None:
            given.append(s)
        noise = torch.rand(w.shape, generator=self.noise, dtype=w.dtype)
        return torch.bmm((w + noise).unsqueeze(1), k).squeeze(1), Found(s, lambda: both * 2)


@story(Keeps, fused=())
def everything_is_kept(m):
    LIST.clear()
    held, told = [], []
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    q, k = given(m)
    for i in range(2 * CALLS):
        c, found = m(q + i, k, held)
        told += [c, found.s, found.later()]
        if c.requires_grad:
            told += [torch.autograd.grad(c.sum(), m._s, retain_graph=True)]
        back(c)
        optimizer.step()
        k.mul_(0.9)
        told += [found.later(), m._s, m.state.seen.clone()]
    return told, held, m.log, dict(m.maps), list(LIST), m.state.n, m.noise.get_state()


class State(Att):
    """Keys and projections that an object of the caller holds."""

    def forward(self, q, k, state):
        if "k" not in state:
            state["k"] = k.transpose(0, 1).contiguous()
            state["p"] = self.Ua(state["k"])
        w = torch.softmax(self.Va(torch.tanh(self.Wa(q) + state["p"])).squeeze(2), 0)
        return torch.einsum("tb,tbh->bh", w, state["k"])


@story(State)
def states_of_the_caller(m):
    q, k = given(m)
    k.requires_grad_(torch.is_grad_enabled())
    told = []
    for kind in (dict, collections.OrderedDict, lambda: collections.defaultdict(int)):
        state = kind()
        steps = [m(q + i, k, state) for i in range(CALLS)]
        back(sum(steps))
        told += [steps, state]
    return told, k.grad


class Held(Att):
    def forward(self, q):
        return self.look(q, self.k, self.p)


@story(Held)
def what_the_module_holds_changes(m):
    told = []
    for length in (2, 40):
        q, m.k = given(m, length)
        for change in (torch.clone, lambda x: x.mul_(-1.5), lambda x: x.numpy().fill(0.5)):
            change(m.k)
            for i in range(CALLS):
                m.p = m.Ua(m.k)
                told.append(m(q + i))
                back(*told[-1])
            with torch.no_grad():
                m.p = m.Ua(m.k)
                told += [m(q + i) for i in range(CALLS)]
                change(m.p)
                told += [m(q + i) for i in range(CALLS)]
    return told


class Values(Att):
    def forward(self, q, k, v):
        return torch.bmm(super().forward(q, k)[1].unsqueeze(1), v)


@story(Values)
def tensors_that_were_one_may_be_two(m):
    q, k = given(m)
    return [m(q + i, k, v) for v in (k, 2 * k, k) for i in range(CALLS)]


class Sums(Att):
    def weigh(self, both, k):
        return (torch.softmax(self.Va(torch.tanh(both)), 1) * k).sum(1)


@story(Sums)
def contexts_are_detached_and_written_to(m):
    q, k = given(m)
    with torch.no_grad():
        frozen = [m(q + i, k) for i in range(CALLS)]
    told = [context.mul_(m.Va.weight.sum()) for context in frozen]
    back(*told)
    return told, [m(q + i, k).detach_() for i in range(CALLS)]


# ---- modules that do more


class Trains(Att):
    """A backward, a count, and numbers that are changed, inside forward."""

    def __init__(self):
        super().__init__()
        self.n, self.temp = 0, nn.Parameter(torch.ones(()), requires_grad=False)
        self.norms = [nn.BatchNorm1d(H).double()]

    def forward(self, q, k):
        self.n += 1
        self.temp.mul_(0.9)
        k = self.norms[0](k.transpose(1, 2)).transpose(1, 2)
        c, w = super().forward(q, k)
        back(c)
        return c.detach() * self.temp, w.detach()


@story(Trains)
def a_module_that_trains_itself(m):
    return calls(m), m.n, int(m.norms[0].num_batches_tracked), m.norms[0].running_mean


def slopes(own, q, k):
    return torch.func.grad(lambda q: own(q, k)[0].sum())(q)


def tangents(own, q, k):
    with torch.no_grad(), forward_ad.dual_level():
        context, _ = own(forward_ad.make_dual(q, k[:, 0]), k)
        return forward_ad.unpack_dual(context).tangent.clone()


def deriving(how):
    class Derives(Att):
        def forward(self, q, k):
            return super().forward(q, k), how(super().forward, q, k)

    return Derives


for how in (slopes, tangents):
    story(deriving(how), fused=(), name=f"{how.__name__} of its own")(calls)


class Branches(Att):
    def forward(self, q, k):
        if float(q.sum()) > 0:
            return self.look(q, k, self.Ua(k.flip(1)))
        both = self.Wa(q).unsqueeze(1) + self.Ua(k)
        return self.weigh(both, k * 2 if float(both.detach().sum()) > -1e3 else k)


@story(Branches)
def data_decide(m):
    return calls(m, by=(0, 0, 0, 3, 3, 3, -3, 0, -3, 3, -30, -30))


class Conditional(Att):
    def forward(self, q, k):
        return super().forward(torch.cond(q.sum() > 0, torch.sin, torch.cos, (q,)), k)


story(Conditional, name="an operator that calls the compiler")(calls)


class Fails(Att):
    n = 0

    def forward(self, q, k):
        self.n += 1
        both = self.Wa(q).unsqueeze(1) + self.Ua(k)
        if self.n % 4 == 0:
            raise ValueError(self.n)
        return self.weigh(both, k)


def outcomes(m, *pairs):
    """Results or errors."""
    told = []
    for pair in pairs:
        try:
            told.append(m(*pair))
            back(*told[-1])
        except (RuntimeError, ValueError) as error:
            told.append((type(error), str(error)))
    return told


@story(Fails)
def errors_of_its_own_are_counted_once(m):
    q, k = given(m)
    queries = q, q, q, q, q.float(), q, q, q[:, 1:], q, q, q, q
    return outcomes(m, *((each, k) for each in queries)), m.n


@story()
def queries_of_shapes_that_broadcast_or_do_not(m):
    q, k = given(m)
    others = q[:1], q[:2], q[0], q[:1].unsqueeze(1), q.unsqueeze(1), q.expand(B, B, H)
    return outcomes(m, *((each, k) for other in others for each in (q, q, q, other, other, other)))


class Drops(Att):
    def forward(self, q, k):
        c, w = super().forward(q, k)
        w = nn.functional.dropout(w, 0.5, self.training)
        return torch.bmm(w.unsqueeze(1), k).squeeze(1), c


class Repairs(Att):
    def forward(self, q, k, pad):
        s = self.Va(torch.tanh(self.Wa(q).unsqueeze(1) + self.Ua(k))).squeeze(2)
        w = s.masked_fill(pad, -torch.inf).softmax(-1)
        return torch.nan_to_num(torch.bmm(w.unsqueeze(1), k).squeeze(1)), w


@story(Repairs)
def rows_with_nothing_to_look_at(m):
    pad = torch.arange(T).expand(B, T) >= 5
    empty = pad.clone()
    empty[1] = True
    q, k = given(m)
    return [m(q, k, each) for each in (pad, pad, empty, empty, pad, empty)]


# ---- what changes between calls


def lazy():
    module = Att()
    module.Wa, module.Ua = nn.LazyLinear(H), nn.LazyLinear(H)
    return module


def in_turn(*changes, n=3):
    """Calls after each change of the module, or inside what that gives."""

    def told(m):
        found = []
        for change in changes:
            inside = change(m)
            with inside if hasattr(inside, "__enter__") else contextlib.nullcontext():
                found.append(calls(m, by=range(n)))
        return found

    return told


def sized(*sizes):
    return lambda m: [calls(m, by=range(3), batch=batch, length=length) for batch, length in sizes]


def fresh():
    """A module of a class of its own, which is patched."""

    class Fresh(Att):
        forward, look = Att.forward, Att.look

    module = Fresh()
    module.kind = Fresh
    return module


def filled(activation, temperature):
    class Filled(Att):
        """Scores that may be lower than what is filled in."""

        def weigh(self, both, k):
            s = activation(both).matmul(-self.Va.weight[0].abs()) / temperature
            w = s.masked_fill(k[..., 0] > 0, -1e4).softmax(-1)
            return torch.bmm(w.unsqueeze(1), k).squeeze(1), w

    return Filled


def doubled(function):
    return lambda *given: [2 * x for x in function(*given)]


def compiled(told):
    return lambda m: told(torch.compile(m, backend="eager", fullgraph=True))


def patch(m):
    plain = getattr(m, "_orig_mod", m)  # of compiled code
    plain.look = MethodType(doubled(Att.look), plain)


as_is = nn.Module.parameters  # changes nothing
patched = in_turn(as_is, patch)
patched_look = in_turn(as_is, lambda m: setattr(m.kind, "look", doubled(Att.look)))
patched_forward = in_turn(as_is, lambda m: setattr(m.kind, "forward", doubled(Att.forward)))
modes = [lambda _, on=on: torch.set_grad_enabled(on) for on in (True, False, True, False)]
thawed = [lambda m, on=on: m.Ua.requires_grad_(on) for on in (True, False, True, False)]

grown = in_turn(as_is, lambda m: m.Va.weight.data.mul_(1e6))
renormed = as_is, lambda m: m.Va.weight_g.data.mul_(2), lambda m: m.float().double()
dtypes = [lambda m, d=d: m.to(d).zero_grad() for d in (F64, torch.float32, torch.bfloat16, F64)]
for name, told, *more in (
    ("no rows first", sized((0, T), (B, T), (0, T), (B, 0), (B, T))),
    ("one key first", sized((B, 1), (B, 1), (B, T), (B, 2), (B, T), (B, 1), (B, T))),
    ("modes of gradients", in_turn(*modes)),
    ("inference mode", in_turn(as_is, lambda _: torch.inference_mode(), as_is)),
    ("dtypes", in_turn(*dtypes)),
    ("meta tensors", in_turn(as_is, lambda m: m.to("meta"))),
    ("dropout", in_turn(nn.Module.train, nn.Module.eval, nn.Module.train), Drops),
    ("lazy layers", calls, lazy),
    ("a later branch with a function", in_turn(*thawed, n=CALLS), Late),
    ("a norm", in_turn(*renormed), changed(lambda m: setattr(m, "Va", weight_norm(m.Va)))),
    ("a hook", in_turn(as_is, lambda m: m.Ua.register_forward_hook(lambda _, __, o: 2 * o), as_is)),
    ("low scores of relu", grown, filled(torch.relu, 1.0)),
    ("low scores of tanh", grown, filled(torch.tanh, 1e-2)),
    ("a method of the instance", patched),
    ("a method", patched_look, fresh),
    ("forward", patched_forward, fresh),
    ("a method of the instance, compiled", compiled(patched), Att, ()),
    ("forward, compiled", compiled(patched_forward), fresh, ()),
):
    story(*more, name=name)(told)


@story()
def copies_before_and_after(m):
    told = []
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        told += [calls(other), [p.grad for p in other.parameters()], type(other).__name__]
    told.append(calls(m))
    for other in (copy.deepcopy(m), copy.copy(m), pickle.loads(pickle.dumps(m))):
        other.zero_grad()
        with torch.no_grad():
            other.Va.weight.add_(1.0)
        told += [calls(other), [p.grad for p in other.parameters()]]
    return told, calls(m), calls(type(m)().double())


@story()
def a_replica_computes_with_its_own_layers(m):
    told, replica = calls(m), m._replicate_for_data_parallel()
    replica._modules = dict(copy.deepcopy(m)._modules)
    replica.Va.weight.data.neg_()
    return told, calls(replica), calls(m)


@story()
def functional_calls(m):
    q, k = given(m)
    others = [{name: p.detach() * i for name, p in m.named_parameters()} for i in range(1, 5)]
    told = [torch.func.functional_call(m, other, (q, k)) for other in (*others, *others)]
    stacked = {name: torch.stack([other[name] for other in others]) for name in others[0]}

    def loss(params, q):
        return torch.func.functional_call(m, params, (q, k))[0].sum()

    for _ in range(3):
        told.append(torch.vmap(loss, in_dims=(0, None))(stacked, q))
        told.append(torch.func.grad(loss)(others[0], q))
        told.append(torch.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None))(stacked, q))
        told += calls(m, by=(0, 1))
    return told


@story()
def gradients_of_gradients(m):
    told = calls(m)
    for _ in range(3 * torch.is_grad_enabled()):
        q, k = given(m)
        q.requires_grad_()
        (first,) = torch.autograd.grad(m(q, k)[0].pow(2).sum(), q, create_graph=True)
        told.append(torch.autograd.grad(first.pow(2).sum(), [q, m.Ua.weight]))
    return told


@story()
def threads_from_the_first_call(m):
    q, k = given(m)
    grad = torch.is_grad_enabled()

    def one(i):
        with torch.set_grad_enabled(grad):
            return [m(q + i, k) for _ in range(2 * CALLS)]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(4))), calls(m)


@story()
def autocast_in_and_out(m):
    q, k = given(m.float())
    told = []
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32):
        on = dtype is not torch.float32
        with torch.autocast("cpu", dtype if on else torch.bfloat16, enabled=on):
            for c, w in [m(q, k) for _ in range(CALLS)]:
                told += [c.dtype, w.dtype, c.to(dtype), w.to(dtype)]
    return told
