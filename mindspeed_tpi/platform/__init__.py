"""Shims for the platform a framework runs on."""
