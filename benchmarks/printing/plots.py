"""The plots of one run of ``bench``; a provider has the same colour in all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bahdanau_fast.seq2seq.cli.plots import require_matplotlib, save

from ..timing.machine import slug
from ..workloads.shapes import SWEEPS
from .tables import (
    Kernel,
    Run,
    Speedup,
    about,
    kernels,
    memory_points,
    name_of,
    peer_rows,
    shape_text,
    speedups,
    time_points,
)

COLOURS = {
    "d2l eager": "#4b5563",
    "rewrite eager": "#a8a29e",
    "d2l compiled": "#7dd3fc",
    "compiled": "#1d4ed8",
    "compiled max-autotune": "#0ea5e9",
    "ours": "#c2410c",
    "Keras (torch)": "#7c3aed",
    "Keras (JAX)": "#c084fc",
    "JoeyNMT": "#15803d",
    "KeOps": "#ca8a04",
    "ONNX Runtime": "#be185d",
}
MARKERS = {"d2l eager": "s", "rewrite eager": "D", "compiled": "^", "ours": "o"}
_BASELINES = ("d2l eager", "rewrite eager", "compiled")
INK, GRID = "#1f2937", "#e5e7eb"
SIZES = {"Tk": "keys, Tk", "Tq": "queries, Tq", "H": "hidden units, H", "B": "batch, B"}


def _family(name: str) -> str:
    return "ours" if name.startswith("ours") else name


def _style(name: str) -> dict[str, Any]:
    family = _family(name)
    bold = family == "ours"
    return {
        "color": COLOURS[family],
        "marker": MARKERS.get(family, "v"),
        "linewidth": 2.6 if bold else 1.6,
        "markersize": 6.5 if bold else 5,
        "zorder": 4 if bold else 3,
    }


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=130)
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.grid(True, which="major", color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        panel.tick_params(labelsize=10, colors=INK)
    return figure, axes


def _finish(figure: Any, title: str, data: Run) -> Any:
    figure.suptitle(f"{title}\n{name_of(data)}", fontsize=15, fontweight="bold", color=INK)
    figure.supxlabel(about(data), fontsize=8.5, color="#6b7280")
    return figure


def _legend(figure: Any, panel: Any) -> None:
    handles = panel.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", frameon=False, fontsize=11)


def _label(panel: Any, text: str, at: tuple[float, float], offset: Any, **style: Any) -> None:
    """Text beside a point, so many points of the screen away."""
    panel.annotate(text, at, offset, textcoords="offset points", **style)


def _sizes(panel: Any, axis: str, sizes: list[int]) -> None:
    """Logarithmic axes, with a tick for each size."""
    panel.set(xscale="log", yscale="log", xlabel=SIZES[axis])
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.minorticks_off()


def sweeps(data: Run) -> Any:
    """Time against Tk, Tq, H and B, forward above forward and backward; None where not measured."""
    modes = {"forward": "forward", "train": "forward + backward"}
    points = {(m, axis): time_points(data, axis, m) for m in modes for axis in SWEEPS}
    modes = {mode: text for mode, text in modes.items() if points[mode, "Tk"]}
    if not modes:
        return None
    figure, axes = _figure(14, 1.6 + 3.1 * len(modes), len(modes), len(SWEEPS))
    for row, (mode, text) in zip(axes, modes.items(), strict=True):
        for panel, axis in zip(row, SWEEPS, strict=True):
            for name, spreads in points[mode, axis].items():
                sizes = [size for size, _ in spreads]
                keys, style = ("median", "p20", "p80"), _style(name)
                median, low, high = ([1e3 * spread[k] for _, spread in spreads] for k in keys)
                panel.plot(sizes, median, label=_family(name), **style)
                panel.fill_between(sizes, low, high, color=style["color"], alpha=0.15, lw=0)
            _sizes(panel, axis, sizes)
        row[0].set_ylabel(f"{text}, ms", fontsize=11)
        limits = [panel.get_ylim() for panel in row]
        for panel in row:
            panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
            panel.yaxis.set_major_formatter("{x:g}")
    _legend(figure, axes[0][0])
    middle = SWEEPS["Tk"][0]
    fixed = f"B {middle.batch}, Tq {middle.queries}, Tk 256, H {middle.hidden}"
    return _finish(figure, f"One size at a time, after the projections; else {fixed}", data)


def _bars(panel: Any, groups: list[Speedup], values: dict[str, list[Any]]) -> None:
    """Horizontal bars in a group for each row; ``values`` are ratios by provider."""
    height = 0.8 / len(values)
    for i, (name, ratios) in enumerate(values.items()):
        places = [at - 0.4 + height * (i + 0.5) for at in range(len(groups))]
        shown = [(place, ratio) for place, ratio in zip(places, ratios, strict=True) if ratio]
        # From 1: providers slower than ours go to the right, faster ones to the left.
        style = {"left": 1, "color": COLOURS[_family(name)], "label": name}
        at, lengths = [place for place, _ in shown], [ratio - 1 for _, ratio in shown]
        panel.barh(at, lengths, height * 0.92, **style)
        for place, ratio in shown:
            offset, side = ((4, 0), "left") if ratio >= 1 else ((-4, 0), "right")
            style = {"va": "center", "ha": side, "fontsize": 9, "color": INK}
            _label(panel, f"{ratio:.3g}x", (ratio, place), offset, **style)
    labels = [f"{group.what}\n{shape_text(group.shape)}" for group in groups]
    panel.set_yticks(range(len(groups)), labels, fontsize=10)
    panel.invert_yaxis()
    panel.set_xscale("log")
    ratios = [ratio for of_name in values.values() for ratio in of_name if ratio]
    low, high = min(0.9, min(ratios) / 1.6), max(ratios) * 1.3
    ticks = [m * 10**e for e in range(-3, 5) for m in (1, 2, 5) if low <= m * 10**e <= high]
    panel.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlim(low, high)
    panel.axvline(1, color=COLOURS["ours"], linewidth=2.2)
    panel.set_xlabel("times as long as ours", fontsize=11)
    panel.grid(False, axis="y")


def speedup_bars(data: Run) -> Any:
    """Ours against d2l's module, and against its rewrite under torch.compile."""
    return _bar_figure(data, speedups(data), _BASELINES, 0.65, "d2l and its rewrite")


