"""One file that holds what the first run on a device should send back."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops.backends import Backend
from mindspeed_tpi.verify.probe import SMALL, Bench

_VARIABLES = ("ASCEND", "ATB_", "CANN", "CLOSE_MATMUL", "HCCL", "LCCL", "MINDSPEED", "OMP_", "TASK_QUEUE", "VLLM")
_COMMANDS = (("npu-smi", "info"), ("npu-smi", "info", "-t", "board", "-i", "0"), ("lscpu",))
_CANN_FILES = ("version.cfg", "version.info", "compiler/version.info", "runtime/version.info", "opp/version.info")


def write(path: Path, document: dict[str, Any], doctor: dict[str, Any], backend: Backend) -> None:
    """A tar.gz of the record, the diagnosis, versions, settings, and raw answers to what no manual says.

    Args:
        document: the record of `verify.run.verify`. doctor: of `mindspeed-tpi doctor`.
    """
    files = {
        "record.json": _json(document),
        "doctor.json": _json(doctor),
        "packages.json": _json(sorted({f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions()})),
        "environment.json": _json({k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)}),
        "commands.txt": "\n\n".join(_command(*c) for c in _COMMANDS).encode(),
        "cann.txt": _cann().encode(),
        "answers.safetensors": save(answers(backend)),
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"mindspeed-tpi-kit/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def answers(backend: Backend) -> dict[str, Tensor]:
    """Operands and results from which the open questions about the hardware can be settled off line.

    exp, log; 1 / sqrt (in `rms_norm`); products of one leaf at several depths, also with terms of very different size, from which an order of
    additions can be fitted, alone and among other rows and columns; sums of subnormals.
    """
    bench = Bench(backend.module, SMALL)
    found: dict[str, Tensor] = {}

    def ask(name: str, operator: str, *operands: Any) -> None:
        if not hasattr(backend.module, operator):
            return
        try:
            results = bench.run(operator, *operands)
        except (BackendError, RuntimeError):
            return
        tensors = {f"{name}.operand{i}": x for i, x in enumerate(operands) if isinstance(x, Tensor)}
        tensors |= {f"{name}.result{i}": x for i, x in enumerate(results)}
        found.update({k: v.cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()})

    ask("exp", "exp", torch.linspace(-104, 89, 100_000).to(backend.device))
    ask("log", "log", torch.linspace(-103, 88, 100_000).exp().to(backend.device))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        ask(f"rms_norm {kind}", "rms_norm", bench.normal(64, 64, dtype=dtype), bench.normal(64, dtype=dtype), 1e-6)
        for depth in (8, 16, 32, 64, 256, 2048):
            for spread in (0, 12):
                size = 2.0 ** bench.integers(2 * spread + 1, 32, depth).sub(spread)
                x, weight = (
                    (bench.normal(32, depth, dtype=torch.float32) * size).to(dtype),
                    bench.normal(16, depth, dtype=dtype),
                )
                for rows in (1, 16, 32):
                    name = f"linear {kind} depth {depth} spread {spread} rows {rows}"
                    ask(name, "linear", x[:rows], weight, None, depth, 1, torch.float32)
    tiny = torch.full((2, 1, 8), 2.0**-130).to(backend.device)
    ask("subnormals", "tree_sum", tiny, None, torch.float32)
    return found


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def _command(*words: str) -> str:
    said = f"$ {' '.join(words)}\n"
    if shutil.which(words[0]) is None:
        return said + "not installed"
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return said + done.stdout + done.stderr


def _cann() -> str:
    home = os.environ.get("ASCEND_HOME_PATH")
    if not home:
        return "ASCEND_HOME_PATH is not set"
    present = [p for p in (Path(home) / name for name in _CANN_FILES) if p.is_file()]
    return "\n\n".join([home, *(f"{p}\n{p.read_text(encoding='utf-8', errors='replace')}" for p in present)])
