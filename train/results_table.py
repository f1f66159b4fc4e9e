"""RESULTS.md: an Analysis as text, with every run that is missing or diverged said by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crucible_train.analysis import DIVERGENCE, POWER, Analysis, VariantResult
from crucible_train.planted import false_verdict_rate, paired_holm, two_sd
from crucible_train.presets import AXES
from crucible_train.student_t import detectable_shift, power
from crucible_train.study_design import CONTROL, Study

SIMULATION_SEED = 20260
POWER_SEEDS = (3, 5, 8, 12)
UNIT_EFFECTS = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0)
"""True differences of the power table, in standard deviations of a seed's paired difference."""
HEADER = (
    "Axis", "Variant", "Pairs", "Mean ± SD", "Δ vs control", "95 % interval", "p", "p (Holm)", "Detectable Δ",
    "Verdict", "2-SD rule",
)  # fmt: skip


def results_markdown(
    study: Study, analysis: Analysis, absent: Mapping[str, str], *, metric: str, figures: Sequence[str] = ()
) -> str:
    """The whole report. ``absent``: why planned runs have no result, by run; ``figures``: paths relative to it."""
    control = analysis.control
    parts = [
        "# Ablation study",
        _setting(study, metric),
        f"Control ({CONTROL_WORDS}): {_mean(control)} over {_count(len(control.seeds), 'seed')}.",
        markdown_table(study, analysis),
        *_remarks(study, analysis, absent),
        *(f"![{name.rsplit('/', 1)[-1].split('.')[0].replace('_', ' ')}]({name})" for name in figures),
        "## How to read it",
        _method(analysis),
        "## Can the rules be trusted?",
        *_trust(study, analysis),
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(study: Study, analysis: Analysis) -> str:
    """The table of results as Markdown."""
    cells = table_cells(study, analysis)
    rule = "|".join(["---", "---", *["---:"] * 7, "---", "---"])
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def plain_table(study: Study, analysis: Analysis) -> str:
    """The same table for a terminal, columns aligned."""
    cells = table_cells(study, analysis)
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in cells)  # fmt: skip


def table_cells(study: Study, analysis: Analysis) -> list[tuple[str, ...]]:
    """Header and one row a variant, as text."""
    axes = {variant.name: (variant.axis, variant.value) for variant in study.variants}
    rows = [_cells(row, *axes[row.name]) for row in analysis.rows]
    return [HEADER, *rows]


def _cells(row: VariantResult, axis: str, value: str) -> tuple[str, ...]:
    verdict = str(row.verdict)
    if row.diverged:
        runs = len(row.diverged) + len(row.seeds)
        verdict += f": {len(row.diverged)} of {_count(runs, 'seed')} diverged"
    interval = "" if row.interval is None else f"{row.interval[0]:+.4f} … {row.interval[1]:+.4f}"
    return (
        axis or CONTROL,
        value,
        str(row.pairs) if row.name != CONTROL else "",
        _mean(row),
        "" if row.difference is None else f"{row.difference:+.4f}",
        interval,
        _p(row.p),
        _p(row.p_adjusted),
        "" if row.detectable is None else f"{row.detectable:.4f}",
        verdict,
        str(row.two_sd),
    )


def _mean(row: VariantResult) -> str:
    if row.mean is None:
        return "none"
    return f"{row.mean:.4f}" if row.sd is None else f"{row.mean:.4f} ± {row.sd:.4f}"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if value >= 1e-4 else "< 0.0001"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


CONTROL_WORDS = ", ".join(values[0] for values in AXES.values())


