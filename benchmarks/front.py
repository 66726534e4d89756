"""What README.md says of speed, and its chart, from the rows that were measured."""

from __future__ import annotations

from .chart import Bars, drawing
from .gpu.rows import Row
from .gpu.summary import TRAINING, by_call, device, wrapped
from .measured import Run, about, chosen, name_of
from .tables import markdown, milliseconds, processor

# The rows of the chart: (table, task, mode) of a run of ``bench``, and calls of a GPU's file.
ON_CPU = {
    ("step", "step", "forward"): "one step",
    ("loop", "loop", "forward"): "50 steps",
    ("many-queries", "full", "forward"): "many queries",
    ("many-queries", "full", "train"): "with backward",
}
ON_GPU = {
    "step-64 (64,1,50,512), step, forward, bfloat16": "one step",
    "step-256 (256,1,400,512), projected, forward + backward, bfloat16": "a step, with backward",
    "parallel-4 (4,128,128,512), projected, forward, bfloat16": "many queries",
    "parallel-16 (16,512,512,512), projected, forward + backward, bfloat16": "with backward",
}
# Models with the attention of their authors, ours in its place, and fused.
CHAPTER, LARGE = "(64,10,10,32), float32", "(64,50,50,512), float32"
TACOTRON = "Tacotron step (64,160,1024,512,128,32,31)"
CAPTIONER = "captioner step (32,196,2048,512)"
MODELS = {
    f"training step {LARGE}": "d2l's decoder, a training step, hidden 512, 50 steps",
    f"greedy decode {LARGE}": "greedy decoding",
    f"training step {CHAPTER}": "a training step, hidden 32, 10 steps",
    f"greedy decode {CHAPTER}": "greedy decoding",
    f"{TACOTRON}, forward": "a step of Tacotron 2",
    f"{TACOTRON}, forward + backward": "with backward",
    f"{CAPTIONER}, forward": "a step of a captioner",
    f"{CAPTIONER}, forward + backward": "with backward",
}
WHOS = {
    "own module": "as written",
    "drop-in": "our module",
    "AttentionGRU": "`AttentionGRU`",
    "fuse": "`fuse`",
}


def _on_cpu(run: Run) -> list[Bars]:
    rows = {each.what.partition(" (")[0]: each for each in reversed(chosen(run, ON_CPU))}
    return [
        Bars(each.what, f"{milliseconds(each.ours)} ms",
             {"compiled": each.times("compiled"), "d2l": each.times("d2l eager")})
        for each in (rows[what] for what in ON_CPU.values())
    ]  # fmt: skip


def _on_gpu(found: list[Row]) -> list[Bars]:
    calls, bars = by_call(row for row in found if row["stage"] in ("time", "rivals")), []
    for call, what in ON_GPU.items():
        of = calls[call]
        ours = device(of.get("cuda") or of["triton"])  # what a call takes where both are there
        one = float(ours.strip("~"))
        others = {"compiled": "compiled, tuned", "d2l": "d2l eager"}
        times = {name: float(device(of[who])) / one for name, who in others.items()}
        sizes = call.split(", ")[0].partition(" ")[2].replace(",", ", ")
        bars.append(Bars(f"{what} {sizes}", f"{ours} µs", times))
    return bars


def _gain(bars: list[Bars]) -> str:
    gains = [min(row.times.values()) for row in bars]
    return f"{min(gains):.1f} to {max(gains):.1f} times"


def chart(run: Run, gpu: list[Row]) -> str:
    """The picture."""
    heads = name_of(run), gpu[0]["where"].split(",")[0]
    return drawing(dict(zip(heads, (_on_cpu(run), _on_gpu(gpu)), strict=True)))


def claim(run: Run, gpu: list[Row]) -> list[str]:
    """What it is, how fast in the rows of the chart, and what those are."""
    name, cores = name_of(run).rsplit(", ", 1)
    where, *_, torch, _, commit = gpu[0]["where"].split("; ")
    card = where.split(",")[0]
    said = (
        "Additive (Bahdanau) attention for PyTorch as one fused operator, forward and backward: on "
        f"{cores} of an {name} {_gain(_on_cpu(run))} as fast as the faster of compiled PyTorch and "
        f"the [d2l.ai](https://d2l.ai) course, on an {card} {_gain(_on_gpu(gpu))}, in "
        "the calls of this chart."
    )
    of_what = (
        "Times of ours, and how many times as long others take. (B, Tq, Tk, H); processor: fp32, "
        f"{about(run)}; GPU: bf16 in CUDA graphs, ~ kernels alone, {torch}, {commit}."
    )
    picture = "![Bars of the times of ours, compiled PyTorch and d2l](docs/images/speed.svg)"
    return [*wrapped(said), "", picture, "", *wrapped(of_what)]


def models(felt: list[Row], gpu: list[Row]) -> list[str]:
    """Whole steps of models, by who computes their attention."""
    calls, card = by_call(felt), gpu[0]["where"].split(",")[0]
    found = [(what, calls[call]) for call, what in MODELS.items()]
    found.append((f"{card}: the training step, hidden 512", by_call(gpu)[TRAINING]))
    cells = [
        [what, *(milliseconds(float(of[who]["called"]) / 1e6) if who in of else "" for who in WHOS)]
        for what, of in found
    ]
    heads = [f"ms, {processor(felt[0]['where']).split(';')[0]}", *WHOS.values()]
    wheres = felt[0]["where"], found[-1][1]["fuse"]["where"]
    commits = (where.split("; ")[-1].split(",")[0] for where in wheres)
    return [*markdown(heads, cells), "", f"fp32, the GPU's with TF32; {', '.join(commits)}."]
