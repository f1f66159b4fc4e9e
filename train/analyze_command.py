"""``crucible-train analyze``: what a study shows, as RESULTS.md and figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from crucible_train.errors import TrainingError

if TYPE_CHECKING:
    from crucible_train.analysis import Analysis
    from crucible_train.study_design import Study

HELP = "judge an ablation study: divergence, paired tests, RESULTS.md and figures"
METRICS = ("best_val_loss", "final_val_loss", "val_bits_per_byte")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="?", metavar="RUNS", help="the directory that sweep wrote to")
    parser.add_argument("--out", metavar="DIR", help="where RESULTS.md and figures/ go (default: RUNS)")
    parser.add_argument("--alpha", type=float, default=0.05, help="chance of a false verdict in the study (0.05)")
    parser.add_argument("--metric", choices=METRICS, default=METRICS[0], help=f"what to compare ({METRICS[0]})")
    parser.add_argument("--no-figures", action="store_true", help="table only; needs no matplotlib")
    parser.add_argument("--simulate", action="store_true", help="no runs: what a study of this size could find")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="of the simulated study (5)")
    parser.add_argument("--variants", type=int, default=8, metavar="N", help="of the simulated study (8)")


def run(args: argparse.Namespace) -> int:
    if args.simulate:
        return _simulate(args)
    if args.runs is None:
        raise TrainingError("name the directory that sweep wrote to, or --simulate")
    return report(Path(args.runs), Path(args.out or args.runs), args.alpha, args.metric, not args.no_figures)


def report(directory: Path, out: Path, alpha: float = 0.05, metric: str = METRICS[0], figures: bool = True) -> int:
    """Analyses the study at ``directory``, prints the table and writes RESULTS.md and figures/ to ``out``."""
    from crucible_train.analysis import analyze
    from crucible_train.files import write_atomically
    from crucible_train.results_table import plain_table, results_markdown
    from crucible_train.study_design import CONTROL
    from crucible_train.study_runs import load_study, losses_of, planned_seeds

    study = load_study(directory)
    if study is None:
        raise TrainingError(f"{directory}: has no study.json; run crucible-train sweep --out {directory} first")
    losses, absent = losses_of(study, directory, metric)
    analysis = analyze(losses, control=CONTROL, planned=planned_seeds(study), alpha=alpha)
    print(plain_table(study, analysis))
    for name, why in absent.items():
        print(f"missing: {name}: {why}")
    out.mkdir(parents=True, exist_ok=True)
    drawn = _figures(study, analysis, directory, out) if figures else []
    text = results_markdown(study, analysis, absent, metric=metric, figures=drawn)
    write_atomically(out / "RESULTS.md", text.encode())
    print(f"wrote {', '.join(str(out / name) for name in ('RESULTS.md', *drawn))}")
    return 0


def _figures(study: Study, analysis: Analysis, directory: Path, out: Path) -> list[str]:
    from crucible_train.figures import draw_curves, draw_effects
    from crucible_train.study_runs import State, curve_of, state_of

    (out / "figures").mkdir(exist_ok=True)
    curves: dict[str, dict[int, tuple[list[int], list[float]]]] = {}
    for run in study.runs:
        if state_of(run, directory) is State.DONE:
            curves.setdefault(run.variant, {})[run.seed] = curve_of(run, directory)
    draw_curves(out / "figures" / "loss_curves.png", study, analysis, curves)
    draw_effects(out / "figures" / "effects.png", analysis)
    return ["figures/loss_curves.png", "figures/effects.png"]


def _simulate(args: argparse.Namespace) -> int:
    from crucible_train.results_table import power_table, trust_line

    if args.seeds < 2 or args.variants < 1 or not 0 < args.alpha < 1:
        raise TrainingError("--simulate needs --seeds of 2 or more, --variants of 1 or more, --alpha between 0 and 1")
    print(trust_line(args.seeds, args.variants, args.alpha))
    print()
    print(power_table(args.seeds, args.variants, args.alpha))
    return 0
