"""Export: a planned merge as a recipe with explicit values."""
