"""Interpretability: attention maps, head statistics and head ablation of a trained model."""
