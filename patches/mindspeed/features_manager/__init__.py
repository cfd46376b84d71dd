"""Replacements in `mindspeed.features_manager`."""
