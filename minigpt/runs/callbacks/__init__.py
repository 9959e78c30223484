"""Callbacks of the Trainer: what is measured, saved, sampled or restored around a step."""
