"""What a user feels: whole decoders, calls until they return, models of others.

A row is ``WHO: CALL``. Each is checked against the own module in fp64, then timed: in float32 with
TF32, or under autocast in bfloat16; where a call can be captured, from a CUDA graph too. A decoder
that is ``graphed`` is in ``make_graphed_callables``; what is ``compiled`` is so by
``torch.compile``, of ``fuse`` with its backend.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bahdanau_fast as bf
from bahdanau_fast import backends

from .. import measure
from ..contestants import CourseAttention
from ..decoders import DROP_IN, FUSE, NONE, OURS, OWN, TASKS, Judge, Setting, Work, worst
from ..measure import GpuCall, in_turns, interleave
from ..worker import ROOT
from . import Row

sys.path.append(str(ROOT / "tests" / "support"))  # where public code is written again
ROW_SECONDS = {"cuda": 60.0, "cpu": 300.0}
COMPILED_SECONDS, COMPILER = 90.0, "inductor"
GRAPHED, COMPILED = ", graphed", ", compiled"
WAYS = {False: "forward", True: "forward + backward"}
HOST = (*product(("module", "function"), WAYS), ("attend", False))
SIZES: dict[str, Any] = {
    "decoder": Setting(64, 50, 50, 256, 512, 1, 8000),
    "chapter": Setting(64, 10, 10, 32, 32, 2, 200),  # of the course
    "call": (64, 1, 50, 512),  # B, Tq, Tk, H
    "host": (2, 1, 10, 32),
    "tacotron": (64, 160, 1024, 512, 128, 32, 31),  # B, Tk, Dq, Dk, H, channels, taps
    "captioner": (32, 196, 2048, 512),  # B, Tk, Dk, H
    "compiled": None,  # so many rows of compiled code; None for all
}


class Step(NamedTuple):
    """A call of somebody's module: shapes of its inputs, what readies it, and ours beside it."""

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    ready: Callable[..., Callable[[], Any]] = partial
    ours: str = FUSE


def _lens(query: Tensor, keys: Tensor) -> Tensor:
    return 1 + torch.arange(len(query), device=query.device) % keys.shape[1]


READY: dict[str, Callable[..., Callable[[], Any]]] = {
    "module": lambda m, q, k: partial(m, q, k, k, _lens(q, k)),
    "attend": lambda m, q, k: partial(m.attend, q, m.memory(k, valid_lens=_lens(q, k))),
    "function": lambda m, q, k: partial(
        bf.additive_attention, q, k, k, m.W_q.weight, m.W_k.weight, m.w_v.weight, _lens(q, k)
    ),
}


def _course(name: str, sizes: tuple[int, ...]) -> Step:
    batch, queries, keys, hidden = sizes
    shapes = ((batch, queries, hidden), (batch, keys, hidden))
    make = partial(CourseAttention, hidden, hidden, hidden)
    return Step(name, make, shapes, READY["module"], DROP_IN)


def _tacotron(*sizes: int) -> nn.Module:
    from whole import LocationSensitive

    module: nn.Module = LocationSensitive(*sizes)
    del module.memory_layer  # the keys come projected
    return module


def _steps() -> tuple[Step, ...]:
    from whole import Captioning

    b, t, query, keys, hidden, *taps = SIZES["tacotron"]
    n, regions, region, state = SIZES["captioner"]
    return (
        _course(f"module call {_text(SIZES['call'])}", SIZES["call"]),
        Step(
            f"Tacotron step {_text(SIZES['tacotron'])}",
            partial(_tacotron, query, keys, hidden, *taps),
            ((b, query), (b, t, keys), (b, t, hidden), (b, 2, t)),
            lambda m, *given: partial(m, *given, given[1].new_zeros((b, t), dtype=torch.bool)),
        ),
        Step(
            f"captioner step {_text(SIZES['captioner'])}",
            partial(Captioning, region, state, state),
            ((n, regions, region), (n, state)),
        ),
    )


def _text(sizes: tuple[int, ...]) -> str:
    return str(sizes).replace(" ", "")


def _told(share: float, report: Any, who: str) -> dict[str, Any]:
    """The verdict, and whether ``fuse`` computes the calls: not where it does not pay."""
    told = {"passed": share <= 1, "worst": share}
    if report is not None and who == FUSE:
        told["fused"] = any(record.fused > 0 for record in report._records)
    return told


def _compile(module: nn.Module, who: str) -> None:
    if who.endswith(COMPILED):
        torch._dynamo.reset()  # beyond a few compilations of the same code it would stay eager
        module.compile(backend="bahdanau_fast" if FUSE in who else COMPILER)


def _call(
    who: str, step: Step, train: bool, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Callable[[], Any], Any]:
    """A call of who's module, its weights those of the own one; the report of ``fuse``."""
    torch.manual_seed(0)
    module, drawn = step.make(), [torch.randn(shape) for shape in step.shapes]
    if who.startswith(DROP_IN):
        own, module = module, bf.AdditiveAttention(*[step.shapes[0][-1]] * 3)
        module.load_state_dict(own.state_dict())
    module.to(device, dtype)
    report = bf.fuse(module) if who == FUSE else None
    _compile(module, who)
    inputs = [x.to(device, dtype).requires_grad_(train) for x in drawn]
    # A number that is added to all scores has no gradient but rounding.
    asked = [*inputs, *(p for _, p in sorted(module.named_parameters()) if p.numel() > 1)]
    run = step.ready(module, *inputs)

    def both() -> tuple[Tensor, ...]:
        found = run()
        found = found if isinstance(found, Tensor) else found[0]
        return found, *torch.autograd.grad(found, asked, torch.ones_like(found))

    return both if train else run, report


