"""A fused module beside the plain one in what its users do around it: every number the same.

``STORIES`` take a module through calls, of which the later ones are replayed, and tell what came of
it. Told are besides: gradients and state of the module, and the next random number.
"""

import collections
import contextlib
import copy
import dataclasses
import pickle
import threading
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bahdanau_fast as bf

B, T, H, CALLS = 3, 7, 16, 6


class Att(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, 1)

    def forward(self, q, k):
        return self.look(q, k, self.Ua(k))

    def look(self, q, k, u):
        w = torch.softmax(self.Va(torch.tanh(self.Wa(q).unsqueeze(1) + u)).squeeze(2), -1)
        return torch.bmm(w.unsqueeze(1), k).squeeze(1), w


def data(length=None):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((B, H), (B, length or T, H))
    ]


def back(*found):
    """A backward from all that asks for one."""
    asked = [x for x in found if isinstance(x, torch.Tensor) and x.requires_grad]
    if asked:
        sum(x.pow(2).sum() for x in asked).backward()


def calls(m, *more, n=CALLS, length=None):
    """Some calls, each with its backward, on other queries."""
    q, k = data(length)
    told = [m(q + i, k, *more) for i in range(n)]
    for found in told:
        back(*(found if isinstance(found, tuple) else [found]))
    return told


def same(got, want, at=""):
    """Of what was told; types too."""
    assert type(got) is type(want), at
    if isinstance(want, torch.Tensor):
        assert (got.requires_grad, got.dtype, got.device) == (
            want.requires_grad,
            want.dtype,
            want.device,
        ), at
        if want.device.type == "meta":
            assert got.shape == want.shape, at
            return
        size = float(want.detach().nan_to_num().abs().max()) if want.numel() else 0.0
        share = (
            1e-9 if want.dtype is torch.float64 else 1e-2 if want.dtype is torch.bfloat16 else 1e-5
        )
        torch.testing.assert_close(
            got, want, rtol=0, atol=share * size + 1e-12, equal_nan=True, msg=lambda m: f"{at}: {m}"
        )
    elif isinstance(want, dict):
        assert list(got) == list(want), at
        for name in want:
            same(got[name], want[name], f"{at}.{name}")
    elif isinstance(want, (list, tuple, collections.deque)):
        assert len(got) == len(want), at
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            same(a, b, f"{at}[{i}]")
    else:
        assert got == want, at


STORIES = {}


def story(kind=Att, fused=True):
    """Registers what is done with a module; ``fused``: the operator has to run in it."""

    def add(function):
        STORIES[function.__name__] = function, kind, fused
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
    if fused:
        assert sum(record.fused for record in report._records) > 0, str(report)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * 0.1


scale = Scale.apply  # bound before anything is fused


@story()
def function_in_a_hook(m):
    m.Va.register_forward_hook(lambda _, __, o: Scale.apply(o))
    return calls(m)


@story(fused=False)
def function_bound_earlier_of_small_values(m):
    m.Ua.register_forward_hook(lambda _, __, o: scale(o))
    with torch.no_grad():
        [p.mul_(1e-3) for p in m.parameters()]
    return calls(m)


class Late(Att):
    n = 0

    def forward(self, q, k):
        self.n += 1
        u = self.Ua(k)
        return self.look(q, k, scale(u) if self.n > 3 else u)


@story(Late)
def function_of_a_later_branch(m):
    return calls(m, n=9), m.n


@story(Late)
def layers_unfrozen_later(m):
    told = []
    for asked in (False, True, False):
        m.Ua.requires_grad_(asked)
        told.append(calls(m))
    return told


@story(fused=False)
def checkpoints_in_hooks(m):
    for name in ("Wa", "Ua", "Va"):
        m.get_submodule(name).register_forward_hook(
            lambda _, __, o: checkpoint(torch.sin, o, use_reentrant=True)
        )
    return calls(m)


def checkpointed(reentrant, warm):
    def told(m):
        q, k = data()
        q.requires_grad_(torch.is_grad_enabled())
        found = [calls(m, n=warm)]
        for _ in range(3):
            found.append(checkpoint(m, q, k, use_reentrant=reentrant))
            back(*found[-1])
        return found, q.grad, calls(m)

    return told


