<<<<<<< HEAD
"""Whether a change of code helps: versions of the code, compute multipliers, more seeds."""
=======
"""Research with sweeps: the share of the compute at which a better value reaches the same loss."""
>>>>>>> 9ee04e1d (Describe the compute multiplier; leave out shares without any end of their interval)
