"""The sweepers and launchers of minigpt, in the one package where Hydra looks for them."""

from minigpt.sweeps import launcher, sweeper


class Grid(sweeper.Grid):
    """Every combination of the values of several settings."""


class Search(sweeper.Search):
    """Optuna's search."""


class Joblib(launcher.Joblib):
    """Worker processes of this machine."""


class Submitit(launcher.Submitit):
    """Jobs of SLURM, or as SLURM would start them on this machine."""
