"""A trainer's Hugging Face tensors into the running model of a vLLM engine, in buckets: all of them, or none.

Each tensor is checked as it arrives, travels in a file of at most `BUCKET` bytes (a larger tensor: of its own size), and every
worker keeps its shard of it beside the weights in use. Those are overwritten at the end, when nothing lacks. Beside the
model this takes, on each worker, once the worker's own shard, and once for the machine two buckets.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.profiles import Profile
from mindspeed_tpi.weights.names import EMBEDDING, HEAD, Names, ignored, tensors

BUCKET = 256 << 20  # bytes
_SHARED = "/dev/shm"
_SHOWN = 8  # tensors that a message names
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Workers = Callable[..., list[Any]]
"""Runs a method of every worker with the given arguments; the answers, one per worker."""


def update_weights(llm: Any, tensors: Iterable[tuple[str, Tensor]], version: int | None = None) -> int:
    """Load a model's weights into a running `vllm.LLM` under parity, in place; whatever fails, the old ones and their version
    stay in force.

    Args:
        llm: no request of it may be running.
        tensors: (name, tensor) pairs under the names of the model's checkpoint, whole, one at a time: `hf_tensors(model)`
            on the trainer's rank 0, or a `Checkpoint`. Values are rounded to the engine's dtype.
        version: of the new weights; tokens sampled from now on carry it. None: one more than the old.

    Returns:
        The version.

    Raises:
        InputError: a tensor that the model does not have, of another shape or dtype, twice, or lacking; or a version that is no newer.
        ParityError: requests are running, there is no room for a bucket, or a worker cannot take a tensor.
    """
    engine = llm.llm_engine
    label = engine.get_weight_version()
    old = 0 if label == "default" else int(label)
    new = old + 1 if version is None else version
    if new <= old:
        raise InputError(f"weight version {new} is no newer than the engine's {old}")
    profile = Profile.from_hf(engine.vllm_config.model_config.hf_text_config.to_dict())

    def workers(method: str, *args: Any) -> list[Any]:
        results: list[Any] = llm.collective_rpc(method, args=args)
        return results

    def forget() -> bool:
        reset: bool = llm.reset_prefix_cache()
        return reset

    stream(tensors, profile, workers, forget)
    engine.set_weight_version(str(new))
    return new


def stream(
    tensors: Iterable[tuple[str, Tensor]], profile: Profile, workers: Workers, forget: Callable[[], bool]
) -> None:
    """`update_weights` for an engine that is reached through `workers`.

    Args:
        forget: empties the engine's prefix cache and says whether it could.
    """
    expected = _Expected(profile)
    try:
        for bucket in _buckets(expected.checked(tensors)):
            _send(bucket, workers)
        expected.require_all()
        if not forget():
            raise ParityError("vLLM could not empty its prefix cache: requests are running; update between generations")
        _ask(workers, "tpi_commit_weights")
    except BaseException:
        workers("tpi_discard_weights")
        raise


def _ask(workers: Workers, method: str, *args: Any) -> None:
    """A worker answers with what went wrong: an exception would reach the driver of a spawned one as mere text."""
    problems = sorted({problem for problem in workers(method, *args) if problem})
    if problems:
        raise ParityError(f"the engine could not take the new weights and keeps the old: {'; '.join(problems)}")


class _Expected:
    """What a model's weights are, and which have come."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._shapes = tensors(profile)
        self._experts = Names.of_family(profile.family).block
        self._lacking = set(self._shapes)
        self._tied: dict[str, str] = {}

    def checked(self, given: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the model has, each looked at before it is handed on."""
        profile = self._profile
        for name, tensor in given:
            if profile.tied and name in (EMBEDDING, HEAD):
                self._tied[name] = _digest(tensor)
                if name == HEAD:
                    continue
            if ignored(name, profile.layers, profile.mtp_layers):
                continue
            shape = self._shapes.get(name)
            if shape is None:
                raise InputError(f"the weight update has {name}, which the model does not have")
            if tuple(tensor.shape) != shape or tensor.dtype not in _DTYPES:
                wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
                raise InputError(
                    f"the weight update's {name} is {tensor.dtype} {list(tensor.shape)}, expected {list(shape)} of {wanted}"
                )
            if name not in self._lacking:
                raise InputError(f"the weight update has {name} twice")
            self._lacking.remove(name)
            yield name, tensor

    def require_all(self) -> None:
        if self._lacking:
            names = [name for name in self._shapes if name in self._lacking]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise InputError(
                f"the weight update lacks {', '.join(names[:_SHOWN])}{more}: they would keep their old values"
            )
        if HEAD in self._tied and self._tied[HEAD] != self._tied[EMBEDDING]:
            raise InputError(f"the weight update's {HEAD} differs from its {EMBEDDING}, but the model ties them")


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().data).hexdigest()


def _buckets(given: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, as many at a time as `BUCKET` bytes (or half of a small /dev/shm) hold, but at least one."""
    room = shutil.disk_usage(_SHARED).free // 2 if os.path.isdir(_SHARED) else BUCKET
    bucket: dict[str, Tensor] = {}
    for name, tensor in given:
        if bucket and _size(bucket) + tensor.nbytes > min(BUCKET, room):
            yield bucket
            bucket = {}
        bucket[name] = tensor.detach().contiguous()
    if bucket:
        yield bucket


def _size(bucket: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in bucket.values())


def _send(bucket: dict[str, Tensor], workers: Workers) -> None:
    """Have every worker take its part of a bucket, through a file that all of them can map."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-tpi-", dir=_exchange_folder(_size(bucket))) as directory:
        path = os.path.join(directory, "weights.safetensors")
        save_file(bucket, path)
        _ask(workers, "tpi_stage_weights", path)


def _exchange_folder(size: int) -> str:
    """A directory with room for `size` bytes and their header: shared memory, which reaches every worker without a copy over
    pipes, else the temporary directory.

    Raises:
        ParityError: neither has it.
    """
    folders = [folder for folder in (_SHARED, tempfile.gettempdir()) if os.path.isdir(folder)]
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    for folder, room in free.items():
        if room > size + (1 << 20):
            return folder
    shown = ", ".join(f"{folder} has {room >> 20} MiB free" for folder, room in free.items())
    raise ParityError(
        f"{size >> 20} MiB of a weight update find no room: {shown}; enlarge /dev/shm (docker run --shm-size), or set TMPDIR"
    )
