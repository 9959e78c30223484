"""The plots of a sweep: its panels, and the functions behind them."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sweep_folders import panels_of, points_of, run_folder

from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import report
from minigpt.sweeps.sweep_plots import highest_converged, pareto_front, sweep_figure


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12))
def test_the_pareto_front_holds_all_points_that_none_dominates(points):
    dominated = {a for a in points for b in points if a != b and a[0] >= b[0] and a[1] >= b[1]}
    assert pareto_front(points) == sorted({*points} - dominated)


def test_a_plot_shows_the_losses_near_the_median_and_all_if_most_are_equal():
    assert highest_converged([2.0, 2.1, 2.2, 2.4, 9.0]) == 2.4
    assert highest_converged([2.0, 2.0, 2.3]) == 2.3


def test_two_numeric_settings_are_a_heat_map_with_the_best_cell_in_bold():
    losses = {
        ("4", "1e-2"): None,
        ("2", "1e-2"): 1.2,
        ("4", "1e-3"): 0.4,
        ("2", "1e-3"): 0.2,
        ("10", "1e-3"): 1.0,
    }
    shape = {"n_layer": ["4", "2", "10"], "lr": ["1e-2", "1e-3"]}
    panel = panels_of(
        points_of(shape, lambda *at: losses.get(at, 2.0), status=lambda *at: f"{at[0]} layers")
    )[0]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("n_layer", "lr")
    np.testing.assert_allclose(
        panel.images[0].get_array().filled(np.nan), [[0.2, 0.4, 1.0], [1.2, np.nan, 2.0]]
    )
    assert [text.get_text() for text in panel.texts if text.get_weight() == "bold"] == [
        "0.2000\n2 layers"
    ]


def test_one_numeric_setting_is_a_line_with_the_interval_over_seeds():
    def loss(rate, seed):
        return 1 + abs(math.log10(float(rate)) + 3) + int(seed) / 10

    shape = {"optimizer.lr": ["1e-2", "1e-4", "1e-3"], "seed": ["1", "2", "3"]}
    panel, *_ = panels_of(points_of(shape, loss))
    assert panel.get_xscale() == "log"
    assert panel.get_title() == "best validation loss, mean and 95 % interval over seeds"
    line, _, (bars,) = panel.containers[0]
    np.testing.assert_allclose(line.get_xydata(), [[1e-4, 2.2], [1e-3, 1.2], [1e-2, 2.2]])
    interval = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5  # rows differ by their settings alone
    np.testing.assert_allclose([np.ptp(bar[:, 1]) for bar in bars.get_segments()], 2 * interval)


def test_along_a_setting_there_is_a_line_per_combination_of_the_others_best_first():
    def loss(width, rate):
        return 4 - math.log10(int(width)) + abs(math.log2(float(rate) * int(width) / 0.064))

    shape = {"model.n_embd": ["32", "128", "64"], "optimizer.lr": ["5e-4", "1e-3", "2e-3", "4e-3"]}
    panel = panels_of(points_of(shape, loss), along="optimizer.lr")[0]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == [
        "n_embd=128",
        "n_embd=64",
        "n_embd=32",
    ]
    for (line, *_), (width, best) in zip(
        panel.containers, [("128", 5e-4), ("64", 1e-3), ("32", 2e-3)], strict=True
    ):
        assert line.get_xdata()[np.argmin(line.get_ydata())] == best
        assert min(line.get_ydata()) == loss(width, best)


def test_other_sweeps_are_the_best_rows_by_name():
    points = points_of(
        {"act": ["relu", "gelu"], "n": "ab"}, lambda act, n: len(act) + (n == "b") / 2
    )
    panel = panels_of(points)[0]
    assert panel.get_xlabel() == "best validation loss (nats per token)"
    shown = zip(panel.texts, panel.get_yticklabels(), strict=True)
    names = [(name.get_text(), loss.get_text()) for name, loss in shown]
    assert names[:2] == [("act=relu, n=a", "4.0000"), ("act=gelu, n=a", "4.0000")]


def test_a_single_point_of_which_nothing_is_known_can_be_plotted_and_printed(printed):
    known = {"params": None, "flops": None, "status": "waiting", "tokens_per_second": None}
    points = points_of({"max_steps": ["5"]}, lambda steps: None, **known)
    assert not any(panel.get_ylabel() for panel in panels_of(points))
    assert "best" not in printed(points).partition("\n\n")[2]


def test_text_of_a_user_is_not_read_as_a_formula(tmp_path, recwarn):
    for i, path in enumerate(("$x^$", r"$\foo", "日本\n")):
        run_folder(tmp_path / "$1 $2" / f"{i}", f"data.path={path}")
    report([tmp_path / "$1 $2"])
    assert (tmp_path / "$1 $2" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert not recwarn  # of characters that the font lacks


def test_the_plots_of_mixed_runs_have_room_for_their_titles_and_no_legend_without_a_line():
    many = dict.fromkeys(
        ("model.activation", "model.norm_position", "optimizer", "tokenizer", "schedule"), "ab"
    )
    figure = sweep_figure(
        ranked(points_of(many, lambda *values: 2 + values.count("a"), params=10)), title="mixed"
    )
    figure.draw_without_rendering()
    swept, curves, params, _ = figure.axes
    left, right = (panel.title.get_window_extent() for panel in (swept, curves))
    assert left.x1 < right.x0
    # The front is one point
    assert [text.get_text() for text in params.get_legend().get_texts()] == ["best 2.0000"]
