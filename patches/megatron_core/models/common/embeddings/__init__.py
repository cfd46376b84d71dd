"""Replacements in megatron.core.models.common.embeddings."""
