"""Predictions from measured runs: the loss of a larger model, the expected improvement of a setting, the time."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from minigpt.sweeps.comparison import Array

_EXPONENTS = np.geomspace(0.05, 2, 60)
_RESAMPLES = 400
# Predicts the largest values of settings that are left out of sweeps; the whole trend overshoots (docs/sweeps.md).
_TREND = 0.6
_LENGTHS = (0.3, 0.5, 0.8, 1.3, 2.0, 5.0, 20.0)  # of the settings, which are scaled to [0, 1]


@dataclass(frozen=True)
class PowerLaw:
    """L(N) = E + A N^-α, fitted to (N, loss) pairs and to resamples of them.

    Args:
        sizes: in order.  (M,)
        resampled: E, A and α of each resample.  (B, 3)
        noise: standard deviation of a loss around the law, of each resample.  (B,)
    """

    sizes: Array
    resampled: Array
    noise: Array

    @property
    def following(self) -> float:
        """The size after the largest, by their ratio."""
        return float(self.sizes[-1] * min(self.sizes[-1] / self.sizes[-2], 4))

    def predict(self, sizes: Array) -> Array:
        """Return the 5, 50 and 95 % quantiles of the loss at each size.  (3, M)"""
        floor, scale, exponent = self.resampled.T[..., None]
        losses = floor + scale * sizes**-exponent  # (B, M)
        scatter = np.random.default_rng(0).normal(size=(len(self.noise), 1)) * self.noise[:, None]
        return np.percentile(losses + scatter, [5, 50, 95], axis=0)


def fit_power_law(sizes: Array, losses: Array, noise: float) -> PowerLaw | None:
    """Fit L(N) = E + A N^-α with E, A ≥ 0 and a bootstrap of its residuals.

    The form is that of Hoffmann et al. (2022, https://arxiv.org/abs/2203.15556).

    Args:
        sizes: in order.
        noise: the least standard deviation of a loss, such as that between seeds.

    Returns:
        None below four sizes, and if the interval of the following size is wider than the range of the losses.
    """
    if len(sizes) < 4:
        return None
    _, residuals = _least_squares(sizes, losses[None])
    freedom = len(losses) - 3
    rng = np.random.default_rng(0)
    # The few residuals leave their variance uncertain: draw it, too.
    spread = np.sqrt(np.sum(residuals**2) / rng.chisquare(freedom, _RESAMPLES)).clip(noise)
    mean = losses - residuals[0]
    drawn = mean + rng.normal(size=(_RESAMPLES, len(losses))) * spread[:, None]
    law = PowerLaw(sizes, _least_squares(sizes, drawn)[0], spread)
    low, _, high = law.predict(np.array([law.following]))[:, 0]
    return law if high - low < np.ptp(losses) else None


def _least_squares(sizes: Array, losses: Array) -> tuple[Array, Array]:
    """Fit E, A and α to rows of losses; return them and the residuals.  (B, M) -> (B, 3), (B, M)"""
    best, fitted = np.full(len(losses), np.inf), np.zeros((len(losses), 3))
    for exponent in _EXPONENTS:
        x = sizes**-exponent / (sizes**-exponent).mean()
        slope = ((losses - losses.mean(1, keepdims=True)) @ (x - 1) / np.sum((x - 1) ** 2)).clip(0)
        floor = losses.mean(1) - slope
        errors = np.sum((losses - floor[:, None] - slope[:, None] * x) ** 2, axis=1)
        errors[floor < 0] = np.inf  # another exponent has a floor of 0
        candidate = np.stack([floor, slope / (sizes**-exponent).mean(), np.full(len(losses), exponent)], 1)
        fitted[errors < best] = candidate[errors < best]
        best = np.minimum(best, errors)
    floor, scale, exponents = fitted.T[..., None]
    return fitted, losses - floor - scale * sizes**-exponents


def expected_improvement(known: Array, losses: Array, noise: float, wanted: Array) -> Array:
    """Return by how much each candidate is expected to lower the best loss (Jones et al., 1998,
    https://doi.org/10.1023/A:1008306431147).

    The loss is a Gaussian process around a part of its linear trend, with the length scales of the highest likelihood.

    Args:
        known: settings of the rows, scaled to [0, 1].  (R, K)
        noise: standard deviation of the mean loss of a row.
        wanted: settings of the candidates.  (M, K)
    """
    from scipy.stats import norm

    trend = _trend(known, losses, known)
    spread = float((losses - trend).std()) or 1.0
    y, jitter = (losses - trend) / spread, max((noise / spread) ** 2, 1e-4)

    def kernel(a: Array, b: Array, lengths: Array) -> Array:
        return np.asarray(np.exp(-(((a[:, None] - b) / lengths) ** 2).sum(-1) / 2))

    def factor(lengths: Array) -> Any:
        return np.linalg.cholesky(kernel(known, known, lengths) + np.eye(len(y)) * jitter)

    def likelihood(lengths: Array) -> float:
        lower = factor(lengths)
        return float(-0.5 * np.sum(np.linalg.solve(lower, y) ** 2) - np.log(np.diag(lower)).sum())

    lengths = np.ones(known.shape[1])
    for k in [*range(known.shape[1])] * 2:
        others = [np.where(np.arange(len(lengths)) == k, length, lengths) for length in _LENGTHS]
        lengths = max(others, key=likelihood)
    lower, across = factor(lengths), kernel(known, wanted, lengths)
    half = np.linalg.solve(lower, across)  # (R, M)
    mean = _trend(known, losses, wanted) + spread * half.T @ np.linalg.solve(lower, y)
    deviation = spread * np.sqrt((1 - (half**2).sum(0)).clip(1e-12))
    gain = losses.min() - mean
    return np.asarray(gain * norm.cdf(gain / deviation) + deviation * norm.pdf(gain / deviation))


def _trend(known: Array, losses: Array, wanted: Array) -> Array:
    return (1 - _TREND) * losses.mean() + _TREND * _linear(known, losses, wanted)


def extrapolate_seconds(known: Array, seconds: Array, wanted: Array) -> Array:
    """Fit the logarithm of times linearly over settings, and return the times of others.

    Args:
        known: settings of the rows.  (R, K)
        seconds: of training.  (R,)
        wanted: settings of the candidates.  (M, K)
    """
    return np.asarray(np.exp(_linear(known, np.log(seconds), wanted)))


def _linear(known: Array, values: Array, wanted: Array) -> Array:
    """Fit values linearly over settings, and return those of others.  (R, K), (R,), (M, K) -> (M,)"""
    x, at = (np.hstack([np.ones((len(settings), 1)), settings]) for settings in (known, wanted))
    return np.asarray(at @ np.linalg.lstsq(x, values, rcond=None)[0])