def peer_bars(data: Run) -> Any:
    """Ours against other libraries."""
    return _bar_figure(data, peer_rows(data), tuple(COLOURS), 1.25, "other libraries, forward")


def _bar_figure(
    data: Run, rows: list[Speedup], names: tuple[str, ...], height: float, rivals: str
) -> Any:
    """Bars of the named providers that were measured; None where there are no rows."""
    if not rows:
        return None
    figure, axes = _figure(12, 2.2 + height * len(rows))
    measured = [name for name in names if any(name in row.against for row in rows)]
    _bars(axes[0][0], rows, {n: [row.against.get(n) for row in rows] for n in measured})
    _legend(figure, axes[0][0])
    return _finish(figure, f"Ours against {rivals}", data)


def roofline(data: Run) -> Any:
    """Elements of (B,Tq,Tk,H) per second over elements per byte, under the roofs of this run."""
    roofs, found = data.get("roofs"), kernels(data)
    if not roofs or not found:
        return None
    figure, axes = _figure(11, 7)
    panel = axes[0][0]
    left, right = (f([point.intensity for point in found]) for f in (min, max))
    left, right = left / 2, right * 2.2
    top = 3 * max(roofs["ours"].values())
    dram = roofs["dram_read"]
    panel.plot([left, right], [left * dram, right * dram], color=INK, lw=1.8)
    at = (left * 1.1, left * 1.1 * dram)
    _label(panel, f"DRAM, {dram / 1e9:.0f} GB/s", at, (6, -4), fontsize=10, va="top", color=INK)
    for name, rate, colour in (
        *((name, rate, COLOURS["ours"]) for name, rate in roofs["ours"].items()),
        ("one torch.tanh per element", roofs["tanh"], COLOURS["d2l eager"]),
    ):
        panel.axhline(rate, color=colour, linestyle="--", linewidth=1.4)
        style = {"ha": "right", "fontsize": 10, "color": colour}
        _label(panel, f"{name}: {rate / 1e9:.3g} G/s", (right, rate), (-4, 3), **style)
    for family in dict.fromkeys(_family(point.provider) for point in found):
        points = [point for point in found if _family(point.provider) == family]
        style = _style(family) | {"linestyle": "none", "linewidth": 0, "alpha": 0.85}
        rates = [point.rate for point in points]
        panel.plot([point.intensity for point in points], rates, label=family, **style)
    for together in _neighbours([point for point in found if _family(point.provider) == "ours"]):
        text, at = ",\n".join(p.shape for p in together), (together[0].intensity, together[0].rate)
        _label(panel, text, at, (8, -4), va="top", fontsize=8, color=COLOURS["ours"])
    panel.set(xscale="log", yscale="log", xlim=(left, right), ylim=(None, top))
    panel.set_xlabel("elements of (B,Tq,Tk,H) per byte of keys and values", fontsize=11)
    panel.set_ylabel("elements per second", fontsize=11)
    _legend(figure, panel)
    return _finish(figure, "Each forward kernel under the roofs measured beside it", data)


