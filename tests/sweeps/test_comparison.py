"""Comparisons between rows: against paired t-tests, and on synthetic sweeps with known effects."""

import numpy as np
import pytest
from scipy import stats

from minigpt.sweeps.comparison import FAMILY_ERROR, compare

NOISE = 0.01


def synthetic(rng, means, *, seeds=3, of_seed=NOISE):
    """Losses of a grid: means, an effect of each seed, and noise.  (*means.shape, seeds)"""
    effects = rng.normal(size=seeds) * of_seed
    return 2 + means[..., None] + effects + rng.normal(size=(*means.shape, seeds)) * NOISE


def test_two_rows_are_compared_as_by_a_paired_t_test():
    losses = synthetic(np.random.default_rng(0), np.array([0.0, 0.02]), seeds=5)
    difference, margin = compare(losses).against(0)
    expected = stats.ttest_rel(losses[1], losses[0]).confidence_interval(1 - FAMILY_ERROR)
    assert (difference[1] - margin[1], difference[1] + margin[1]) == pytest.approx(
        tuple(expected), rel=1e-6
    )
    assert (difference[0], margin[0]) == (0, 0)


def test_the_interval_of_one_row_is_that_of_a_t_test():
    losses = np.array([[2.0, 2.1, 2.4]])
    low, high = stats.ttest_1samp(losses[0], 0).confidence_interval(0.95)
    assert (compare(losses).means[0], compare(losses).interval[0]) == pytest.approx(
        (losses.mean(), (high - low) / 2)
    )


@pytest.mark.parametrize(
    ("of_seed", "complete"), [(0, 9), (3 * NOISE, 9), (NOISE, 4)]
)  # rows with all seeds
def test_of_1000_sweeps_without_an_effect_at_most_5_percent_claim_a_difference(of_seed, complete):
    rng = np.random.default_rng(1)
    found = []
    for _ in range(1000):
        losses = synthetic(rng, np.zeros(9), of_seed=of_seed)
        losses[complete:, 1:] = np.nan
        comparison = compare(losses)
        difference, margin = comparison.against(int(np.argmin(comparison.means)))
        found.append((difference > margin).any())
    assert 0.003 < np.mean(found) <= 0.05


def test_without_an_estimate_of_the_noise_there_is_no_comparison():
    one_seed = [[2.0], [2.1]]
    no_common_seed = [[2.0, 2.1, np.nan, np.nan], [np.nan, np.nan, 2.0, 2.2]]
    nothing_left = [[2.0, 2.1], [2.2, np.nan]]
    assert {compare(np.array(losses)) for losses in (one_seed, no_common_seed, nothing_left)} == {
        None
    }


def test_a_noisy_row_has_the_interval_of_its_own_noise():
    losses = 2 + np.random.default_rng(2).normal(size=(9, 5)) * NOISE
    losses[0] = [2.0, 2.3, 1.8, 2.2, 1.7]
    margin = compare(losses).against(8)[1]
    own = losses[0] - losses[1:].mean(0)  # the other rows have hardly any noise
    expected = stats.ttest_1samp(own, 0).confidence_interval(1 - 2 * FAMILY_ERROR)
    assert margin[0] == pytest.approx((expected.high - expected.low) / 2, rel=0.1)
    assert margin[0] > 1.5 * margin[1:].max()


def test_a_difference_of_7_times_the_noise_between_seeds_is_found_in_95_percent():
    rng = np.random.default_rng(3)
    found = []
    means = np.zeros(9)
    means[0] = -7 * NOISE
    for _ in range(200):
        difference, margin = compare(synthetic(rng, means)).against(0)
        found.append(difference[1] > margin[1])
    assert np.mean(found) >= 0.95
