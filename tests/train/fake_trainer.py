"""A stand-in for ``crucible-train train`` that takes milliseconds: the same flags, the same files.

Its best loss is 4 + 0.1 × the seed, plus what $FAKE_EFFECTS (JSON, by axis value) adds. $FAKE_FAIL (JSON: run name →
times) makes a run fail that often; $FAKE_STEP is the seconds a step takes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from crucible_train.run_config import config_hash
from crucible_train.study_design import AXES, run_config


def main() -> int:
    words = sys.argv[1:]
    resume = "--resume" in words
    words = [word for word in words if word != "--resume"]
    given = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    config = run_config(given)
    out = Path(config.out)
    if out.exists() and any(out.iterdir()) and not resume:
        print("error: already holds files", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    values = {"run": {"preset": config.preset}, "config_hash": config_hash(config)}
    (out / "config.json").write_text(json.dumps(values))
    with (out.parent / "starts.txt").open("a") as file:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
        file.write(f"{out.name} resume={int(resume)} gpu={gpu} pid={os.getpid()}\n")
    _maybe_fail(out)
    log = out / "log.csv"
    done = max(0, len(log.read_text().splitlines()) - 1) if log.exists() else 0  # killed before the header: empty
    if not done:
        log.write_text("step,loss,tokens_per_second,val_loss\n")
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))
    effects = json.loads(os.environ.get("FAKE_EFFECTS", "{}"))
    effect = sum(effects.get(getattr(config, axis), 0.0) for axis in AXES)
    best = 4 + 0.1 * config.seed + effect + 0.001 * (hash((config.seed, effect)) % 7)
    for step in range(done + 1, config.steps + 1):
        time.sleep(float(os.environ.get("FAKE_STEP", "0")))
        with log.open("a") as file:
            file.write(f"{step},{best + 1 / step},{1000.0},{best + 1 / step}\n")
    result = {"steps": config.steps, "best_val_loss": best, "final_val_loss": best, "diverged": False}
    (out / "result.json").write_text(json.dumps(result))
    (out / "checkpoints" / "last").mkdir(parents=True, exist_ok=True)
    (out / "checkpoints" / "last" / "trainer.pt").write_bytes(b"state")
    return 0


def _maybe_fail(out: Path) -> None:
    wanted = json.loads(os.environ.get("FAKE_FAIL", "{}")).get(out.name, 0)
    counter = out / "failures"
    failed = int(counter.read_text()) if counter.exists() else 0
    if failed < wanted:
        counter.write_text(str(failed + 1))
        print("boom", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    sys.exit(main())
