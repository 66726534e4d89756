"""Plots of attention weights, losses and scores. Needs matplotlib (extra ``demo``)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.extras import require
from bahdanau_fast.seq2seq.model.settings import METRICS
from bahdanau_fast.seq2seq.search.translator import Translation, shown

# Families with Chinese and Japanese, if installed; DejaVu comes with matplotlib.
_CJK = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Source Han Sans SC"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "IPAGothic", "Noto Serif"),
    *("PingFang SC", "Hiragino Sans", "Heiti TC", "Microsoft YaHei", "SimHei", "Arial Unicode MS"),
)
_INK = "#222222"  # of text


def require_matplotlib() -> None:
    """Say before any work is done that matplotlib is missing."""
    require("matplotlib", "plots need")


def _new_figure(width: float, height: float) -> Any:
    require_matplotlib()
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


_preferred: list[str] = []  # families of fonts the user named


def add_font(path: Path) -> None:
    """Draw tokens with a font from a .ttf, .otf or .ttc file, in preference to installed ones."""
    require_matplotlib()
    from matplotlib import font_manager

    try:
        font_manager.fontManager.addfont(str(path))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "it holds no font"
        checks.reject(ValueError, "font", "be a font file", f"{path} ({reason})")
    fonts = font_manager.fontManager.ttflist
    for i, font in enumerate(fonts):
        if font.fname == str(path):  # of whatever weight
            fonts[i] = dataclasses.replace(font, weight=400)
    _preferred.insert(0, fonts[-1].name)
    _fonts.cache_clear()


@functools.cache
def _fonts() -> tuple[tuple[str, ...], frozenset[int]]:
    """Font families to draw with, and all code points they have."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    installed = {font.name for font in font_manager.fontManager.ttflist}
    families = [*_preferred, "DejaVu Sans", *[name for name in _CJK if name in installed][:2]]
    points: set[int] = set()
    for name in families:
        points.update(FT2Font(font_manager.findfont(name)).get_charmap())
    return tuple(families), frozenset(points)


def drawable(text: str) -> bool:
    """True if the installed fonts have every character."""
    require_matplotlib()
    return all(ord(character) in _fonts()[1] for character in text)


def _label(token: str) -> str:
    return "·" if token == " " else token if drawable(token) else "□"


def save(figure: Any, path: str | Path) -> None:
    """Write a PNG, or the format of the suffix."""
    # Without a format matplotlib would append one, to a file that nobody named.
    figure.savefig(path, facecolor="white", format=Path(path).suffix[1:] or "png")


def show_heatmaps(
    matrices: Tensor,
    xlabel: str,
    ylabel: str,
    titles: Sequence[str] | None = None,
    figsize: tuple[float, float] | None = None,
    cmap: str = "Reds",
) -> Any:
    """A grid of heatmaps with one colour bar.

    Args:
        matrices: (rows, columns, queries, keys).
        xlabel: under the lowest row.
        ylabel: beside the first column.
        titles: one per column.
        figsize: inches; 2.5 per panel unless given.
        cmap: a matplotlib colour map.

    Raises:
        ValueError: ``matrices`` has not 4 dimensions.
    """
    if matrices.dim() != 4:
        need = "have 4 dimensions (rows, columns, queries, keys)"
        checks.reject(ValueError, "matrices", need, tuple(matrices.shape))
    rows, columns = matrices.shape[:2]
    figure = _new_figure(*(figsize or (2.5 * columns + 0.8, 2.5 * rows)))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    values = matrices.detach().float().cpu()
    limits = {"vmin": float(values.min()), "vmax": float(values.max())}
    for i, j in itertools.product(range(rows), range(columns)):
        image = axes[i, j].imshow(values[i, j].tolist(), cmap=cmap, **limits)
        if i == rows - 1:
            axes[i, j].set_xlabel(xlabel)
        if j == 0:
            axes[i, j].set_ylabel(ylabel)
        if titles is not None and i == 0:
            axes[i, j].set_title(titles[j])
    figure.colorbar(image, ax=axes, shrink=0.7)
    return figure


def _alignment(axes: Any, translation: Translation, title: str, families: Sequence[str]) -> Any:
    source, weights = shown(translation)
    image = axes.imshow(weights.tolist(), cmap="magma_r", vmin=0.0, vmax=1.0, aspect="auto")
    font: dict[str, Any] = {"fontfamily": list(families), "color": _INK}
    axes.set_xticks(range(len(source)), map(_label, source), fontsize=9, **font)
    # Horizontal words would overlap; so would the last label beside single characters.
    slanted = max(map(len, translation.source)) > 2
    turn = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    for label in axes.get_xticklabels():
        label.set(**(turn or {"rotation": 90 * (label.get_text() == "<eos>")}))
    tokens = list(map(_label, translation.tokens))
    axes.set_yticks(range(len(tokens)), tokens, fontsize=9, **font)
    # Lines between the cells, as two artists: every tick of a grid would be one.
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    thin = {"colors": "#e5e5e5", "linewidth": 0.4}
    axes.vlines([x + 0.5 for x in range(len(source) - 1)], bottom, top, **thin)
    axes.hlines([y + 0.5 for y in range(len(tokens) - 1)], left, right, **thin)
    axes.tick_params(length=0)
    axes.set_title(title, loc="left", fontsize=10, **font)
    for side in axes.spines.values():
        side.set_color("#bbbbbb")
    return image