for reentrant in (False, True):
    for warm in (0, 5):
        STORIES[f"checkpoint {reentrant} {warm}"] = checkpointed(reentrant, warm), Att, True


@story(fused=False)
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
    with contextlib.closing(types.SimpleNamespace(close=hook.remove)):
        return calls(m), dict(sorted(seen.items()))


class Ret(Att):
    def forward(self, q, k):
        u = self.Ua(k)
        return self.look(q, k, u)[0], u


@story(Ret)
def projections_of_steps_keep_their_gradients(m):
    q, k = data()
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
    q, k = data()
    told = []
    for i in range(CALLS):
        c, u = m(q + i, k)
        told += [c.clone(), u.clone()]
        with torch.no_grad():
            u.mul_(0.5)
    return told


class Glimpse(Att):
    def forward(self, q, k):
        u = self.Ua(k)
        c, w = self.look(q, k, u)
        if not torch.is_grad_enabled():
            u.mul_(w.unsqueeze(2))
        return c + u.sum(1), w


@story(Glimpse)
def projections_are_written_to_inside(m):
    return calls(m)


@story()
def a_plot_of_the_projection_is_scaled(m):
    seen = []

    def hook(_, __, o):
        seen.append(o.detach())
        seen[-1].sub_(seen[-1].min())

    with torch.no_grad():
        m.Ua.register_forward_hook(hook)
        return calls(m), seen


@story()
def scores_are_kept_while_weights_step(m):
    seen, told = [], []
    optimizer = torch.optim.SGD(m.parameters(), 0.5)
    m.Va.register_forward_hook(lambda _, __, o: seen.append((o, o.detach())) or None)
    for _ in range(CALLS):
        told += calls(m, n=1)
        optimizer.step()
    return told, seen


LIST = []


class Keeps(Att):
    """Scores and sums in whatever may hold them."""

    def __init__(self):
        super().__init__()
        self.state, self.log = types.SimpleNamespace(seen=0.0, n=0), collections.deque()
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
        found = types.SimpleNamespace(s=s, later=lambda: both * 2)
        return (torch.bmm((w + noise).unsqueeze(1), k).squeeze(1), found)


@story(Keeps, fused=False)
def everything_is_kept(m):
    LIST.clear()
    given, told = [], []
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    q, k = data()
    for i in range(2 * CALLS):
        c, found = m(q + i, k, given)
        told += [c, found.s, found.later()]
        if c.requires_grad:
            told += [torch.autograd.grad(c.sum(), m._s, retain_graph=True)]
        back(c)
        optimizer.step()
        k.mul_(0.9)
        told += [found.later(), m._s, m.state.seen.clone()]
    return told, given, m.log, dict(m.maps), list(LIST), m.state.n, m.noise.get_state()


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
    q, k = data()
    k.requires_grad_(torch.is_grad_enabled())
    told = []
    for kind in (dict, collections.OrderedDict, lambda: collections.defaultdict(int)):
        state = kind()
        steps = [m(q + i, k, state) for i in range(CALLS)]
        back(sum(steps))
        told += [steps, dict(state)]
    return told, k.grad


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


@dataclasses.dataclass(slots=True)
class Found:
    c: torch.Tensor


class Slots(Att):
    def forward(self, q, k):
        return Found(super().forward(q, k)[0])


@story(Slots)
def a_dataclass_with_slots(m):
    return [found.c for found in calls(m)]


class Branches(Att):
    def forward(self, q, k):
        if float(q.sum()) > 0:
            return self.look(q, k, self.Ua(k.flip(1)))
        both = self.Wa(q).unsqueeze(1) + self.Ua(k)
        if float(both.detach().sum()) > -1e3:
            k = k * 2
        w = torch.softmax(self.Va(torch.tanh(both)).squeeze(2), -1)
        return torch.bmm(w.unsqueeze(1), k).squeeze(1), w


@story(Branches)
def data_decide(m):
    q, k = data()
    told = []
    for i in (0, 0, 0, 3, 3, 3, -3, 0, -3, 3, -30, -30):
        told.append(m(q + i, k))
        back(*told[-1])
    return told


class Fails(Att):
    n = 0

    def forward(self, q, k):
        self.n += 1
        both = self.Wa(q).unsqueeze(1) + self.Ua(k)
        if self.n % 4 == 0:
            raise ValueError(self.n)
        w = torch.softmax(self.Va(torch.tanh(both)).squeeze(2), -1)
        return torch.bmm(w.unsqueeze(1), k).squeeze(1), w


