"""What many runs say together: which of them no other betters, and how loss falls with cost."""

from collections.abc import Iterable, Sequence
from math import exp, log, sqrt
from statistics import NormalDist
from typing import NamedTuple


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (cost, loss) those that no other betters in one and equals in the other, the cheapest first."""
    front: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if not front or loss < front[-1][1]:
            front.append((cost, loss))
    return front


class PowerLaw(NamedTuple):
    """loss = scale · x^(−exponent), and the 95 % confidence interval of the exponent."""

    scale: float
    exponent: float
    low: float
    high: float


def power_law(xs: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """The law that least squares give in logarithms, from three points on.

    The interval is the textbook one of a slope, Student's t with n − 2 degrees of freedom: scatter about the line is
    all that it knows of. That the points of a front were chosen for being low is not in it.
    """
    n, x, y = len(xs), [log(value) for value in xs], [log(loss) for loss in losses]
    middle_x, middle_y = sum(x) / n, sum(y) / n
    width = sum((value - middle_x) ** 2 for value in x)
    slope = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / width
    rest = sum((b - middle_y - slope * (a - middle_x)) ** 2 for a, b in zip(x, y, strict=True))
    margin = _t(n - 2) * sqrt(rest / (n - 2) / width)
    return PowerLaw(exp(middle_y - slope * middle_x), -slope, -slope - margin, -slope + margin)


def _t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; exact for 1 and 2, from 3 on to 0.2 % (Abramowitz & Stegun 1964, 26.7.5)."""
    if freedom <= 2:
        return {1: 12.7062, 2: 4.3027}[freedom]
    x = NormalDist().inv_cdf(0.975)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, 1))
