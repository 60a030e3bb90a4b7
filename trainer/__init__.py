"""The torch process: plan, compute, apply, checkpoint, publish."""
