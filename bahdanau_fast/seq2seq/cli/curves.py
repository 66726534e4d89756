"""Plots of losses and scores. Needs matplotlib (extra ``demo``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bahdanau_fast.seq2seq.cli.plots import INK, new_figure
from bahdanau_fast.seq2seq.model.settings import METRICS

__all__ = ["training_curves"]

_ACCENT, _SECOND, _GREY = "#c2410c", "#1d4ed8", "#666666"
_COLOURS = {"loss": _ACCENT, "bleu": _SECOND, "chrf": "#0f766e"}


def training_curves(
    losses: Sequence[float],
    validations: Sequence[Mapping[str, float]],
    best: int | None = None,
) -> Any:
    """The loss of every step, then loss and scores of every validation, if there are any.

    The epoch ``best`` is marked as the one that ``best.pt`` holds.
    """
    figure = new_figure(12.5 if validations else 5, 3.4)
    axes = figure.subplots(1, 3 if validations else 1, squeeze=False)[0]
    _training(axes[0], losses, "cross-entropy per token")
    if validations:
        loss, scores = axes[1:]
        _validation(loss, validations, ["loss"], best)
        _scaled(loss, [validation["loss"] for validation in validations])
        _tidy(loss, "Validation loss", "cross-entropy per token")
        names = ("bleu", "chrf")
        _validation(scores, validations, names, None)
        top = max(validation[name] for validation in validations for name in names)
        scores.set_ylim(0.0, max(1.0, 1.08 * top))
        _tidy(scores, "Validation scores", "score, 0 to 100")
    return figure


def _training(axes: Any, losses: Sequence[float], ylabel: str) -> None:
    steps = range(1, len(losses) + 1)
    window = max(1, len(losses) // 50)
    if window == 1:
        axes.plot(steps, losses, color=_ACCENT, **_line(len(losses)))
    else:
        axes.plot(steps, losses, color=_ACCENT, linewidth=0.5, alpha=0.35, label="each step")
        starts = range(0, len(losses) - window + 1, window)
        means = [sum(losses[i : i + window]) / window for i in starts]
        centres = [i + (window + 1) / 2 for i in starts]
        label = f"mean of {window} steps"
        axes.plot(centres, means, color=_ACCENT, linewidth=1.8, label=label)
    _scaled(axes, losses)
    _counted(axes, "step")
    _tidy(axes, "Training loss", ylabel)


def _validation(
    axes: Any,
    validations: Sequence[Mapping[str, float]],
    names: Sequence[str],
    best: int | None,
) -> None:
    epochs = [int(validation["epoch"]) for validation in validations]
    for name in names:
        values = [validation[name] for validation in validations]
        # With one curve the title names it.
        label = METRICS[name] if len(names) > 1 else None
        axes.plot(epochs, values, label=label, color=_COLOURS[name], **_line(len(epochs)))
    if best in epochs:
        label = f"best.pt (epoch {best})"
        axes.axvline(best, color=_GREY, linewidth=0.9, linestyle=(0, (4, 3)), label=label, zorder=0)
    _counted(axes, "epoch")


def _line(points: int) -> dict[str, Any]:
    """Add dots if there is room: a single point has no line."""
    marker = "o" if points <= 40 else ""
    return {"linewidth": 1.6, "marker": marker, "markersize": 3.5, "clip_on": False, "zorder": 3}


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


def _counted(axes: Any, what: str) -> None:
    """A horizontal axis for counts: only whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(what, color=INK)


def _tidy(axes: Any, title: str, ylabel: str) -> None:
    axes.set_ylabel(ylabel, color=INK)
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5, color="#bbbbbb")
    if axes.get_legend_handles_labels()[0]:
        # Above the plot, beside no curve.
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        axes.legend(
            frameon=False, fontsize=8.5, ncols=3, handlelength=1.4, columnspacing=1, **place
        )
