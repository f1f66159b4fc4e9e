"""``crucible validate``: every CUDA kernel against the float64 oracle or the CPU's operations."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crucible.commands.options import Subparsers, announce_compilation, progress, whole
from crucible.errors import ConfigError

if TYPE_CHECKING:
    from crucible.kernels.validate import Check

AGAINST = ("reference", "cpu")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "validate",
        help="compare every kernel with the float64 oracle",
        description=(
            "Runs each kernel on generated cases and compares with the float64 oracle or the CPU's operations: "
            "max |difference| / max |value| against a bound derived from the kernel's roundings. Exit code 1 and the "
            "first differing element when a bound is exceeded. With --device cpu it is the CPU's operations that are "
            "validated."
        ),
    )
    parser.add_argument(
        "kernel", nargs="?", metavar="KERNEL", help="a kernel, an operation, or a part of such a name (default: all)"
    )
    parser.add_argument("--against", choices=AGAINST, default="reference", help="what is right (default: reference)")
    parser.add_argument("--case", type=whole, metavar="N", help="only the case that the table numbers N")
    parser.add_argument("--dump", metavar="DIR", help="write inputs and outputs of each case to DIR as .npz")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Result:
    """One case: the kernel, its label, the error and its bound, and what is wrong, if anything."""

    number: int
    kernel: str
    label: str
    error: float
    bound: float
    why: str
    fault: str = ""


def run(args: argparse.Namespace) -> int:
    from crucible.engine.settings import choose_device

    device = choose_device(args.device)
    if device == "cpu":
        if args.against == "cpu":
            raise ConfigError("validate --against cpu compares with the CPU, which is the device here; use reference")
        with announce_compilation():
            return report(cpu_results(args.kernel, args.case, args.dump), f"cpu against {args.against}")
    from crucible.kernels.device import CudaDevice

    cuda = CudaDevice(say=progress)
    found = select(args.kernel)
    with announce_compilation():
        return report(results(cuda, found, args.against, args.case, args.dump), f"{cuda.name} against {args.against}")


def select(name: str | None, *, small: bool = False) -> list[Check]:
    """The cases of the kernels that ``name`` means. Raises ConfigError when there is none."""
    from crucible.kernels.table import KERNELS
    from crucible.kernels.validate import checks

    whole_name = [row for row in KERNELS if name in (None, row.name, row.op, row.name.removeprefix("crucible_"))]
    rows = whole_name or [row for row in KERNELS if str(name) in row.name]
    if not rows:
        ops = ", ".join(dict.fromkeys(row.op for row in KERNELS))
        raise ConfigError(f"no kernel is named {name!r}; operations are {ops}; kernels are in docs/kernels.md")
    return checks(rows, small=small)


def pick(cases: Sequence[Any], number: int | None) -> Iterator[tuple[int, Any]]:
    """The cases with their numbers, or that of ``number`` alone. Raises ConfigError when there is none."""
    if number is not None and number >= len(cases):
        raise ConfigError(f"--case must lie in 0 … {len(cases) - 1}, got {number}")
    return ((i, case) for i, case in enumerate(cases) if number in (None, i))


def results(
    device: Any, cases: Sequence[Check], against: str, number: int | None = None, dump: str | None = None
) -> Iterator[Result]:
    """A result a case. The expected side of cases that kernels share is computed once."""
    import numpy as np

    from crucible.kernels.problems import Forced
    from crucible.kernels.validate import SEED
    from crucible.model.validation_ops import Expected, OnDevice

    known: dict[str, list[Any]] = {}
    for index, check in pick(cases, number):
        inputs: dict[str, Any] = {}
        faults: list[str] = []
        if check.pair is not None:
            got, want = check.pair(Forced(device, check.kernel), np.random.default_rng(SEED))
        else:
            ops = OnDevice(
                check.kernel, check.case.config, device, rows=check.case.rows, context=check.context,
                splits=check.splits,
            )  # fmt: skip
            got = check.run(ops, np.random.default_rng(SEED))
            faults, inputs = ops.faults, ops.inputs
            if check.kernel.name not in ops.device.launched:
                faults.append(f"it was not launched, but {', '.join(sorted(ops.device.launched)) or 'nothing'}")
            key = f"{check.kernel.op} {check.label} {check.case} {check.half}"
            if key not in known:
                known[key] = check.run(Expected(oracle(check, against), half=check.half), np.random.default_rng(SEED))
            want = known[key]
        yield judge(index, check.kernel.name, check.label, got, want, check.bound.value, check.bound.why, faults)
        if dump is not None:
            write(Path(dump), f"{index:04}-{check.kernel.name}", inputs, got, want)


def oracle(check: Check, against: str) -> Any:
    """The ops that are compared with."""
    if against == "cpu":
        from crucible.model.cpu_ops import CpuOps

        return CpuOps(check.case.config, context=check.context)
    from crucible.model.reference_ops import ReferenceOps

    return ReferenceOps(check.case.config)


def cpu_results(name: str | None, number: int | None = None, dump: str | None = None) -> Iterator[Result]:
    """The CPU's operations against the oracle, on the cases of ops_table. Raises ConfigError as ``select``."""
    import numpy as np

    from crucible.kernels.ops_table import OPS
    from crucible.kernels.validate import SEED
    from crucible.model.cpu_ops import CpuOps
    from crucible.model.reference_ops import ReferenceOps

    cases = [(row, case) for row in OPS if name is None or name in row.name for case in row.cases]
    if not cases:
        raise ConfigError(f"no operation of the CPU is named {name!r}; there are {', '.join(row.name for row in OPS)}")
    for index, (row, case) in pick(cases, number):
        ops = CpuOps(case.config, context=case.config.context_length)
        got = [np.array(values) for values in row.run(ops, case, np.random.default_rng(SEED))]
        want = row.run(ReferenceOps(case.config), case, np.random.default_rng(SEED))
        yield judge(index, row.name, str(case), got, want, row.tolerance(case), row.bound, [])
        if dump is not None:
            write(Path(dump), f"{index:04}-{row.name}", {}, got, want)


