"""Says why training and rollout log-probabilities differ."""
