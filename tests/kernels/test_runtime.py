"""How the kernels' threads are set up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRINT = "import os, crucible.kernels.cpu; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_threads_spin_briefly_unless_the_user_decides(given: dict[str, str], wanted: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run(
        [sys.executable, "-c", PRINT], env={**clean, **given}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == wanted
