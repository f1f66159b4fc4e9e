"""A failure of torch.compile is one line that says what to do."""

from __future__ import annotations

import pytest
import torch

from crucible_train.compile_failure import readable_compile_failure
from crucible_train.errors import TrainingError


def test_a_failing_compiler_is_one_line() -> None:
    def broken(graph: object, inputs: object) -> object:
        raise OSError("no c++ here\nand more")

    function = torch.compile(lambda x: x * 2, backend=broken)
    wanted = r"^torch\.compile failed: .*no c\+\+ here; .* --compile 0 goes without$"
    with pytest.raises(TrainingError, match=wanted) as found, readable_compile_failure("--compile 0 goes without"):
        function(torch.ones(3))
    assert "\n" not in str(found.value)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^mine$"), readable_compile_failure(""):
        raise RuntimeError("mine")
