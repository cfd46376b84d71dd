"""Replacements in megatron.core.tensor_parallel."""
