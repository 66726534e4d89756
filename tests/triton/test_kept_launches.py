"""A call like an earlier one launches what Triton would choose for it, and asks nothing again.

Without a GPU: kernels are specialised by Triton's own binder, compiled to nothing, and noted where
they would be launched.
"""

import itertools
import random
import sys
import weakref
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import test_operator_errors as errors
import torch
import triton
from layouts import LAYOUTS
from triton_target import Launched, target_is
from warmed_up import call

import bahdanau_fast
from bahdanau_fast import backends, switches
from bahdanau_fast.backends.triton import TRITON, launch
from bahdanau_fast.backends.triton.call import DTYPES, gpu
from bahdanau_fast.check import families
from bahdanau_fast.kernels import plans
from bahdanau_fast.ops.attention import (
    attend_scores,
    attend_scores_backward,
    attention,
    attention_backward,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it takes tensors of the CPU")

OPERATORS = pytest.mark.parametrize(
    "operator", [attention, attention.recorded, attention_backward], ids=attrgetter("name")
)
MODULES = [m for name, m in sys.modules.items() if name.startswith("bahdanau_fast.kernels.")]
FOUND = (x for module in MODULES for x in vars(module).values())
KERNELS = [x for x in FOUND if isinstance(x, triton.JITFunction)]


@contextmanager
def noted(target="sm_90"):
    """Inside, launches for a target are noted."""
    launches = []

    def compiled(kernel, key, *_, **__):
        made = Launched(lambda *launch: launches.append((kernel.__name__, key, *launch)))
        kernel.device_caches[target][0][key] = made
        return made

    with ExitStack() as stack:
        stack.enter_context(target_is(target))
        stack.enter_context(patch.object(triton.JITFunction, "_do_compile", compiled))
        for kernel in KERNELS:  # those that are compiled here are no others' to find
            caches = defaultdict(kernel.create_binder)
            stack.enter_context(patch.object(kernel, "device_caches", caches))
        yield launches


def described(launches, given):
    """Launches without addresses: arguments by their names, new tensors by their first use."""
    names, new = {}, itertools.count()
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            names.setdefault((x.data_ptr(), x.dtype), name)

    def one(x):
        if not isinstance(x, torch.Tensor):
            return type(x), x
        at = x.data_ptr(), x.dtype
        if at not in names:
            names[at] = f"new {next(new)} {tuple(x.shape)} {x.stride()}"
        return names[at], x.dtype

    return [(*of, [one(x) for x in arguments]) for *of, arguments in launches]


# ---- drawn calls ----


class Choices:
    """Decides; ``other`` makes one decision, of that number, anew."""

    def __init__(self, seed, other):
        self.seed, self.other, self.count = seed, other, 0

    def __call__(self, *options):
        self.count += 1
        rng = random.Random(f"{self.seed} {self.count} {self.count == self.other}")
        return rng.choice(options)


def laid(choose, dtype, *shape):
    """A tensor in one of the layouts that users have."""
    layout = choose("plain", "plain", "plain", "part", "transposed", "expanded", "sliced")
    return LAYOUTS[layout](torch.zeros(shape, dtype=dtype))


def drawn(seed, other):
    """An operator and its arguments, with as little as one difference for each ``other``."""
    choose = Choices(seed, other)
    batch, queries_len = choose(1, 2, 3), choose(1, 1, 2, 16, 17, 32, 0)
    keys_len, hidden = choose(1, 5, 16, 16, 17, 600, 0), choose(1, 8, 16, 17)
    size, channels, dtype = choose(1, 8, 16, 17), choose(1, 16), choose(*DTYPES)

    def some(*shape, kinds=(dtype,), share=(True,)):
        kind = choose(*kinds)
        return laid(choose, kind, *shape) if choose(*share) else None

    half, few = (True, False), (True, False, False, False)
    general, raw_queries, raw_keys, located = (choose(*n) for n in (few, half, half, few))
    raw_queries, raw_keys = raw_queries and not general, raw_keys and not general
    given = {"w_v": some(1, hidden), "activation": choose(0, 0, 1, 2)}
    given["negative_slope"] = choose(0.01, 0.5)
    given["queries"] = some(batch, queries_len, 8 if raw_queries else hidden)
    given["keys"] = some(batch, keys_len, 8 if raw_keys else hidden)
    if located:
        given |= {"features": some(batch, keys_len, channels), "w_f": some(hidden, channels)}
    scores = (batch, queries_len, keys_len)
    if general:
        if choose(*half):
            return attend_scores, given
        given |= {"grad_scores": some(*scores, kinds=DTYPES[:1]), "needs": choose(*range(512))}
        return attend_scores_backward, given
    values = some(batch, keys_len, size)
    is_values = choose(*half) and given["keys"].shape == values.shape
    given["values"] = given["keys"] if is_values else values
    if raw_queries:
        given["w_q"] = some(hidden, 8)
    if raw_keys:
        given |= {"w_k": some(hidden, 8), "bias": some(hidden, share=half)}
    shape = choose((batch,), (batch, queries_len))
    kinds = torch.int64, torch.int32, torch.float32
    given["valid_lens"] = some(*shape, kinds=kinds, share=half)
    shape = choose((batch, 1, keys_len), scores)
    given["mask"] = some(*shape, kinds=(torch.bool,), share=half)
    given["seed"] = some(1, kinds=(torch.int64,))
    given["dropout_p"] = choose(0.0, 0.0, 0.0, 0.5, 1.0)
    if choose(*half):
        given |= {name: choose(*half) for name in ("need_weights", "narrow")}
        return choose(attention, attention.recorded), given
    of_weights = choose(torch.float32, dtype)
    given |= {"weights": some(*scores, kinds=(of_weights,)), "needs": choose(*range(512))}
    given["grad_context"] = some(batch, queries_len, size, share=(True, True, False))
    given["grad_weights"] = some(*scores, kinds=(of_weights,), share=half)
    if raw_queries:
        given["projected_queries"] = some(batch, queries_len, hidden, share=half)
    return attention_backward, given


def drawn_launches(calls, again):
    """What drawn calls launch and give; ``again``: each as if it were the first."""
    made = []
    with noted() as launches:
        for one in calls:
            operator, given = drawn(*one)
            if again:
                launch.plans.clear()
            launches.clear()
            found = call(operator, **given)
            found = (found,) if isinstance(found, torch.Tensor) else found
            results = [(x.shape, x.stride(), x.dtype) for x in found]
            made.append((operator.name, described(launches, given), results))
    return made


@pytest.mark.parametrize("many", [1, pytest.param(20, marks=pytest.mark.deep)])
def test_a_repeated_call_launches_what_the_first_did(monkeypatch, many):
    monkeypatch.setattr(plans, "pays_by_fourier", lambda queries, keys: min(queries, keys) > 16)
    calls = [*itertools.product(range(12 * many), range(40))] * 3
    random.Random(many).shuffle(calls)
    plan = launch.Recorder.plan
    with patch.object(launch.Recorder, "plan", autospec=True, side_effect=plan) as first:
        kept = drawn_launches(calls, again=False)
    assert first.call_count < 0.5 * len(calls)
    anew = drawn_launches(calls, again=True)
    for call_, one, other in zip(calls, kept, anew, strict=True):
        assert one == other, call_
    kernels = {name for _, launched, _ in kept for name, *_ in launched}
    assert kernels >= {kernel.__name__ for kernel in KERNELS if "_kernel" in kernel.__name__}


def test_a_tensor_that_is_given_twice_is_not_expected_again():
    queries, keys, values, w_v = (torch.zeros(1, n, 16) for n in (1, 20, 20, 1))
    tensors = {"queries": queries, "keys": keys, "w_v": w_v[0]}
    with noted() as launches:
        for given in (keys, keys, values):
            call(attention, **tensors, values=given)
        assert len(launch.plans) == 1
    _, (*_, first), (*_, second) = launches
    assert [x is values for x in second].count(True) == 1
    assert [getattr(x, "shape", None) == keys.shape for x in first].count(True) == 2


def test_fp32_products_are_those_that_are_allowed_now():
    given = {name: torch.zeros(1, 20, 16) for name in ("queries", "keys", "values")}
    before = torch.get_float32_matmul_precision()
    try:
        with noted() as launches:
            for kind in ("highest", "high", "highest") * 3:
                torch.set_float32_matmul_precision(kind)
                call(attention, **given, w_v=torch.zeros(1, 16))
    finally:
        torch.set_float32_matmul_precision(before)
    words = [x for *_, given in launches for x in given if isinstance(x, str)]
    assert words == ["ieee", "tf32", "ieee"] * 3


REFUSED = [
    *((errors.PROJECTED, wrong) for wrong in errors.WRONG + errors.WRONG_PROJECTED),
    *((errors.STEP, wrong) for wrong in errors.WRONG + errors.WRONG_STEP),
    *((errors.RAW, wrong) for wrong in errors.WRONG + errors.WRONG_RAW),
]


@OPERATORS
def test_what_is_wrong_is_refused(operator):
    grads = errors.GRADS if operator is attention_backward else {}
    with noted() as launches:
        for given, wrong in REFUSED:
            if "table" in wrong or not {*map(type, wrong.values())} <= {torch.Tensor, int, float}:
                continue  # no kernel reads one; what the schema refuses
            with pytest.raises((TypeError, ValueError), match="must") as raised:
                call(operator, **{**grads, **given, **wrong})
            assert any(name in str(raised.value) for name in (*wrong, "w_q", "seed"))
    assert not launch.plans
    assert not launches


# ---- what a repeated call costs, holds and heeds ----


def large(queries_len, **more):
    """A call with projections inside."""
    shapes = (64, queries_len, 24), (64, 50, 24), (64, 50, 32), (1, 16), (16, 24), (16, 24), (16,)
    names = "queries", "keys", "values", "w_v", "w_q", "w_k", "bias"
    made = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in zip(names, shapes, strict=True)}
    return {**made, "valid_lens": torch.full((64,), 30), **more}


