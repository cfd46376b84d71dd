"""Drives a real rollout engine and a real trainer on the same tokens, and compares their log-probabilities bit by bit."""
