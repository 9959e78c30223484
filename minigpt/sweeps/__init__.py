"""Many runs: which ones, where they run, and how they compare."""
