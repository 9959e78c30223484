"""Predictions of a sweep: on losses that follow a known law."""

import numpy as np
import pytest
from scipy.optimize import curve_fit

from minigpt.sweeps.prediction import _least_squares, expected_improvement, fit_power_law

SIZES = np.geomspace(1e5, 1.6e6, 5)


def test_the_parameters_of_a_power_law_are_recovered() -> None:
    law = fit_power_law(SIZES, 1.5 + 20 * SIZES**-0.3, 1e-6)
    assert law is not None
    floor, scale, exponent = np.median(law.resampled, axis=0)
    assert (floor, exponent) == pytest.approx((1.5, 0.3), abs=0.03)
    assert law.predict(SIZES)[1] == pytest.approx(1.5 + 20 * SIZES**-0.3, abs=1e-3)
    assert scale > 0


def test_a_fit_has_no_negative_floor_and_the_least_squares_that_scipy_finds() -> None:
    """A straight line over the logarithm has no floor: unbounded least squares would take a negative one."""
    losses, scaled = 4 - 0.25 * np.log(SIZES), SIZES / SIZES[0]
    (fitted,), (residuals,) = _least_squares(SIZES, losses[None])
    assert (fitted >= 0).all()
    found, _ = curve_fit(
        lambda n, floor, scale, exponent: floor + scale * n**-exponent,
        scaled,
        losses,
        p0=(0.1, 1, 0.3),
        bounds=([0, 0, 0.05], [np.inf, np.inf, 2]),
    )
    expected = losses - found[0] - found[1] * scaled ** -found[2]
    assert np.sum(residuals**2) == pytest.approx(np.sum(expected**2), rel=0.05)  # its exponents are 6 % apart
    assert fit_power_law(SIZES, 1 + SIZES / 1e7, 1e-4) is None  # no such law


def test_an_extrapolation_gains_something_but_less_than_the_whole_trend() -> None:
    known = np.array([[0.0], [0.5], [1.0]])
    (beyond,) = expected_improvement(known, 2 - known[:, 0], 0.01, np.array([[1.5]]))
    assert 0.05 < beyond < 0.5  # the trend would gain 0.5
    (between,) = expected_improvement(known, 2 - known[:, 0], 0.01, np.array([[0.75]]))
    assert between < 0.01
