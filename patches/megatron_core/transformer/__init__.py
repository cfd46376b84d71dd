"""Replacements in megatron.core.transformer."""
