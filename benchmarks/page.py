"""Writes README's figures and chart, and the tables of docs/, from the figures of runs.

``python -m benchmarks.page`` reads every file in ``benchmarks/results``; no figure is typed by
hand.
"""

import re
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from .cases import SUBJECT, Shape
from .contestants.registry import LIBRARIES
from .gpu import rows
from .gpu.rows import TRAINING, Row, by_call, device, wrapped
from .tables import Run, about, chosen, markdown, milliseconds, name_of, processor, runs, shape_text
from .worker import ROOT

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

# The rows that matter: (table, task, mode) -> description.
SUMMARY = {
    ("step", "step", "forward"): "one decoder step",
    ("loop", "loop", "forward"): "d2l's loop of 50 steps",
    ("loop", "loop", "train"): "the same with backward",
    ("many-queries", "projected", "forward"): "many queries, projected",
    ("many-queries", "projected", "train"): "the same with backward",
    ("many-queries", "full", "forward"): "many queries, whole call",
    ("many-queries", "full", "train"): "the same with backward",
    ("overhead", "full", "forward"): "toy call",
    ("overhead", "full", "train"): "the same with backward",
}
PEERS = {
    ("peers", "projected", "forward"): "projected",
    ("peers", "step", "forward"): "one decoder step",
}


def of_machine(run: Run) -> list[str]:
    """The summary of one run: the rows that matter."""
    cells = []
    for each in chosen(run, SUMMARY):
        fastest = f"{each.times(each.fastest):.1f}x ({each.fastest})"
        ours = f"{milliseconds(each.ours)} ms"
        cells.append([each.what, ours, f"{each.times('d2l eager'):.1f}x", fastest])
    heads = ["what (B, Tq, Tk, H)", "ours", "d2l", "fastest baseline"]
    lines = [f"### {name_of(run)}", "", f"{about(run)}.", "", *markdown(heads, cells), ""]
    shapes = [row for row in run["rows"] if row["table"] == "shapes"]
    said = f"In {sum(map(leads, shapes))} of {len(shapes)} rows of the list of shapes no baseline"
    lines += [f"{said} was faster than ours.", ""]
    for row in run["rows"]:
        if "dram_read" in row and SUBJECT[row["task"]] in row["seconds"]:
            lines += [_bandwidth(row), ""]
    return lines


def leads(row: dict[str, Any]) -> bool:
    """Whether ours is there and no baseline is faster."""
    medians = {name: spread["median"] for name, spread in row["seconds"].items()}
    ours = medians.get(SUBJECT[row["task"]])
    others = (time for name, time in medians.items() if not name.startswith("ours"))
    return ours is not None and ours <= min(others, default=ours)


def _bandwidth(row: dict[str, Any]) -> str:
    """What a step on a large memory reads, and the share of the roof that it is."""
    subject, roof = SUBJECT[row["task"]], row["dram_read"]["bytes_per_second"]
    moved, seconds = Shape(**row["shape"]).memory_bytes, row["seconds"][subject]
    rate, low, high = (moved / seconds[name] for name in ("median", "p80", "p20"))
    return (
        f"On a large memory {shape_text(row['shape'])} {subject} reads {rate / 1e9:.1f} GB/s, "
        f"{rate / roof:.0%} ({low / roof:.0%}-{high / roof:.0%}) of {roof / 1e9:.1f} GB/s by "
        f"{row['dram_read']['reader']}."
    )


def _peers(runs: list[Run]) -> list[str]:
    """A row for each machine and library, a column for each shape."""
    found = [(name_of(run), each) for run in runs for each in chosen(run, PEERS)]
    shapes = list(dict.fromkeys(each.what for _, each in found))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for machine, each in found:
        for library in (each.name for each in LIBRARIES):
            if library in each.others:
                of_library = cells.setdefault((machine, library), {})
                of_library[each.what] = f"{each.times(library):.3g}x"
    rows = [[*key, *(of.get(shape, "") for shape in shapes)] for key, of in cells.items()]
    return markdown(["machine", "library", *shapes], rows)


