"""The figures of the report, each from plain numbers to an SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

REAL, MODEL, GREY, INK = "#2563eb", "#ea580c", "#94a3b8", "#1e293b"
CYCLE = (REAL, MODEL, "#059669", "#7c3aed", "#db2777", "#0891b2", "#ca8a04", "#475569")
STYLE = {
    "font.size": 10, "axes.edgecolor": "#cbd5e1", "axes.labelcolor": INK, "text.color": INK, "xtick.color": "#475569",
    "ytick.color": "#475569", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e2e8f0", "grid.linewidth": 0.8, "axes.axisbelow": True, "legend.frameon": False,
    "svg.fonttype": "none", "font.family": "sans-serif", "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}  # fmt: skip

Series = tuple[Sequence[float], Sequence[float]]  # x [n], y [n] with NaN where absent


def _svg(draw, width: float = 6.4, height: float = 3.2) -> str:
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def lines(series: dict[str, Series], title: str, xlabel: str, colours: dict[str, str] | None = None) -> str:
    """Lines over steps; long ones are shown faint with a running mean on top."""

    def draw(ax):
        for i, (name, (x, y)) in enumerate(series.items()):
            colour = (colours or {}).get(name, CYCLE[i % len(CYCLE)])
            x, y = np.asarray(x, float), np.asarray(y, float)
            x, y = x[np.isfinite(y)], y[np.isfinite(y)]
            smooth = len(y) >= 20 and not np.all(np.diff(y) >= 0)  # counters stay as they are
            ax.plot(x, y, color=colour, alpha=0.3 if smooth else 1.0, lw=1.0 if smooth else 1.8,
                    marker="" if smooth else "o", ms=3.5, label=None if smooth else name)  # fmt: skip
            if smooth:
                ax.plot(x, running_mean(y, max(3, len(y) // 12)), color=colour, lw=2, label=name)
        ax.set(title=title, xlabel=xlabel)
        ax.margins(x=0.02)
        ax.ticklabel_format(axis="y", useOffset=False)
        values = np.concatenate([np.asarray(y, float) for _, y in series.values()])
        low, high = np.nanmin(values), np.nanmax(values)
        if high - low < 1e-6 * max(abs(high), 1e-6):  # constant: do not zoom into its rounding
            ax.set_ylim(low - 0.5 * max(abs(low), 1e-3), high + 0.5 * max(abs(high), 1e-3))
        if len(series) > 1:
            ax.legend(loc="best", fontsize=9)

    return _svg(draw)


def running_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Centred mean of y [n] over `window` values, shorter at the ends."""
    total = np.concatenate([[0.0], np.cumsum(y)])
    index = np.arange(len(y))
    low, high = np.maximum(index - window // 2, 0), np.minimum(index + window // 2 + 1, len(y))
    return (total[high] - total[low]) / (high - low)


SUCCESS = "success on official initial states, % (95 % Wilson interval)"


def success(tasks: list[str], before: list, after: list, xlabel: str = SUCCESS) -> str:
    """Success by task with intervals. Entries are (rate, low, high) in [0, 1], or None where not recorded."""

    def draw(ax):
        y = np.arange(len(tasks))[::-1]
        for offset, rows, colour, label in ((0.14, before, GREY, "before"), (-0.14, after, REAL, "after")):
            kept = [(yy + offset, row) for yy, row in zip(y, rows, strict=True) if row is not None]
            if kept:
                at, values = [k[0] for k in kept], np.array([k[1] for k in kept]) * 100
                ax.hlines(at, values[:, 1], values[:, 2], color=colour, lw=3, alpha=0.45)
                ax.plot(values[:, 0], at, "o", color=colour, ms=7, label=label)
        ax.set(
            xlim=(-2, 102),
            yticks=y,
            yticklabels=tasks,
            xlabel=xlabel,
        )
        ax.set_ylim(-0.6, len(tasks) - 0.4)
        ax.grid(axis="y", visible=False)
        ax.legend(loc="lower right", fontsize=9)

    return _svg(draw, 8.4, 1.2 + 0.5 * len(tasks))


def calibration(x: Sequence[float], y: Sequence[float], pairs: np.ndarray) -> str:
    """The fitted map, the pairs it came from [n, 2] (jittered) and their means in ten bins."""

    def draw(ax):
        scores = np.concatenate([x, pairs[:, 0]]) if len(pairs) else np.asarray(x)
        if len(scores) and scores.min() >= 0 and scores.max() <= 1:  # a margin has no line without bias
            ax.plot([0, 1], [0, 1], "--", color=GREY, lw=1, label="no bias")
        if len(pairs):
            jitter = np.random.default_rng(0).uniform(-0.012, 0.012, (len(pairs), 2))
            ax.plot(
                *(pairs + jitter).T,
                ".",
                color=MODEL,
                alpha=min(0.5, 30 / len(pairs) + 0.05),
                ms=4,
                label="anchor pairs",
            )
            low, high = pairs[:, 0].min(), pairs[:, 0].max()
            index = np.minimum(((pairs[:, 0] - low) / max(high - low, 1e-12) * 10).astype(int), 9)
            means = np.array([pairs[index == b].mean(axis=0) for b in np.unique(index)])
            ax.plot(*means.T, "s", color=MODEL, ms=6, label="mean of bin")
        if len(x):
            ax.plot(x, y, color=REAL, lw=2.2, label="calibration")
        ax.set(xlabel="world model's reward", ylabel="real reward")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)

    return _svg(draw, 7.4, 3.9)


def bars(values: dict[str, float], title: str, xlabel: str) -> str:
    """Horizontal bars, largest first, with their share of the total."""

    def draw(ax):
        names = sorted(values, key=lambda n: values[n])
        total = sum(values.values()) or 1.0
        ax.barh(names, [values[n] for n in names], color=REAL, height=0.62)
        for i, name in enumerate(names):
            ax.text(values[name], i, f"  {values[name] / total:.0%}", va="center", fontsize=9)
        ax.set(title=title, xlabel=xlabel)
        ax.margins(x=0.12)
        ax.grid(axis="y", visible=False)

    return _svg(draw, 8.4, 1.1 + 0.34 * len(values))