def _neighbours(points: list[Kernel]) -> list[list[Kernel]]:
    """Points grouped with those too close for a label of their own, the highest first."""
    groups: list[list[Kernel]] = []
    for point in sorted(points, key=lambda point: (point.intensity, -point.rate)):
        top = groups[-1][0] if groups else None
        if top and top.intensity == point.intensity and top.rate < 1.5 * point.rate:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def memory(data: Run) -> Any:
    """Peak memory of forward and backward against Tk and H, and working memory against H."""
    panels = (("Tk", False), ("H", False), ("H", True))
    panels = tuple(panel for panel in panels if memory_points(data, *panel))
    points = [memory_points(data, axis, working) for axis, working in panels]
    if not points:
        return None
    figure, axes = _figure(13, 4.6, 1, len(panels))
    for panel, (axis, working), of_names in zip(axes[0], panels, points, strict=True):
        for name, pairs in of_names.items():
            sizes = [size for size, _ in pairs]
            panel.plot(sizes, [y / 1e6 for _, y in pairs], label=_family(name), **_style(name))
        _sizes(panel, axis, sizes)
        panel.yaxis.set_major_formatter("{x:g}")
        what = "peak beyond inputs, outputs, gradients" if working else "peak, all of it"
        panel.set_title(what, fontsize=11, color=INK)
    axes[0][0].set_ylabel("MB", fontsize=11)
    _legend(figure, axes[0][0])
    return _finish(figure, "Memory of forward and backward", data)


# How each figure is drawn, and what it shows.
FIGURES: dict[str, tuple[Callable[[Run], Any], str]] = {
    "sweeps": (sweeps, "time against Tk, Tq, H and B"),
    "speedups": (speedup_bars, "times as fast as d2l's module and torch.compile"),
    "roofline": (roofline, "elements per second under the roofs"),
    "memory": (memory, "peak memory against Tk and H"),
    "peers": (peer_bars, "times as fast as other libraries"),
}


def file_name(data: Run, name: str) -> str:
    """The file of a figure, named after the machine."""
    return f"bench-{slug(data['machine']).removeprefix('cpu-')}-{name}.png"


def picture(run: Run, name: str, folder: str, where: str = "") -> list[str]:
    """A plot as a Markdown image; nothing where the run has no figures for it."""
    draw, text = FIGURES[name]
    return [f"![{text}{where}]({folder}{file_name(run, name)})", ""] if draw(run) else []


def draw_all(data: Run, folder: Path) -> list[Path]:
    """Draw every figure that the run has measurements for; the files written."""
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, (draw, _) in FIGURES.items():
        figure = draw(data)
        if figure is not None:
            path = folder / file_name(data, name)
            save(figure, path)
            written.append(path)
    return written
