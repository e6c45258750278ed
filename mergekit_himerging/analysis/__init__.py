"""Contribution analysis: what each layer of each model does for its own task."""
