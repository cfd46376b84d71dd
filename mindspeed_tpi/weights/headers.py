"""What the files of a checkpoint directory hold, read from their headers before any engine starts.

Format of a safetensors file: 8 bytes, the little-endian length n of the header; n bytes of JSON, tensor name → dtype, shape
and the range of its bytes after the header (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindspeed_tpi.errors import InputError
from mindspeed_tpi.profiles import Profile
from mindspeed_tpi.weights.names import EMBEDDING, HEAD, Names, Shapes, ignored, tensors

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = ("F32", "F16", "BF16")
_SHOWN = 3  # tensors of each kind that a message names
_LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
_CHUNK = 1 << 24
_PACKED = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)")
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, or a slice of a tensor of all experts there.

    Attributes:
        file, name: where it is. dtype: the format's word. shape: of this (slice of the) tensor.
        start: byte in the file at which the (whole) tensor starts.
        expert: index into a tensor of all experts. rows: first and last + 1 of its rows, or of that expert's; None: all.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    expert: int | None = None
    rows: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Bytes of a tensor of one of `DTYPES`."""
        return math.prod(self.shape) * (4 if self.dtype == "F32" else 2)

    def first_rows(self, rows: int) -> Stored:
        """The tensor without what follows its first rows."""
        if not self.shape or self.shape[0] <= rows:
            return self
        return replace(self, shape=(rows, *self.shape[1:]), rows=(0, rows))


