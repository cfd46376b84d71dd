"""Entry points that other packages call."""
