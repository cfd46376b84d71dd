"""Replacements in vllm.v1.engine."""
