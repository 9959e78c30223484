"""The sweepers and launchers of minigpt, in the package that Hydra searches for plugins."""

from minigpt.sweeps import launcher, search, sweeper


class Grid(sweeper.Grid):
    """Every combination of the values of several settings."""


class Search(search.Search):
    """A search with optuna."""


class Joblib(launcher.Joblib):
    """Worker processes of this machine."""


class Submitit(launcher.Submitit):
    """Jobs of SLURM, or processes of this machine that submitit starts."""