def alignments(
    translations: Sequence[Translation], titles: Sequence[str], heading: str, note: str = ""
) -> Any:
    """Attention weights, two translations to a row: source tokens across, target tokens down."""
    if not translations:
        checks.reject(ValueError, "translations", "hold at least one", 0)
    columns = min(2, len(translations))
    rows = math.ceil(len(translations) / columns)
    # The height grows with the target tokens, so that labels do not overlap.
    height = max(2.45, 0.21 * max(len(t.tokens) for t in translations) + 0.8)
    # The width grows with the source tokens, and has to fit titles and heading.
    longest = max(len(t.source) + 1 for t in translations)
    words = max(0.085 * max(map(len, titles)), 0.115 * len(heading) / columns)
    signs = all(len(token) <= 2 for t in translations for token in t.source)
    width = min(14.0, max((0.19 if signs else 0.27) * longest + 0.9, words + 0.4, 3.0))
    figure = _new_figure(width * columns + 0.7, height * rows + 0.7)
    families, _ = _fonts()
    axes = figure.subplots(rows, columns, squeeze=False)
    for i, spare in enumerate(axes.flat):
        if i >= len(translations):
            spare.set_visible(False)
            continue
        image = _alignment(spare, translations[i], titles[i], families)
    bar = figure.colorbar(image, ax=axes, shrink=0.4 if rows > 1 else 0.8, pad=0.01)
    bar.outline.set_visible(False)
    bar.set_label("attention weight", color=_INK)
    figure.suptitle(heading, fontsize=13, color=_INK)
    figure.supxlabel(note, fontsize=9, color="#666666")
    return figure


_TITLE = 60  # characters that fit above a panel


def attention_figure(translations: Sequence[Translation]) -> tuple[Any, str]:
    """Attention weights of translations, and one line about characters that no font has, if any."""
    signs = dict.fromkeys(sign for t in translations for sign in "".join(t.source + t.tokens))
    missing = "".join(sign for sign in signs if not drawable(sign))
    note = under = ""
    if missing:
        note = f"no font here draws {missing} (□ in the picture); --font FILE names one that does"
        under = f"□: {len(missing)} signs that no font here draws"
    titles = []
    for translation in translations:
        space = " " if max(map(len, translation.source), default=1) > 1 else ""
        text = space.join(translation.source)
        text = "".join(sign if drawable(sign) else "□" for sign in text)
        titles.append(text if len(text) <= _TITLE else f"{text[: _TITLE - 1]}…")
    return alignments(translations, titles, "Attention weights of each target token", under), note


_COLOURS = {"loss": "#c2410c", "bleu": "#1d4ed8", "chrf": "#0f766e"}


def training_curves(
    losses: Sequence[float], validations: Sequence[Mapping[str, float]], best: int | None = None
) -> Any:
    """The loss of every step, loss and scores of every validation; ``best`` is that of best.pt."""
    figure = _new_figure(12.5 if validations else 5, 3.4)
    training, *validation = figure.subplots(1, 3 if validations else 1, squeeze=False)[0]
    _training(training, losses)
    if validations:
        loss, scores = validation
        epochs = [int(validation["epoch"]) for validation in validations]
        curves = {name: [validation[name] for validation in validations] for name in METRICS}
        _curve(loss, epochs, curves["loss"], "loss")
        if best in epochs:
            dashed = {"color": "#666666", "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 0}
            loss.axvline(best, label=f"best.pt (epoch {best})", **dashed)
        _scaled(loss, curves["loss"])
        _tidy(loss, "Validation loss", "epoch", "cross-entropy per token")
        for name in ("bleu", "chrf"):
            _curve(scores, epochs, curves[name], name, label=METRICS[name])
        scores.set_ylim(0.0, max(1.0, 1.08 * max(curves["bleu"] + curves["chrf"])))
        _tidy(scores, "Validation scores", "epoch", "score, 0 to 100")
    return figure


def _training(axes: Any, losses: Sequence[float]) -> None:
    steps = range(1, len(losses) + 1)
    window = max(1, len(losses) // 50)
    if window == 1:
        _curve(axes, steps, losses, "loss")
    else:
        color = _COLOURS["loss"]
        axes.plot(steps, losses, color=color, linewidth=0.5, alpha=0.35, label="each step")
        starts = range(0, len(losses) - window + 1, window)
        means = [sum(losses[i : i + window]) / window for i in starts]
        centres = [i + (window + 1) / 2 for i in starts]
        axes.plot(centres, means, color=color, linewidth=1.8, label=f"mean of {window} steps")
    _scaled(axes, losses)
    _tidy(axes, "Training loss", "step", "cross-entropy per token")


def _curve(
    axes: Any, x: Sequence[int], y: Sequence[float], name: str, label: str | None = None
) -> None:
    """A line, with dots if there is room: a single point has no line."""
    style = {"linewidth": 1.6, "marker": "o" if len(x) <= 40 else "", "markersize": 3.5}
    axes.plot(x, y, color=_COLOURS[name], label=label, clip_on=False, zorder=3, **style)


def _scaled(axes: Any, losses: Sequence[float]) -> None:
    """A vertical axis for losses: none below zero, with plain numbers as ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = min(losses), max(losses)
    if low > 0 and high > 10 * low:
        axes.set_yscale("log")
        factors = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=factors, numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.10f}".rstrip("0").rstrip("."))
    else:
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)


def _tidy(axes: Any, title: str, counted: str, ylabel: str) -> None:
    """Title, grid and legend; whole numbers across, of what is counted."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(counted, color=_INK)
    axes.set_ylabel(ylabel, color=_INK)
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5, color="#bbbbbb")
    if axes.get_legend_handles_labels()[0]:
        # Above the plot, beside no curve.
        where = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        size = {"fontsize": 8.5, "handlelength": 1.4, "columnspacing": 1}
        axes.legend(frameon=False, ncols=3, **size, **where)
