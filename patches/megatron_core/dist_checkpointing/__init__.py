"""Replacements in megatron.core.dist_checkpointing."""
