"""Replacements in megatron.core.models.gpt."""
