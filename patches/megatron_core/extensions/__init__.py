"""Replacements in megatron.core.extensions."""