@story(Fails)
def errors_of_its_own_are_counted_once(m):
    q, k = data()
    told = []
    for given in (q, q, q, q, q.float(), q, q, q[:, 1:], q, q, q, q):
        try:
            told.append(m(given, k))
            back(*told[-1])
        except (RuntimeError, ValueError) as error:
            told.append((type(error), str(error)))
    return told, m.n


@story()
def sizes_come_and_go(m):
    return [calls(m, n=3, length=length) for length in (1, 1, T, 2, T, 1, T)]


@story(fused=False)
def no_rows_first(m):
    q, k = data()
    return m(q[:0], k[:0]), m(q[:0], k[:0]), calls(m), m(q[:0], k[:0]), m(q, k[:, :0])


@story()
def dtypes_come_and_go(m):
    told = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float64):
        q, k = (x.to(dtype) for x in data())
        m.to(dtype)
        told.append([m(q, k)[1].dtype for _ in range(3)])
        if dtype is not torch.bfloat16:
            told.append([m(q, k) for _ in range(CALLS)])
    return told


@story()
def parameters_freeze_and_step(m):
    optimizer, told = torch.optim.SGD(m.parameters(), 1e-2, 0.9), []
    for i in range(4):
        for name, p in m.named_parameters():
            p.requires_grad_(i == 0 or not name.startswith(("Wa", "Ua", "Va")[i - 1]))
        for _ in range(3):
            optimizer.zero_grad()
            told += calls(m, n=1)
            optimizer.step()
    return told


@story()
def inference_mode_in_between(m):
    q, k = data()
    told = [calls(m, n=3)]
    with torch.inference_mode():
        seen = [m(q, k) for _ in range(3)]
        told.append([seen[-1][0].clone(), seen[-1][1].is_inference(), type(seen[-1][1])])
    return told, calls(m, n=3)


@story()
def modes_of_gradients_come_and_go(m):
    told = []
    for on in (True, False, True, False):
        with torch.set_grad_enabled(on):
            told.append(calls(m, n=3))
    return told


class Normed(Att):
    def __init__(self):
        super().__init__()
        self.Va = nn.utils.weight_norm(self.Va)


@story(Normed)
def weight_norm(m):
    told = calls(m)
    with torch.no_grad():
        m.Va.weight_g.mul_(2)
    return told, calls(m), calls(m.float().double())


class Drops(Att):
    def forward(self, q, k):
        c, w = super().forward(q, k)
        w = nn.functional.dropout(w, 0.5, self.training)
        return torch.bmm(w.unsqueeze(1), k).squeeze(1), c


@story(Drops)
def dropout_draws_the_same(m):
    return calls(m), calls(m.eval()), calls(m.train())


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
    q, k = data()
    return [m(q, k, each) for each in (pad, pad, empty, empty, pad, empty)]


class Held(Att):
    def forward(self, q):
        return self.look(q, self.k, self.p)


@story(Held)
def keys_held_by_the_module_become_long(m):
    told = []
    for length in (2, 40):
        q, m.k = data(length)
        for i in range(CALLS):
            m.p = m.Ua(m.k)
            told.append(m(q + i))
            back(*told[-1])
    return told


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
def functional_calls(m):
    q, k = data()
    others = [{name: p.detach() * i for name, p in m.named_parameters()} for i in range(1, 5)]
    told = [torch.func.functional_call(m, other, (q, k)) for other in (*others, *others)]
    stacked = {name: torch.stack([other[name] for other in others]) for name in others[0]}

    def loss(params, q):
        return torch.func.functional_call(m, params, (q, k))[0].sum()

    for _ in range(3):
        told.append(torch.vmap(loss, in_dims=(0, None))(stacked, q))
        told.append(torch.func.grad(loss)(others[0], q))
        told.append(torch.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None))(stacked, q))
        told += calls(m, n=2)
    return told


@story()
def gradients_of_gradients(m):
    told = calls(m)
    if torch.is_grad_enabled():
        for _ in range(3):
            q, k = data()
            q.requires_grad_()
            (first,) = torch.autograd.grad(m(q, k)[0].pow(2).sum(), q, create_graph=True)
            told.append(torch.autograd.grad(first.pow(2).sum(), [q, m.Ua.weight]))
    return told