def judge(
    number: int, kernel: str, label: str, got: list[Any], want: list[Any], bound: float, why: str, faults: list[str]
) -> Result:
    """The largest error over the outputs, and what is wrong in one line."""
    from crucible.kernels.comparison import error, first_fault

    worst = max(error(ours, exact) for ours, exact in zip(got, want, strict=True))
    wrong = list(faults)
    if not worst <= bound:
        for output, (ours, exact) in enumerate(zip(got, want, strict=True)):
            if not error(ours, exact) <= bound:
                wrong.append(f"output {output}: {first_fault(ours, exact, bound)}")
                break
    return Result(number, kernel, label, worst, bound, why, "; ".join(wrong))


def report(found: Iterator[Result], what: str) -> int:
    """Prints the table and where its bounds come from. Returns 1 when a case failed, else 0."""
    print(f"validate: {what}; error is max |difference| / max |value|")
    print(f"  {'case':>4} {'kernel':<40}{'input':<34}{'error':>9}{'bound':>9}  verdict")
    reasons: dict[str, None] = {}
    cases = failed = 0
    for result in found:
        cases, failed = cases + 1, failed + bool(result.fault)
        reasons[result.why] = None
        print(
            f"  {result.number:>4} {result.kernel.removeprefix('crucible_'):<40}{result.label:<34}{result.error:>9.1e}"
            f"{result.bound:>9.1e}  {f'FAILED: {result.fault}' if result.fault else 'ok'}",
            flush=True,
        )
    print("bounds:")
    for reason in reasons:
        print(f"  {reason}")
    print(f"validate: {cases} cases, {f'{failed} FAILED' if failed else 'all within their bounds'}")
    return 1 if failed else 0


def write(directory: Path, name: str, inputs: dict[str, Any], got: list[Any], want: list[Any]) -> None:
    """``directory``/``name``.npz with the inputs, got_0 … and want_0 …, under a temporary name first."""
    import numpy as np

    directory.mkdir(parents=True, exist_ok=True)
    outputs = {f"{side}_{i}": a for side, arrays in (("got", got), ("want", want)) for i, a in enumerate(arrays)}
    handle, temporary = tempfile.mkstemp(dir=directory, suffix=".npz")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **inputs, **outputs)
        os.replace(temporary, directory / f"{name}.npz")
    except BaseException:
        os.unlink(temporary)
        raise
