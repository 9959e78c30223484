"""Sweeps that choose or prune their points by earlier losses, and launchers of clusters."""