def backward_of(given):
    weights = torch.zeros(64, given["queries"].shape[1], 50, dtype=torch.bfloat16)
    context = torch.zeros(*weights.shape[:2], 32, dtype=torch.bfloat16)
    grads = {"weights": weights, "grad_context": context, "grad_weights": weights}
    return {**given, **grads, "needs": 127}


@pytest.mark.parametrize("queries_len", [1, 20])
@OPERATORS
def test_a_repeated_call_asks_little_of_the_host(operator, queries_len):
    given = large(queries_len)
    given = backward_of(given) if operator is attention_backward else given
    calls, root = [], next(iter(bahdanau_fast.__path__))

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls.append(frame.f_code.co_name)

    named = [{**operator.defaults, **given}.get(name) for name in operator.names]
    run = operator.in_python["triton"]
    with noted():
        for _ in range(2):
            run(*named)
        sys.setprofile(note)
        run(*named)
        sys.setprofile(None)
    products = 0 if operator is not attention_backward else 2 if queries_len == 1 else 3
    assert 0 < len(calls) <= 2 + products


MASK = {"mask": torch.ones(64, 17, 50, dtype=torch.bool)}
FORWARD = ["rational_terms", "rational_scores", "softmax"]
BACKWARD = ["grad_weights", "grad_softmax"]
WAVES = [*BACKWARD, "grad_fourier", "step_sums", "grad_fourier"]
TANH = [*BACKWARD, "tables", "grad_tanh", "step_sums", "tables", "grad_tanh"]
MANY = {
    "forward": (attention, {}, "", True, FORWARD),
    "forward, mask": (attention, MASK, "", True, ["lengths", *FORWARD]),
    "forward, terms are off": (attention, {}, "terms", True, ["tables", "scores", "softmax"]),
    "forward, waves are off": (attention, {}, "waves", True, FORWARD),
    "backward": (attention_backward, {}, "", True, WAVES),
    "backward, too few for waves": (attention_backward, {}, "", False, TANH),
    "backward, terms are off": (attention_backward, {}, "terms", True, WAVES),
    "backward, waves are off": (attention_backward, {}, "waves", True, TANH),
}