@story()
def threads_from_the_first_call(m):
    q, k = data()
    told, grad = {}, torch.is_grad_enabled()

    def one(name):
        with torch.set_grad_enabled(grad):
            told[name] = [m(q + name, k) for _ in range(2 * CALLS)]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(told.items())), calls(m)


@story(fused=False)
def meta_tensors(m):
    told = calls(m)
    q, k = (x.to("meta") for x in data())
    return told, [m.to("meta")(q, k) for _ in range(CALLS)]


@story()
def autocast_in_and_out(m):
    m.float()
    q, k = (x.float() for x in data())
    told = []
    for on in (True, False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found = [m(q, k) for _ in range(CALLS)]
        told.append(found if not on else [[x.to(torch.bfloat16) for x in each] for each in found])
    return told


class Cache:
    k = v = None

    def update(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], 1)
        self.v = v if self.v is None else torch.cat([self.v, v], 1)
        return self.k, self.v


class Block(nn.Module):
    """Of a transformer, with a soft cap."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.up = (nn.Linear(H, H) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(H))

    def forward(self, x, cache):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        k, v = cache.update(self.k(normed), self.v(normed))
        scores = 5 * torch.tanh(self.q(normed) @ k.transpose(1, 2) / 20)
        return x + torch.relu(self.up(scores.softmax(-1) @ v + x))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(11, H), nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids, caches):
        x = self.words(ids)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return x @ self.words.weight.t()


@story(Words, fused=False)
def a_transformer_with_a_cache(m):
    caches, ids, told = [Cache(), Cache()], torch.tensor([[1, 2], [3, 4]]), []
    for _ in range(9):
        told.append(m(ids, caches))
        ids = told[-1][:, -1:].argmax(-1)
    back(*told)
    return told, [cache.k for cache in caches], [type(part).__name__ for part in m.modules()]


class End(Att):
    def look(self, x, k):
        w = x.squeeze(-1).softmax(-1)
        return torch.bmm(w.unsqueeze(1), k).squeeze(1), w

    def both(self, q, k):
        return self.Wa(q).unsqueeze(1) + self.Ua(k)

    def pairs(self, q, k):
        return torch.cat([q.unsqueeze(1).expand_as(k), k], -1)


class Act(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


class Mlp(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.a, self.b = nn.Linear(size, H), nn.Linear(H, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def channels(m, q, k):
    """Channels first, weights expanded over the batch."""
    x, b = m.pairs(q, k).transpose(1, 2), len(q)
    scores = torch.bmm(m.v.t().expand(b, 1, H), torch.tanh(torch.bmm(m.W.t().expand(b, H, -1), x)))
    w = scores.softmax(2)
    return torch.bmm(w, k).squeeze(1), w


LIBRARY = types.SimpleNamespace(score=lambda q, k, v: torch.tanh(q.unsqueeze(1) + k) @ v.t())
ELSEWHERE = {
    "a library": lambda m, q, k: m.look(LIBRARY.score(m.Wa(q), m.Ua(k), m.Va.weight), k),
    "an activation": lambda m, q, k: m.look(m.Va(m.act(m.both(q, k))), k),
    "a score net": lambda m, q, k: m.look(m.mlp(m.pairs(q, k)), k),
    "a matrix": lambda m, q, k: m.look(torch.tanh(m.pairs(q, k) @ m.W) @ m.v, k),
    "channels first": channels,
    "a sub-module": lambda m, q, k: m.look(nn.Sequential.forward(m.part, m.both(q, k)), k),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_formula_elsewhere_is_found(name):
    class Kind(End):
        forward = ELSEWHERE[name]

        def __init__(self):
            super().__init__()
            self.act, self.mlp, self.part = Act(), Mlp(2 * H), nn.Sequential(Act(), self.Va)
            self.W, self.v = nn.Parameter(torch.randn(2 * H, H)), nn.Parameter(torch.randn(H, 1))

    want, _ = tell(calls, Kind, always=False)
    got, report = tell(calls, Kind, always=True)
    same(got, want)
    assert report.fused
    assert sum(record.fused for record in report._records) > 0
