"""Sweeps that choose their points by the losses of earlier ones, and launchers of clusters."""
