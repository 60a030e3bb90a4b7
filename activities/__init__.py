"""Side effects: one verb per function."""
