"""Replacements in megatron.core.transformer.moe."""