class Checkpoint:
    """The tensors of a checkpoint: those that its index names, else those of `model.safetensors`. Use it as a context
    manager to read them.

    Attributes:
        directory: where it is. tensors: name → where it is stored.

    Raises:
        InputError: no such directory, no safetensors file, several without an index, a file that is missing, truncated or
            something else, or an index that its files do not agree with.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, Stored] = {}
        self._files = ExitStack()
        self._open: dict[Path, Any] = {}
        index = _index(self.directory)
        names = sorted(set(index.values())) if index else [_single(self.directory)]
        for path in (self.directory / name for name in names):
            for tensor in _header(path):
                if tensor.name in self.tensors:
                    raise self._error(
                        f"{tensor.name} is in {self.tensors[tensor.name].file.name} and in {path.name}; keep one of them"
                    )
                self.tensors[tensor.name] = tensor
        if index:
            for name, found in self.tensors.items():
                if index.get(name) != found.file.name:
                    raise self._error(
                        f"{name} is in {found.file.name}, but {INDEX} {_place(index.get(name))}; write the index anew"
                    )
            lost = sorted(set(index) - set(self.tensors))
            if lost:
                raise self._error(
                    f"{INDEX} {_place(index[lost[0]])} for {lost[0]}, which is not there; download it again"
                )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
        self._open = {}

    def unpacked(self, names: Names) -> dict[str, Stored]:
        """The tensors under a family's names: experts stored as one tensor [experts, out, in] one by one, and the router of a
        Mixtral under its old name."""
        found: dict[str, Stored] = {}
        for name, whole in self.tensors.items():
            packed = _PACKED.fullmatch(name)
            if packed is None or len(whole.shape) != 3:
                found[name] = whole
                continue
            experts, out, width = whole.shape
            for expert in range(experts):
                gate, up, down = (packed[1] + n for n in names.expert(expert))
                if packed[2] == "down_proj":
                    found[down] = replace(whole, shape=(out, width), expert=expert)
                else:
                    for half, part in enumerate((gate, up)):
                        rows = (half * (out // 2), (half + 1) * (out // 2))
                        found[part] = replace(whole, shape=(out // 2, width), expert=expert, rows=rows)
        if names.block != "mlp":
            found = {re.sub(r"\.mlp\.gate\.weight$", f".{names.block}.gate.weight", n): s for n, s in found.items()}
        return found

    def require(self, found: Mapping[str, Stored], expected: Shapes, layers: int, mtp_layers: int) -> None:
        """Refuse tensors other than those expected.

        Args:
            found: from `unpacked`. expected: name → shape. layers, mtp_layers: see `names.ignored`.

        Raises:
            InputError: names the first tensors that are missing, unexpected, or of another shape or dtype, with what was found
                and what was expected; or an output projection that is tied, but differs from the embedding.
        """
        tied = HEAD not in expected
        missing = [f"{n} {list(shape)}" for n, shape in expected.items() if n not in found]
        unexpected = [
            f"{n} {list(s.shape)}"
            for n, s in sorted(found.items())
            if n not in expected and not ignored(n, layers, mtp_layers) and not (tied and n == HEAD)
        ]
        shapes = [
            f"{n} is {list(found[n].shape)}, expected {list(shape)}"
            for n, shape in expected.items()
            if n in found and found[n].shape != shape
        ]
        dtypes = [
            f"{n} is {found[n].dtype}, expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
            for n in expected
            if n in found and found[n].dtype not in DTYPES
        ]
        problems = [
            f"{what}{', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            for what, names in (("lacks ", missing), ("has unexpected ", unexpected), ("", shapes), ("", dtypes))
            if names
        ]
        if problems:
            hint = "it does not fit its configuration"
            if HEAD not in found and not tied:
                hint += " (tie_word_embeddings is false there)"
            raise self._error(f"{'; '.join(problems)}; {hint}")
        if tied and HEAD in found and not _equal(found[HEAD], found[EMBEDDING]):
            raise self._error(
                f"{HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true in its config.json: set it to false, or "
                f"remove {HEAD}"
            )

    def read(self, stored: Stored) -> Tensor:
        """A tensor, memory-mapped where the file allows.

        Raises:
            InputError: its file cannot be read.
        """
        file = self._handle(stored.file)
        if stored.expert is None and stored.rows is None:
            return file.get_tensor(stored.name)  # type: ignore[no-any-return]
        rows = slice(*stored.rows) if stored.rows else slice(None)
        if stored.expert is None:
            return file.get_slice(stored.name)[rows]  # type: ignore[no-any-return]
        return file.get_slice(stored.name)[stored.expert : stored.expert + 1, rows][0]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of everything stored, in the order of the files."""
        with self:
            for name, stored in self.tensors.items():
                yield name, self.read(stored)

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._files.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise InputError(f"cannot read {path}: {error}") from None
        return self._open[path]

    def _error(self, what: str) -> InputError:
        return InputError(f"checkpoint {self.directory}: {what}")


def check(checkpoint: str | Path, profile: Profile) -> None:
    """Refuse a checkpoint that does not hold what a model needs, from the headers of its files (a tied model that stores an
    output projection also: those two tensors).

    Raises:
        InputError: one line that names the file or tensor, what was found and what was expected.
    """
    files = Checkpoint(checkpoint)
    found = files.unpacked(Names.of_family(profile.family))
    for name in (EMBEDDING, HEAD):
        if name in found and found[name].shape[1:] == (profile.hidden,) and found[name].shape[0] > profile.vocab:
            rows = found[name].shape[0]
            raise files._error(
                f"{name} is {list(found[name].shape)}, expected {[profile.vocab, profile.hidden]}: vLLM takes no padding rows; "
                f"set vocab_size to {rows} in its config.json, or cut the tensor"
            )
    files.require(found, tensors(profile), profile.layers, profile.mtp_layers)