def _named(found: Any) -> dict[str, Tensor]:
    found = (found,) if isinstance(found, Tensor) else found
    return {f"result {i}": x.detach() for i, x in enumerate(found)}


def _step(
    who: str, device: torch.device, step: Step, train: bool, ready: str = "", backend: str = "auto"
) -> dict[str, Any]:
    """A call, checked and timed: with ``ready`` until it returns, else until it is done."""
    ours = step._replace(ready=READY[ready]) if ready else step
    with torch.set_grad_enabled(train), backends.use(backend):
        exact = _named(_call(OWN, step, train, device, torch.float64)[0]())
        own = _named(_call(OWN, step, train, device)[0]())
        call, report = _call(who, ours, train, device)
        for _ in range(20):  # fuse looks at the first calls
            call()
        told = _told(worst(_named(call()), own, exact), report, who)
        if not ready:
            return told | in_turns(call, device, measure.GPU_CALLS, cold=False)[0]
        host = {"host": GpuCall(call, device, host=True)}
        return told | {"host us": 1e6 * interleave(host, measure.GPU_SECONDS).time("host").median}


_judge = functools.lru_cache(1)(Judge)


def _decoder(who: str, device: torch.device, task: str, setting: Setting) -> dict[str, Any]:
    kind, told = who.partition(",")[0], {}
    work = Work(kind, setting, device)
    decoder = work.model.decoder
    _compile(decoder, who)
    if who.endswith(GRAPHED):
        for _ in range(4):  # fuse looks at the first calls
            work.gradients()
        with work.autocast(cache=False):
            state = decoder.init_state(work.model.encoder(work.source), work.source_lens)
            given = [x.detach().requires_grad_(x.is_floating_point()) for x in state]
            torch.cuda.make_graphed_callables(decoder, (work.target, given))
    if kind != NONE:
        told = _told(_judge(setting, task, device).worst(work), work.report, who)
    told |= in_turns(getattr(work, task), device, int(task == "decode"), cold=False)[0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        getattr(work, task)()
        told["peak MB"] = torch.cuda.max_memory_allocated() >> 20
    return told


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _row(who: str, call: str, compute: Callable[..., dict[str, Any]], *given: Any) -> Row:
    seconds = COMPILED_SECONDS if who.endswith(COMPILED) else ROW_SECONDS[given[0].type]
    return Row(f"{who}: {call}", seconds, partial(_tf32()(compute), who, *given))


def _host(where: torch.device) -> list[Row]:
    step, rows = _course("", SIZES["host"]), []
    for ready, train in HOST:
        whos = {OWN: "auto"} if ready == "module" else {}
        whos |= {f"{DROP_IN}, {name}": name for name in _serving(where)}
        for who, backend in whos.items():
            given = (where, step, train, ready, backend)
            rows.append(_row(who, f"host, {ready}, {WAYS[train]}", _step, *given))
    return rows


def _serving(where: torch.device) -> Iterator[str]:
    """The backends that compute on a device."""
    for name in backends.available():
        with suppress(ValueError):
            yield backends.resolve(where, name)


def user(device: str) -> list[Row]:
    """What matters first; compiled code, which takes its time, last."""
    where = torch.device(device)
    single = "float32 with TF32" if where.type == "cuda" else "float32"

    def decoders(name: str, task: str, bf16: bool, way: str, *whos: str) -> list[Row]:
        s = replace(SIZES[name], bf16=bf16)
        sizes = _text((s.batch, s.target, s.source, s.hidden))
        call = f"{TASKS[task]} {sizes}, {'bfloat16 autocast' if bf16 else single}"
        return [_row(who + way, call, _decoder, where, task, s) for who in whos]

    def steps(way: str) -> list[Row]:
        return [
            _row(who + way, f"{step.name}, {WAYS[train]}", _step, where, step, train)
            for step, train in product(_steps(), WAYS)
            for who in ((OWN,) if way and step.ours == FUSE else (OWN, step.ours))
        ]

    every, rows = (OWN, DROP_IN, FUSE, OURS), list[Row]()
    for task, bf16 in product(TASKS, (False, True)):
        rows += decoders("decoder", task, bf16, "", *every, *(() if bf16 else (NONE,)))
        if task == "train" and where.type == "cuda":
            rows += decoders("decoder", task, bf16, GRAPHED, *every)
    rows += [*_host(where), *steps("")]
    for task in TASKS:
        rows += decoders("chapter", task, False, "", *every, NONE)
    compiled = steps(COMPILED)
    if where.type == "cuda":  # a processor takes too long to compile 50 steps
        compiled += decoders("decoder", "train", False, COMPILED, OWN, OURS)
        compiled += decoders("decoder", "decode", False, COMPILED, OWN, DROP_IN, FUSE)
        compiled += decoders("decoder", "train", False, COMPILED, DROP_IN, FUSE)
    return [*rows, *compiled[: SIZES["compiled"]]]