@pytest.mark.parametrize("case", MANY)
def test_many_queries_take_few_launches(case, monkeypatch):
    operator, more, off, pays, names = MANY[case]
    given = large(17, **more)
    given = backward_of(given) if operator is attention_backward else given
    monkeypatch.setattr(switches, "OFF", frozenset(filter(None, [off])))
    monkeypatch.setattr(plans, "pays_by_fourier", lambda *_: pays)
    with noted() as launches:
        call(operator, **given)
    assert [name for name, *_ in launches] == [f"{name}_kernel" for name in names]


@pytest.fixture
def checked(monkeypatch):
    """Triton serves the CPU where it is checked, with what is not of a family switched off."""
    monkeypatch.setattr(TRITON, "device", "cpu")
    monkeypatch.setattr(backends, "why_not", {"cuda": "it is left out"}.get)
    monkeypatch.setattr(switches, "OFF", frozenset())
    monkeypatch.setattr(families, "WAYS", {**families.WAYS})


@pytest.mark.parametrize("family", ["triton", "terms", "waves"])
def test_a_check_compiles_in_front_what_it_launches(family, checked, monkeypatch):
    def made():
        return sum(len(kernel.device_caches["sm_90"][0]) for kernel in KERNELS)

    with noted() as launches:
        with monkeypatch.context() as process:
            process.setattr(launch.Steps, "launch", launch.Steps.launch)
            assert [*families.compiled(family, torch.bfloat16, "cpu")] == []
        count = made()
        assert launches == []
        for each in families.FAMILIES[family].experiments:
            if each.dtype is torch.bfloat16 and "Attention" not in each.name:
                each.judge("triton", "cpu")
        assert launches
        assert made() == count > 0


