"""Replacements in megatron.core.distributed."""
