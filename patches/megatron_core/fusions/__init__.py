"""Replacements in megatron.core.fusions."""