@pytest.mark.parametrize("family", ["triton", "terms", "waves", "kept-launches"])
def test_experiments_of_a_check_reach_their_family(family, checked, monkeypatch):
    monkeypatch.setattr(switches, "OFF", families.beside(family))
    for each in families.FAMILIES[family].experiments:
        if each.name.endswith(("replayed", "two streams")) or "Attention" in each.name:
            continue
        with noted() as launches:
            each.judge("triton", "cpu")
            kept = [plan for plan in launch.plans.values() if plan]
        names = {name.removesuffix("_kernel") for name, *_ in launches}
        assert ("rational_scores" in names, "grad_fourier" in names, bool(kept)) == (
            family == "terms", family == "waves", family == "kept-launches",
        ), each.name  # fmt: skip
        if "step" in each.name:
            assert ("combine" in names) == ("split" in each.name)


# Kernels of a watched call may be instrumented: they are nobody's plan.
NOT_KEPT = {
    "off": (switches, "OFF", frozenset(("kept-launches",))),
    "instrumented": (triton.knobs.compilation, "instrumentation_mode", "proton"),
    "a hook": (triton.knobs.runtime.launch_enter_hook, "calls", [id]),
}


@pytest.mark.parametrize("why", NOT_KEPT)
def test_no_launch_is_kept(why, monkeypatch):
    monkeypatch.setattr(*NOT_KEPT[why])
    with noted() as launches:
        for _ in range(3):
            call(attention, **large(1))
        assert launch.plans == {}
    assert len(launches) == 3


def test_fourier_sums_are_for_long_sequences():
    """Of short ones they are made for too few gradients each."""
    sizes = itertools.combinations_with_replacement((17, 34, 64, 100, 128, 512), 2)
    taken = [each for each in sizes if plans.pays_by_fourier(*each)]
    assert taken == [(64, 512), (100, 512), (128, 128), (128, 512), (512, 512)]


