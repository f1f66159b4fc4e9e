from __future__ import annotations

import numpy as np
import pytest

from crucible_train.student_t import critical_value, detectable_shift, power, two_sided_p

# Tables of Student's t: two-sided 5 % and 1 %.
TABLE = {1: (12.706, 63.657), 2: (4.303, 9.925), 4: (2.776, 4.604), 7: (2.365, 3.499), 30: (2.042, 2.750)}


@pytest.mark.parametrize("df", TABLE)
def test_critical_values_are_those_of_the_tables(df: int) -> None:
    five, one = TABLE[df]
    assert critical_value(0.05, df) == pytest.approx(five, abs=6e-4)
    assert critical_value(0.01, df) == pytest.approx(one, abs=6e-4)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 8, 29, 30])
def test_p_agrees_with_scipy(df: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    t = np.linspace(-70, 70, 501)
    np.testing.assert_allclose(two_sided_p(t, df), 2 * stats.t.sf(np.abs(t), df), rtol=0, atol=5e-15)


def test_limits_of_p() -> None:
    assert two_sided_p(0.0, 3) == 1
    assert two_sided_p(np.inf, 3) == 0
    assert np.isnan(two_sided_p(np.nan, 3))


@pytest.mark.parametrize("df", [1, 2, 4, 9, 30])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 8])
def test_power_agrees_with_the_non_central_t(df: int, alpha: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    critical = stats.t.isf(alpha / 2, df)
    for shift in (0.0, 0.5, 2.0, 4.0):
        # SciPy's lower tail underflows to NaN where there is nothing left of it.
        wanted = stats.nct.sf(critical, df, shift) + np.nan_to_num(stats.nct.cdf(-critical, df, shift))
        assert power(shift, df, alpha) == pytest.approx(wanted, abs=2e-5)


def test_detectable_shift_inverts_power() -> None:
    for df, alpha in ((1, 0.05), (4, 0.05 / 8), (30, 0.01)):
        assert power(detectable_shift(df, alpha, 0.8), df, alpha) == pytest.approx(0.8, abs=1e-6)
