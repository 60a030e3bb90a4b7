"""The commands of `rollbook`, one module per subject."""
