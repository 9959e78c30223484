"""Compare the rows of a sweep: test which differences exceed the noise between seeds.

The model is loss = row + seed + noise: every row shares its seeds with others, so that the difference of two rows is
free of what their seeds have in common, and all rows together estimate the noise. Its variance is taken to be the same
in all rows. All intervals of a report hold together with 95 % probability: the differences between rows and those
between the values of settings are two families, each with `FAMILY_ERROR`.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
FAMILY_ERROR = 0.025  # probability that an interval of a family does not hold
_RESAMPLES = 500


@dataclass(frozen=True)
class Comparison:
    """R rows, compared over the seeds that they share.

    Args:
        means: of each row, as if all rows had all seeds.  (R,)
        interval: half of the 95 % interval of each mean, over seeds.  (R,)
        covariance: of the means in units of the variance of the noise.  (R, R)
        noise: standard deviation of the noise.
        freedom: degrees of freedom of `noise`.
    """

    means: Array
    interval: Array
    covariance: Array
    noise: float
    freedom: int

    def margin(self, contrasts: Array, n: int, error: float = FAMILY_ERROR) -> Array:
        """Return half of the simultaneous interval of contrasts of the rows.

        Source: Tukey's range, for unequal numbers of seeds as in Kramer (1956, https://doi.org/10.2307/3001469).

        Args:
            contrasts: weights of the rows, each the difference of two means.  (K, R)
            n: number of means among which all differences are compared.
        """
        variances = np.sum(contrasts @ self.covariance * contrasts, axis=1)
        return _range_quantile(error, n, self.freedom) * self.noise * np.sqrt(variances.clip(0) / 2)

    def against(self, row: int) -> tuple[Array, Array]:
        """Return the differences of all rows from one, and half of their intervals.  (R,), (R,)"""
        contrasts = np.eye(len(self.means))
        contrasts[:, row] -= 1
        return contrasts @ self.means, self.margin(contrasts, len(self.means))


@lru_cache
def _range_quantile(error: float, n: int, freedom: int) -> float:
    if n < 2:
        return 0.0
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(1 - error, n, freedom))


def compare(losses: Array) -> Comparison | None:
    """Compare rows by least squares; None if the noise is unknown, or rows have no seed in common with the others.

    Args:
        losses: of each row and seed; NaN where a run is missing.  (R, S)
    """
    row, seed = np.nonzero(np.isfinite(losses))
    rows, seeds = losses.shape
    of_seed = np.eye(seeds)[seed]
    x = np.hstack([np.eye(rows)[row], of_seed[:, 1:] - of_seed[:, :1]])  # the effects of seeds sum to 0
    y = losses[row, seed]
    freedom = len(y) - x.shape[1]
    if seeds < 2 or freedom < (rows > 1) or np.linalg.matrix_rank(x) < x.shape[1]:
        return None
    inverse = np.linalg.pinv(x)
    fitted = inverse @ y
    counts = np.bincount(row)
    within = float(np.sum((y - (np.bincount(row, y) / counts)[row]) ** 2))
    residual = float(np.sum((y - x @ fitted) ** 2))
    noise, of_seeds = residual / max(freedom, 1), (within - residual) / (seeds - 1)
    # The variance of one run over seeds, with degrees of freedom as in Satterthwaite (1946,
    # https://doi.org/10.2307/3002019).
    runs = (len(y) - rows) / (seeds - 1)  # per seed; the number of rows if all have all seeds
    parts = np.array([of_seeds / runs, noise * (runs - 1) / runs])
    variance = parts.sum()
    effective = variance**2 / max(float(np.sum(parts**2 / [seeds - 1, max(freedom, 1)])), 1e-300)
    from scipy.stats import t

    interval = t.ppf(0.975, max(effective, 1.0)) * np.sqrt(variance / counts)
    return Comparison(fitted[:rows], interval, (inverse @ inverse.T)[:rows, :rows], noise**0.5, freedom)


def shares(losses: Array) -> Array:
    """Return the shares of the variance of a full grid: of each setting, of their interaction, and of the noise.

    Estimates are corrected for the noise in the means and not negative; intervals are 95 % percentiles of a parametric
    bootstrap.

    Args:
        losses: of every combination of the values of K settings, over seeds.  (*levels, S)

    Returns:
        The share, and the ends of its interval.  (K + 2, 3), or (K + 1, 3) for one setting, which has no interaction
    """
    *levels, seeds = losses.shape
    estimate, mean, of_seed, noise = _components(losses[None])
    rng = np.random.default_rng(0)
    one = (_RESAMPLES, *(1 for _ in levels), 1)
    # Both variances are drawn, too: few seeds leave them uncertain.
    freedom = (prod(levels) - 1) * (seeds - 1)
    noise = noise * np.sqrt(freedom / rng.chisquare(freedom, one))
    of_seed = of_seed * np.sqrt((seeds - 1) / rng.chisquare(seeds - 1, one))
    drawn = mean[..., None] + rng.normal(size=(*one[:-1], seeds)) * of_seed
    resampled = _components(drawn + rng.normal(size=(_RESAMPLES, *levels, seeds)) * noise)[0]
    low, high = np.percentile(resampled / resampled.sum(1, keepdims=True), [2.5, 97.5], axis=0)
    found = estimate[0] / estimate[0].sum()
    return np.stack([found, np.minimum(low, found), np.maximum(high, found)], 1)


def _components(losses: Array) -> tuple[Array, Array, Array, Array]:
    """Return the variance of each effect and of a run over seeds, and what a resample is drawn from.

    Args:
        losses: of N grids.  (N, *levels, S)

    Returns:
        variances (N, K + 2), the means of all combinations with effects of these variances (N, *levels), and the
        standard deviations of seeds and of the noise, (N,) each.
    """
    n, *levels, seeds = losses.shape
    axes, runs = tuple(range(1, len(levels) + 1)), prod(levels)
    cells = losses.mean(-1)  # (N, *levels)
    mean = cells.mean(axes, keepdims=True)
    seed = losses.mean(axes, keepdims=True) - mean[..., None]
    residual = losses - cells[..., None] - seed
    noise = (residual**2).sum((*axes, -1)) / ((runs - 1) * (seeds - 1))  # (N,)
    of_seed = np.maximum(0, (seed**2).sum((*axes, -1)) / (seeds - 1) - noise / runs)
    effects = [cells.mean(tuple(a for a in axes if a != axis), keepdims=True) - mean for axis in axes]
    freedom = [level - 1 for level in levels]
    if len(levels) > 1:
        effects.append(cells - mean - sum(effects))
        freedom.append(runs - 1 - sum(freedom))
    variances, means = [], mean
    for effect, df in zip(effects, freedom, strict=True):
        raw = (effect**2).mean(axes)
        true = np.maximum(0, raw - df / runs * noise / seeds)  # the noise in the means adds the rest
        variances.append(true)
        means = means + effect * np.sqrt(true / np.maximum(raw, 1e-300)).reshape(n, *(1 for _ in axes))
    return np.stack([*variances, noise + of_seed], 1), means, np.sqrt(of_seed), np.sqrt(noise)