def unpacked(checkpoint: str | Path, profile: Profile) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything stored, under the family's names: experts that are stored as one tensor come one by one.

    Raises:
        InputError: as `Checkpoint`.
    """
    with Checkpoint(checkpoint) as files:
        for name, stored in files.unpacked(Names.of_family(profile.family)).items():
            yield name, files.read(stored)


def identity(checkpoint: str | Path) -> str:
    """SHA-256 that tells checkpoints apart without reading them whole: configuration, names and sizes of the files, and
    64 samples of each.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted([Path(checkpoint) / "config.json", *Path(checkpoint).glob("*.safetensors")]):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for sample in range(64):
                    file.seek(size * sample // 64)
                    digest.update(file.read(4096))
    except OSError as error:
        raise InputError(f"cannot read the checkpoint {checkpoint}: {error}") from None
    return digest.hexdigest()


def _index(directory: Path) -> dict[str, str] | None:
    """Tensor name → file name, of the index; None: there is none."""
    path = directory / INDEX
    if not path.exists():
        return None
    try:
        content = path.read_bytes()
        if content.startswith(_LFS):
            raise _pointer(path)
        index = json.loads(content)["weight_map"]
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read {path}: {error!r}; expected a JSON object with a weight_map") from None
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise InputError(f"{path}: weight_map must map tensor names to file names")
    outside = [name for name in index.values() if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise InputError(
            f"{path} names {outside[0]!r}, which is no safetensors file of its directory; write the index anew"
        )
    return index


def _single(directory: Path) -> str:
    """The only safetensors file of a directory without an index."""
    if not directory.is_dir():
        raise InputError(f"checkpoint {directory} is no directory; give a local Hugging Face directory")
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if names == [SINGLE]:
        return SINGLE
    if SINGLE in names:
        others = ", ".join(name for name in names if name != SINGLE)
        raise InputError(
            f"checkpoint {directory} has {others} beside {SINGLE} and no {INDEX} that says which counts; move {others} away"
        )
    if names:
        raise InputError(
            f"checkpoint {directory} has {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''} but neither {INDEX} "
            f"nor {SINGLE}; download the index, or rename the only file"
        )
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickles:
        raise InputError(
            f"checkpoint {directory} has {pickles[0]} but no safetensors file; convert it, for example with "
            "transformers: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    raise InputError(f"checkpoint {directory} has no safetensors file; expected {SINGLE}, or shards with {INDEX}")


def _header(path: Path) -> list[Stored]:
    """The tensors of a safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if (start + file.read(len(_LFS) - 8)).startswith(_LFS):
                raise _pointer(path)
            if len(start) < 8 or length > _LONGEST_HEADER:
                raise InputError(
                    f"{path} is no safetensors file ({size} bytes, begins with {start!r}); download it again"
                )
            if 8 + length > size:
                raise _truncated(path, size, 8 + length)
            file.seek(8)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = [
            Stored(
                path, name, str(entry["dtype"]), tuple(map(int, entry["shape"])), 8 + length + entry["data_offsets"][0]
            )
            for name, entry in header.items()
        ]
        wrong = [
            tensor.name
            for tensor, (first, last) in zip(found, (entry["data_offsets"] for entry in header.values()), strict=True)
            if tensor.dtype in DTYPES and last - first != tensor.size
        ]
        if wrong:
            raise ValueError(f"{wrong[0]} has another number of bytes than its shape")
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        raise InputError(f"{path} is missing, and {INDEX} names it; download it again") from None
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"{path} is no safetensors file: its header cannot be read ({error!r}); download it again"
        ) from None
    if end > size:
        raise _truncated(path, size, end)
    return found


def _equal(a: Stored, b: Stored) -> bool:
    """Whether two stored tensors hold the same bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb") as one, b.file.open("rb") as other:
        one.seek(a.start)
        other.seek(b.start)
        return all(_chunk(one, a.size, done) == _chunk(other, a.size, done) for done in range(0, a.size, _CHUNK))


def _chunk(file: BinaryIO, total: int, done: int) -> bytes:
    return file.read(min(_CHUNK, total - done))


def _place(file: str | None) -> str:
    return f"names {file}" if file else "does not name it"


def _pointer(path: Path) -> InputError:
    return InputError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its directory")


def _truncated(path: Path, size: int, expected: int) -> InputError:
    return InputError(f"{path} is truncated: {size} bytes, its header asks for {expected}; download it again")
