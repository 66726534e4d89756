"""Cases drawn by hypothesis from the whole contract."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from layouts import LAYOUTS
from parity import Case, overflows

# Else numbers in the files that are loaded are drawn too: other cases in another worker.
if hasattr(providers, "_get_local_constants"):  # not in old versions, which draw no such numbers
    providers._get_local_constants = providers.Constants

SCALES = st.sampled_from([1e-6, 1e-3, 0.03, 0.3, 1.0, 3.0, 10.0, 100.0, 1e4])
SIZES = st.one_of(st.integers(1, 130), st.sampled_from([1, 2, 3, 7, 8, 16, 31, 32, 64, 67, 127]))


@st.composite
def cases(draw, dtype, most=None, masks=False, inside=False):
    """A case from the whole contract.

    ``most`` bounds B*Tq*Tk*H, ``masks`` draws masks too, ``inside`` features and activations.
    """
    size = {
        "B": draw(st.integers(0, 5)),
        "Tq": draw(st.integers(0, 33)),
        "Tk": draw(st.one_of(st.integers(0, 130), st.sampled_from([1, 2, 61, 113, 127]))),
    }
    size |= {name: draw(SIZES) for name in ("H", "Dq", "Dk", "Dv")}
    while most and size["B"] * size["Tq"] * size["Tk"] * size["H"] > most:
        largest = max(("Tq", "Tk", "H"), key=size.get)
        size[largest] = (size[largest] + 1) // 2
    kind = draw(st.sampled_from(["none", "rows", "queries"]))
    length = None
    if kind != "none":
        shape = (size["B"],) if kind == "rows" else (size["B"], size["Tq"])
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        length = torch.rand(shape, generator=generator) * (size["Tk"] + 8) - 4
        length = length.to(draw(st.sampled_from([torch.int64, torch.int32, torch.float32])))
    mask = None
    if masks and draw(st.integers(0, 2)) == 0:
        shape = (
            (size["B"], size["Tk"]) if draw(st.booleans()) else [size[n] for n in ("B", "Tq", "Tk")]
        )
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        share = draw(st.sampled_from([0.02, 0.5, 0.98]))
        mask = torch.rand(shape, generator=generator) < share
    scaled = ("queries", "keys", "values", "w_q", "w_k", "w_v", "bias", "context", "weights")
    form, scales = {}, SCALES
    if inside:
        scales = SCALES.filter(lambda scale: scale <= 100)
        # A slope that jumps where a sum in 16 bits is zero or nearly so is a matter of luck, and so
        # is, at 1e4, which unit of a thousand a rounded projection leaves unsaturated.
        kinds = ["tanh", "tanh", "sigmoid"]
        kinds += ["relu", "leaky_relu"] if dtype.itemsize > 2 else []
        form["activation"] = draw(st.sampled_from(kinds))
        form["C"] = draw(st.sampled_from([1, 3, 10, 33] + [0] * (form["activation"] != "tanh")))
    some = draw(st.lists(st.sampled_from(scaled), max_size=4, unique=True))
    laid = draw(st.lists(st.sampled_from(scaled), max_size=4, unique=True))
    case = Case(
        **{**size, **form, "lens": length, "mask": mask},
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        grads=draw(st.sampled_from(["both", "both", "context", "weights"])),
        scale={name: draw(scales) for name in some},
        layout={name: draw(st.sampled_from(sorted(LAYOUTS))) for name in laid},
        seed=draw(st.integers(0, 2**31)),
    )
    if dtype.itemsize == 2 and min(case.H, case.Tk) <= 8:
        # Eager in 16 bits weighs keys that nearly agree exactly alike. Gradients that are what is
        # left of scores' gradients, which add up to zero, are zero then, by luck: not to be met.
        case.scale = {n: s for n, s in case.scale.items() if n not in ("keys", "w_k") or s >= 1}
    # In fp16 a projection past 65504 is infinite before attention is asked: make it fit.
    while dtype == torch.float16 and overflows(case, case.draw(dtype), dtype):
        case.scale = {name: scale**0.5 for name, scale in case.scale.items()}
    return case


drawn = settings(
    max_examples=80, derandomize=True, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
