"""Compare the rows of a sweep: test which differences exceed the noise between seeds.

In the model, loss = row + seed + noise, the difference of two rows is free of what their seeds have
in common. All intervals of a report hold together with at least 95 % probability: differences of
rows and those of the values of settings are two families, each with `FAMILY_ERROR` if the noise is
equal in all rows. It is widened where the seeds of its own rows differ more than those of all.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import scipy  # which imports scipy.stats when it is first used

Array = npt.NDArray[np.float64]
# Probability that an interval of a family does not hold; such that with a row of five times the
# noise of the others no more than 5 % of the reports have one that does not hold (nine rows, three
# seeds).
FAMILY_ERROR = 0.01
LEAST_SEEDS = 3  # of a row, to estimate its own noise
ROUNDING = 1e-12  # of a mean loss; losses have up to 9 digits


@dataclass(frozen=True)
class Comparison:
    """R rows, compared over the seeds that they share.

    Args:
        means: of each row, as if all rows had all seeds.  (R,)
        interval: half of the 95 % interval of each mean, over seeds.  (R,)
        covariance: of the means in units of the variance of the noise.  (R, R)
        noise: standard deviation of the noise in all rows.
        freedom: degrees of freedom of `noise`.
        own_variances: of each mean by the noise in its own row; by that of all rows where it has
            too few seeds.  (R,)
        own_freedoms: degrees of freedom of `own_variances`.  (R,)
        looks: how often a sweep may look at its losses before it ends. The intervals hold at all
            looks together, whichever of them ends it: each has this part of the error.
    """

    means: Array
    interval: Array
    covariance: Array
    noise: float
    freedom: int
    own_variances: Array
    own_freedoms: Array
    looks: int = 1

    def margin(self, contrasts: Array, n: int, error: float = FAMILY_ERROR) -> Array:
        """Return half of the simultaneous interval of contrasts of the rows.

        The noise of all rows gives Tukey's range, for unequal numbers of seeds as in Kramer (1956,
        https://doi.org/10.2307/3001469). It assumes equal noise, so the interval is at least that
        of Welch (1947, https://doi.org/10.2307/2332510) from the noise in each row, at twice the
        error.

        Args:
            contrasts: weights of the rows, each the difference of two means.  (K, R)
            n: number of means among which all differences are compared.
        """
        error = error / self.looks
        variances = np.sum(contrasts @ self.covariance * contrasts, axis=1).clip(0)  # (K,)
        tukey = _range_quantile(error, n, self.freedom) * self.noise * np.sqrt(variances / 2)
        own = contrasts**2 * self.own_variances  # (K, R)
        freedom = own.sum(1) ** 2 / np.maximum(np.sum(own**2 / self.own_freedoms, axis=1), 1e-300)
        welch = scipy.stats.t.ppf(1 - error, np.maximum(freedom, 1)) * np.sqrt(own.sum(1))
        rounding = ROUNDING * np.abs(contrasts).sum(1)  # equal losses without noise are tied
        return np.maximum(tukey, welch).clip(rounding)

    def against(self, row: int) -> tuple[Array, Array]:
        """Return the differences of all rows from one, and half of their intervals, (R,) each."""
        contrasts = np.eye(len(self.means)) - np.eye(len(self.means))[row]
        return contrasts @ self.means, self.margin(contrasts, len(self.means))

    def of_rows(self, order: npt.NDArray[np.int64]) -> "Comparison":
        """Return the comparison with its rows in another order, (R,)."""
        return replace(
            self,
            means=self.means[order],
            interval=self.interval[order],
            covariance=self.covariance[np.ix_(order, order)],
            own_variances=self.own_variances[order],
            own_freedoms=self.own_freedoms[order],
        )


@lru_cache
def _range_quantile(error: float, n: int, freedom: int) -> float:
    return float(scipy.stats.studentized_range.ppf(1 - error, n, freedom)) if n > 1 else 0.0


def compare(losses: Array, looks: int = 1) -> Comparison | None:
    """Compare rows by least squares.

    Args:
        losses: of each row and seed; NaN where a run is missing.  (R, S)
        looks: as in `Comparison`.

    Returns:
        None if the noise is unknown, or rows have no seed in common with the others.
    """
    rows, seeds = losses.shape
    row, seed = np.nonzero(np.isfinite(losses))
    y = losses[row, seed]  # (N,), of all runs
    # The model: a mean of each row, and an effect of each seed; the effects sum to 0.
    of_seed = np.eye(seeds)[seed]  # (N, S)
    x = np.hstack([np.eye(rows)[row], of_seed[:, 1:] - of_seed[:, :1]])  # (N, R + S - 1)
    freedom = len(y) - x.shape[1]
    if seeds < 2 or freedom < (rows > 1) or np.linalg.matrix_rank(x) < x.shape[1]:
        return None
    inverse = np.linalg.pinv(x)  # (R + S - 1, N)
    fitted = inverse @ y
    # The variance of the noise is what the model leaves; that of the seeds is what they explain.
    residuals = y - x @ fitted
    residual = float(np.sum(residuals**2))
    counts = np.bincount(row)  # (R,)
    row_means = np.bincount(row, y) / counts
    within = float(np.sum((y - row_means[row]) ** 2))
    noise = residual / max(freedom, 1)
    of_seeds = max(0.0, within - residual) / (seeds - 1)
    # The variance of one run over seeds, with degrees of freedom as in Satterthwaite (1946,
    # https://doi.org/10.2307/3002019): (Σ part)² / Σ (part² / freedom of the part).
    runs = (len(y) - rows) / (seeds - 1)  # per seed; the number of rows if all have all seeds
    parts = np.array([of_seeds / runs, noise * (runs - 1) / runs])
    variance = parts.sum()
    effective = variance**2 / max(float(np.sum(parts**2 / [seeds - 1, max(freedom, 1)])), 1e-300)
    quantile = scipy.stats.t.ppf(1 - 0.025 / looks, max(effective, 1.0))
    interval = quantile * np.sqrt(variance / counts)
    # The noise in a row of its own is by what the residual would fall without its runs.
    own_noise = np.full(rows, noise)
    own_freedoms = np.full(rows, max(freedom, 1.0))
    for i in np.flatnonzero((counts >= LEAST_SEEDS) & (rows > 1)):
        of_row = row == i
        left = np.eye(counts[i]) - x[of_row] @ inverse[:, of_row]
        fall = residuals[of_row] @ np.linalg.pinv(left, 1e-9) @ residuals[of_row]
        own_freedoms[i] = np.linalg.matrix_rank(left, 1e-9)
        own_noise[i] = max(0.0, fall / own_freedoms[i])
    return Comparison(
        means=fitted[:rows],
        interval=interval,
        covariance=(inverse @ inverse.T)[:rows, :rows],
        noise=noise**0.5,
        freedom=freedom,
        own_variances=own_noise / counts,
        own_freedoms=own_freedoms,
        looks=looks,
    )
