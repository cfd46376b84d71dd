"""Hugging Face checkpoints: what a model needs of one (`names`), what its files hold (`headers`), and how that maps to
Megatron-core's parameters in any layout (`mapping`), for loading and for export (`transfer`) to a running
engine (`update`)."""

from mindspeed_tpi.weights.headers import Checkpoint, check, identity, unpacked
from mindspeed_tpi.weights.mapping import Entry, Model, chunks, entries
from mindspeed_tpi.weights.transfer import hf_tensors, load

__all__ = ["Checkpoint", "Entry", "Model", "check", "chunks", "entries", "hf_tensors", "identity", "load", "unpacked"]
