"""The self-test of a backend: `mindspeed-tpi verify`."""
