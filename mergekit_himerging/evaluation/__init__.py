"""Models side by side on held-out data."""