def test_memory_of_a_piece_is_free_before_the_next(monkeypatch):
    """As many tensors live at the launches of a call, of the same again, and of a repeated one."""
    keys = torch.zeros(2, 70, 16, dtype=torch.bfloat16)
    given = {"queries": keys, "keys": keys, "values": keys, "w_v": keys[0, :1]}
    monkeypatch.setattr(plans, "query_chunk", lambda *_: 17)
    seen, living = weakref.WeakValueDictionary(), []

    def note(_, *given):
        seen.update({id(x): x for x in given if isinstance(x, torch.Tensor)})
        living.append(len({x.untyped_storage().data_ptr() for x in seen.values()}))

    monkeypatch.setattr(Launched, "_run", note)
    with noted():
        for _ in range(4):
            call(attention, **given, need_weights=False)
            seen.clear()
    assert len(living) == 4 * 3 * 5  # kernels of as many pieces
    peaks = [max(living[15 * n :][:15]) for n in range(4)]
    assert peaks == peaks[:1] * 4, living
    assert living[-1] <= max(living[:3]) + 1, living


@pytest.mark.parametrize(
    ("said", "hip", "found"),
    [
        ({"minor": 5, "shared_memory_per_block_optin": 101376}, None, (78, 101376, "sm_75")),
        ({"gcnArchName": "gfx90a:sramecc+:xnack-"}, "6.4", (78, 65536, "gfx90a")),
    ],
)
def test_what_a_gpu_has(monkeypatch, said, hip, found):
    properties = SimpleNamespace(multi_processor_count=78, major=7, **said)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert gpu.__wrapped__(torch.device("cuda:0")) == found


def test_a_plan_holds_no_tensors():
    with noted():
        for _ in range(2):
            call(attention, **large(20))
            call(attention_backward, **backward_of(large(20)))
        assert len([plan for plan in launch.plans.values() if plan]) == 2
        held = [[*launch.plans.items()]]
        while held:
            x = held.pop()
            assert not isinstance(x, torch.Tensor)
            if isinstance(x, (tuple, list)):
                held += x
            elif hasattr(x, "keywords"):
                held += [*x.args, *x.keywords.values()]


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(launch, "MOST_PLANS", 3)
    with noted():
        sizes = []
        for queries_len in range(1, 6):
            call(attention, **large(queries_len))
            sizes.append(len(launch.plans))
    assert sizes == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_sees_every_launch(which, monkeypatch):
    with noted() as launches:
        for _ in range(2):
            call(attention, **large(1))
        monkeypatch.setattr(getattr(triton.knobs.runtime, which), "calls", [id])
        with patch.object(triton.JITFunction, "run", autospec=True) as run:
            run.return_value = None
            call(attention, **large(1))
    assert 2 * run.call_count == len(launches) > 0


def test_products_under_autocast_keep_the_dtype():
    given = {name: x.float() for name, x in large(20).items()}
    given["valid_lens"] = given["valid_lens"].long()
    with noted() as launches:
        for _ in range(3):
            for enabled in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled):
                    call(attention, **given)
    tensors = [x for *_, arguments in launches for x in arguments if isinstance(x, torch.Tensor)]
    assert {x.dtype for x in tensors if x.is_floating_point()} == {torch.float32}


def test_launches_go_to_the_device_of_the_tensors():
    given = large(1)
    with noted() as launches:
        for _ in range(2):
            call(attention, **given)
        ((key, plan),) = launch.plans.items()
        now = [0]

        @contextmanager
        def device(index):
            before, now[0] = now[0], index
            yield
            now[0] = before

        streams = []
        here = plan._replace(gpu=1, stream=lambda _: streams.append(now[0]))
        with (
            patch.object(launch, "_current_device", lambda: now[0]),
            patch.object(torch.cuda, "device", device),
            patch.dict(launch.plans, {key: here}),
        ):
            call(attention, **given)
    assert streams == [1]
    assert len(launches) == 3 * len(plan.kernels)
