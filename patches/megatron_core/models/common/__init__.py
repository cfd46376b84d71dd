"""Replacements in megatron.core.models.common."""
