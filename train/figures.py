"""Figures of a study: loss curves with seed bands, and the effects with their intervals (matplotlib, extra train)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crucible_train.analysis import Analysis, Verdict
from crucible_train.errors import TrainingError
from crucible_train.study_design import CONTROL, Study

Curve = tuple[Sequence[int], Sequence[float]]
COLOURS = {
    Verdict.BETTER: "tab:green",
    Verdict.WORSE: "tab:red",
    Verdict.NONE: "tab:grey",
    Verdict.UNSTABLE: "tab:orange",
    Verdict.UNKNOWN: "lightgrey",
}
DPI = 150


def pyplot() -> Any:
    """matplotlib.pyplot without a display. Raises TrainingError when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise TrainingError("figures need matplotlib: pip install 'crucible-lm[train]', or --no-figures") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def band(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps that any of ``curves`` has, with mean, lowest and highest value over those that have the step."""
    steps = np.unique(np.concatenate([np.asarray(curve[0], np.int64) for curve in curves]))
    values = np.full((len(curves), len(steps)), np.nan)
    for row, (at, loss) in zip(values, curves, strict=True):
        row[np.searchsorted(steps, at)] = loss
    finite = np.isfinite(values)
    kept = finite.any(0)
    values, steps = np.where(finite, values, np.nan)[:, kept], steps[kept]
    if not len(steps):
        return steps, *(np.empty(0),) * 3
    return steps, np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)


def draw_curves(path: Path, study: Study, analysis: Analysis, curves: Mapping[str, Mapping[int, Curve]]) -> None:
    """One panel an axis: mean validation loss of each variant over the steps, the seeds' range as a band.

    ``curves``: variant → seed → curve. Diverged runs are dashed lines of their own; the scale is that of the rest.
    """
    diverged = {row.name: row.diverged for row in analysis.rows}
    plt = pyplot()
    axes = list(dict.fromkeys(variant.axis for variant in study.variants if variant.axis)) or [""]
    columns = min(3, len(axes))
    rows = -(-len(axes) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False, sharex=True)
    for panel in panels.flat[len(axes) :]:
        panel.set_visible(False)
    for panel, axis in zip(panels.flat, axes, strict=False):
        shown = [variant for variant in study.variants if variant.name == CONTROL or variant.axis == axis]
        ends = []
        for variant in shown:
            own = {seed: curve for seed, curve in curves.get(variant.name, {}).items() if len(curve[0])}
            lost = [own.pop(seed) for seed in diverged.get(variant.name, ()) if seed in own]
            colour = f"C{shown.index(variant)}"
            for steps, losses in lost:
                panel.plot(steps, losses, color=colour, linewidth=0.8, linestyle="--")
            if not own:
                continue
            at, mean, low, high = band(list(own.values()))
            panel.plot(at, mean, color=colour, label=f"{variant.value or CONTROL} (n={len(own)})", linewidth=1.2)
            panel.fill_between(at, low, high, alpha=0.2, color=colour, linewidth=0)
            ends += [value for value in mean[len(mean) // 4 :] if np.isfinite(value)]
        if ends:
            margin = 0.1 * (np.percentile(ends, 90) - min(ends)) + 0.02
            panel.set_ylim(min(ends) - margin, np.percentile(ends, 95) + 2 * margin)
            panel.legend(fontsize=8)
        panel.tick_params(labelbottom=True)
        panel.set(title=axis or CONTROL, xlabel="step", ylabel="validation loss (nats a token)")
    figure.suptitle("mean over seeds; band: lowest to highest seed; dashed: diverged, kept out of the mean", fontsize=9)
    _save(plt, figure, path)


def draw_effects(path: Path, analysis: Analysis) -> None:
    """Each variant's paired difference to the control with its interval; unknown ones are named without a point."""
    plt = pyplot()
    figure, panel = plt.subplots(figsize=(7, 1.2 + 0.42 * max(1, len(analysis.variants))))
    names = []
    for place, row in enumerate(analysis.variants):
        names.append(f"{row.name} ({row.verdict}, n={row.pairs})")
        if row.difference is None:
            continue
        reach = None
        if row.interval is not None:
            reach = [[row.difference - row.interval[0]], [row.interval[1] - row.difference]]
        panel.errorbar(
            row.difference, place, xerr=reach, fmt="o", capsize=3, color=COLOURS.get(row.verdict, "tab:blue")
        )
    panel.axvline(0.0, color="black", linewidth=0.8)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("paired difference to the control, 95 % interval")
    _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=DPI, format=path.suffix[1:])
    plt.close(figure)
    os.replace(partial, path)