def _setting(study: Study, metric: str) -> str:
    settings = ", ".join(f"{name} {_shown(value)}" for name, value in study.base.items())
    line = f"{len(study.variants)} configurations, {_count(len(study.seeds), 'seed')}; {settings}. Measure: `{metric}`."
    rates = "; ".join(f"{name} {rate:g}" for name, rate in study.rates.items())
    others = "the same for every configuration"
    return f"{line} Learning rate: {f'{rates}; otherwise {others}' if rates else others}."


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _remarks(study: Study, analysis: Analysis, absent: Mapping[str, str]) -> list[str]:
    """Missing runs, divergence, suspicious rows: nothing is dropped without a word."""
    remarks = []
    if absent:
        listed = ", ".join(f"{name} ({why})" for name, why in absent.items())
        remarks.append(f"**Missing: {_count(len(absent), 'run')} of {len(study.runs)} planned.** {listed}.")
    else:
        remarks.append(f"All {len(study.runs)} planned runs finished.")
    diverged = [f"{row.name} seed {seed}" for row in analysis.rows for seed in row.diverged]
    if diverged:
        remarks.append(f"**Diverged, kept out of the means:** {', '.join(diverged)}.")
    same = [row.name for row in analysis.variants if row.identical]
    if same:
        remarks.append(
            f"**Void:** {', '.join(same)} lost exactly what the control lost, seed for seed; most likely the two are "
            "the same model."
        )
    return remarks


def _method(analysis: Analysis) -> str:
    return (
        f"A seed whose loss lies more than {DIVERGENCE:g} above the control's mean has diverged: it is kept out of the "
        "mean, and its variant is UNSTABLE whatever the rest says. The others are compared seed by seed with the "
        "control, which saw the same data in the same order: Δ is the mean of the paired differences, with its 95 % "
        "interval (not adjusted for the number of variants) and the p of a paired t test. Holm's correction over "
        f"{_count(analysis.tested, 'tested variant')} keeps the chance of one false verdict or more in the study below "
        f"{analysis.alpha:g}; verdicts are by the corrected p. *Detectable Δ* is the difference that this study would "
        f"find {POWER:.0%} of the time at the correction's strictest step: a row with no difference shown does not "
        "exclude smaller ones. Fewer than two pairs say nothing: unknown. The last column is the rule of thumb (means "
        "more than twice the larger standard deviation apart), for comparison."
    )


def _trust(study: Study, analysis: Analysis) -> list[str]:
    variants, seeds = len(analysis.variants), len(study.seeds)
    if not variants:
        return ["No variants."]
    parts = [trust_line(seeds, variants, analysis.alpha)] if seeds > 1 else ["One seed can tell nothing."]
    return [*parts, power_table(seeds, variants, analysis.alpha)]


def trust_line(seeds: int, variants: int, alpha: float) -> str:
    """How often each rule finds a difference in simulated studies of this size that have none."""
    rng = np.random.default_rng(SIMULATION_SEED)
    ours = false_verdict_rate(lambda x: paired_holm(x, alpha), seeds=seeds, variants=variants, rng=rng)
    thumb = false_verdict_rate(two_sd, seeds=seeds, variants=variants, rng=rng)
    return (
        f"In 20,000 simulated studies of {_count(variants, 'variant')} and {_count(seeds, 'seed')} in which nothing "
        f"differs, the paired test with Holm's correction gave at least one false verdict in {ours:.1%}, the 2-SD rule "
        f"in {thumb:.1%}."
    )


def power_table(seeds: int, variants: int, alpha: float) -> str:
    """Chance of finding one true difference, by its size and the number of seeds, at the strictest step."""
    strict = alpha / max(1, variants)
    counts = sorted({*POWER_SEEDS, *([seeds] if seeds > 1 else [])})
    head = "| True Δ (SD of a paired difference) | " + " | ".join(f"{count} seeds" for count in counts) + " |"
    lines = [head, "|---:" * (1 + len(counts)) + "|"]
    for effect in UNIT_EFFECTS:
        chances = (power(effect * count**0.5, count - 1, strict) for count in counts)
        lines.append(f"| {effect:g} | " + " | ".join(f"{chance:.0%}" for chance in chances) + " |")
    reach = (detectable_shift(count - 1, strict, POWER) / count**0.5 for count in counts)
    lines.append(f"| found {POWER:.0%} of the time | " + " | ".join(f"{shift:.2f}" for shift in reach) + " |")
    return "Power, the chance that a true difference is found:\n\n" + "\n".join(lines)
