"""Files of weights in other tools' formats: torch, safetensors, Hugging Face's folders, distributed checkpoints.

Parts of tensors are read where they lie in the files, so that a rank reads its shards and nothing is held twice.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from clusterd.train.checkpoint import dcp_files
from clusterd.train.parallel import build
from clusterd.train.process.exits import Refused, first_line
from clusterd.train.state.copying import narrow_to_box
from clusterd.train.state.local_shards import Box

Part = tuple[Box, torch.Tensor]
"""Box of a part of a tensor, and the tensor to read it into."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of types in safetensors files."""

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FILES = ("model.safetensors", "pytorch_model.bin")
"""Files of a Hugging Face folder: indices of several files, and single ones."""

WRAPPED = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which training scripts save a model beside other things."""


class Weights(Protocol):
    """Tensors by name, in files."""

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor."""

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fill parts of tensors, by name."""


def open_weights(place: str) -> Weights:
    """Open a file or folder of weights.

    Raises:
        Refused: there is none, or it has another format.
    """
    path = Path(place).expanduser()
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.is_file():
            raise Refused(f"init_from is {place!r}: there is no such file or folder in {Path.cwd()}")
        return _open_file(path)
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise Refused(f"init_from is {place!r}, which cannot be read: {first_line(error)}") from error


def _open_folder(folder: Path) -> Weights:
    if (folder / ".metadata").is_file():
        return _Checkpoint(str(folder))
    for name in INDICES:
        if (folder / name).is_file():
            files = sorted(set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()))
            return _Several([_open_file(folder / file) for file in files])
    for name in FILES:
        if (folder / name).is_file():
            return _open_file(folder / name)
    raise Refused(f"init_from is {str(folder)!r}, which has none of .metadata, {', '.join((*FILES, *INDICES))}")


def _open_file(file: Path) -> Weights:
    return _Safetensors(file) if file.suffix == ".safetensors" else _TorchFile(file)


class _Checkpoint:
    """Model of a distributed checkpoint, which is the whole content or has ``model.`` before each name."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        metadata = dcp_files.metadata(directory).state_dict_metadata
        tensors = {k: tuple(v.size) for k, v in metadata.items() if isinstance(v, TensorStorageMetadata)}
        self._prefix = "model." if any(key.startswith("model.") for key in tensors) else ""
        self.sizes = {k[len(self._prefix) :]: size for k, size in tensors.items() if k.startswith(self._prefix)}

    def read(self, parts: Mapping[str, Part]) -> None:
        wanted = {f"{self._prefix}{name}": (self.sizes[name], *part) for name, part in parts.items()}
        dcp_files.read(self._directory, wanted, {})


class _Safetensors:
    """A safetensors file: the length of a header (8 bytes), the header in JSON, and the bytes of all tensors."""

    def __init__(self, file: Path) -> None:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > os.path.getsize(file):
                raise ValueError(f"{file.name} is no safetensors file")
            self._header: dict[str, Any] = json.loads(opened.read(length))
        self._file, self._start = file, 8 + length
        self._header.pop("__metadata__", None)
        self.sizes = {name: tuple(entry["shape"]) for name, entry in self._header.items()}
        if unknown := {entry["dtype"] for entry in self._header.values()} - {*DTYPES}:
            raise ValueError(f"{file.name} has tensors of type {min(unknown)}")

    def read(self, parts: Mapping[str, Part]) -> None:
        mapped = torch.from_file(str(self._file), size=os.path.getsize(self._file), dtype=torch.uint8)
        for name, (box, into) in parts.items():
            begin, end = (self._start + offset for offset in self._header[name]["data_offsets"])
            dtype = DTYPES[self._header[name]["dtype"]]
            data = mapped[begin:end] if begin % dtype.itemsize == 0 else mapped[begin:end].clone()
            _copy(data.view(dtype).reshape(self.sizes[name]), box, into)


class _TorchFile:
    """A state dict that torch.save wrote, alone or as a part of a dict; mapped, where the file allows it."""

    def __init__(self, file: Path) -> None:
        options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
        try:
            content = torch.load(file, mmap=True, **options)
        except RuntimeError:  # not a zip file, as of torch before 1.6
            content = torch.load(file, **options)
        if isinstance(content, Mapping):
            content = next((content[key] for key in WRAPPED if isinstance(content.get(key), Mapping)), content)
        if not isinstance(content, Mapping):
            raise ValueError(f"it holds a {type(content).__name__}, not a state_dict")
        self._tensors = {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}
        self.sizes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, parts: Mapping[str, Part]) -> None:
        for name, (box, into) in parts.items():
            _copy(self._tensors[name], box, into)


class _Several:
    """Weights in several files."""

    def __init__(self, files: Iterable[Weights]) -> None:
        self._file_of = {name: file for file in files for name in file.sizes}
        self.sizes = {name: file.sizes[name] for name, file in self._file_of.items()}

    def read(self, parts: Mapping[str, Part]) -> None:
        for file in {id(file): file for file in self._file_of.values()}.values():
            file.read({name: part for name, part in parts.items() if self._file_of[name] is file})


def _copy(whole: torch.Tensor, box: Box, into: torch.Tensor) -> None:
    into.copy_(narrow_to_box(whole, [low for low, _ in box], [high for _, high in box], [0] * len(box)))


def global_names(weights: Weights) -> dict[str, str]:
    """Names in the files by global name: without the prefixes of DistributedDataParallel and torch.compile."""
    names = {build.global_name(name): name for name in weights.sizes}
    if names and all(name.startswith("module.") for name in names):
        names = {name.removeprefix("module."): there for name, there in names.items()}
    return names


def write_safetensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors in host memory to a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names_of = {dtype: name for name, dtype in DTYPES.items()}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in names_of:
            raise ValueError(f"{name} is of type {tensor.dtype}, which a safetensors file cannot hold")
        entry = {"dtype": names_of[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    assert sys.byteorder == "little"
    with open(file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            opened.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
