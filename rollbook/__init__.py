"""rollbook: asynchronous RL post-training with durable rollout state."""
