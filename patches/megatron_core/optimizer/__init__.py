"""Replacements in megatron.core.optimizer."""