def performance(measured: list[Run], felt: list[list[rows.Row]]) -> list[str]:
    """The tables of docs/performance.md: runs of ``bench``, and rows of ``user``, by machine."""
    lines = [line for run in measured for line in of_machine(run)]
    lines += ["### Other libraries, of the time of ours", "", *_peers(measured), ""]
    for of_one in felt:
        lines += [f"### {processor(of_one[0]['where'])}", "", *rows.users(of_one), ""]
        lines += rows.hosts(of_one)
    return lines


# ---- README

COLOURS = {"ours": "#0b8a62", "compiled": "#8a8f98", "d2l": "#d08a3c"}
WIDTH, LABELS, BAR, ROW, HEAD = 760, 260, 10, 46, 30  # pixels; HEAD: a panel's heading
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:11px}.head{font-weight:600}"
    "@media(prefers-color-scheme:dark){text{fill:#c9d1d9}}"
)


class Bars(NamedTuple):
    """A call: our time as text, and how many times as long others took."""

    what: str
    ours: str
    times: dict[str, float]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, who: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[who]}"/>'


def drawing(panels: dict[str, list[Bars]]) -> str:
    """The picture: a heading and rows for each panel, all to one scale."""
    longest = max(max(row.times.values()) for bars in panels.values() for row in bars)
    scale = (WIDTH - LABELS - 60) / longest
    parts, y = [], 20.0
    for x, who in zip((LABELS, LABELS + 70, LABELS + 170), COLOURS, strict=True):
        parts += [_bar(x, y - BAR, BAR, who), _text(x + 15, y, who)]
    for heading, bars in panels.items():
        y += HEAD
        parts.append(_text(0, y, heading, "head"))
        for row in bars:
            parts.append(_text(0, y + 27, row.what))
            for number, who in enumerate(COLOURS):
                long = row.times.get(who, 1.0)
                top = y + 9 + number * (BAR + 1)
                said = row.ours if who not in row.times else f"{long:.1f}x"
                parts.append(_bar(LABELS, top, long * scale, who))
                parts.append(_text(LABELS + long * scale + 5, top + BAR - 1, said, "small"))
            y += ROW
    size = f'width="{WIDTH}" height="{y + 10:g}" viewBox="0 0 {WIDTH} {y + 10:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


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


# ---- the files


def _between(path: Path, *blocks: list[str]) -> str:
    """A page with what stands between its marks replaced, a block for each pair of marks."""
    parts = re.split(f"({BEGIN}|{END})", path.read_text(encoding="utf-8"))
    if parts[1::2] != [BEGIN, END] * len(blocks):
        need = f"have {BEGIN} and {END} {len(blocks)} times"
        raise ValueError(f"{path.name} must {need}, got {parts[1::2]}")
    for number, lines in enumerate(blocks):
        parts[4 * number + 2] = "\n".join(["", *lines, ""])
    return "".join(parts)


def generated(root: Path = ROOT) -> dict[Path, str]:
    """What the pages, README and its chart have to say by the committed figures."""
    results, docs, readme = root / "benchmarks" / "results", root / "docs", root / "README.md"
    measured, felt = runs(results), rows.measured("cpu", results)
    gpus = rows.measured("gpu", results)
    gpu_lines = [line for of_gpu in gpus for line in (*rows.block(of_gpu), "")][:-1]
    run, gpu = measured[0], gpus[0]
    card = gpu[0]["where"].split(",")[0]
    return {
        docs / "performance.md": _between(docs / "performance.md", performance(measured, felt)),
        docs / "gpu.md": _between(docs / "gpu.md", gpu_lines),
        docs / "images" / "speed.svg": drawing({name_of(run): _on_cpu(run), card: _on_gpu(gpu)}),
        readme: _between(readme, claim(run, gpu), models(felt[0], gpu)),
    }


def main() -> None:
    """Write what is out of date."""
    for path, text in generated().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
