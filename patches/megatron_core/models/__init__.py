"""Replacements in megatron.core.models."""
