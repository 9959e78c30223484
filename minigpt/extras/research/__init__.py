"""Whether a change of code helps: versions of the code, compute multipliers, more seeds."""
