"""Reads GGUF files, llama.cpp's format: fields, and tensors that are dequantised as they are read.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Nothing in a file is executed, and every size in it
is checked against the file's length. gguf's own reader makes two arrays per string, which takes 690 MB for a
vocabulary of 262,144 tokens. The quantised types are gguf's.
"""

import contextlib
import dataclasses
import math
import mmap
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_STRING, _ARRAY = 8, 9
_LEAST = {_STRING: 8, _ARRAY: 12}  # bytes
_MAX_AXES = 4


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a GGUF file; slicing its rows reads them as float32: ``tensor[2:5]``."""

    file: Path
    name: str
    offset: int
    kind: Any  # a gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    row_bytes: int

    @property
    def dtype(self) -> np.dtype:
        """float32, or an integer dtype, which weights cannot have."""
        return np.dtype(np.int32 if self.kind.name in ("I8", "I16", "I32", "I64") else np.float32)

    def __getitem__(self, rows: slice) -> np.ndarray:
        if len(self.shape) == 1:
            return self._numbers(0, 1)[0, rows]
        start, stop, _ = rows.indices(self.shape[0])
        between = math.prod(self.shape[1:-1])  # for tensors with more than two axes
        return self._numbers(start * between, stop * between).reshape(stop - start, *self.shape[1:])

    def _numbers(self, start: int, stop: int) -> np.ndarray:
        from gguf import dequantize

        stored = self._read(start, stop)
        if self.kind.name == "F64":
            return stored.view("<f8").astype(np.float32)
        try:
            return np.asarray(dequantize(stored, self.kind), np.float32)
        except NotImplementedError:
            raise ValueError(f"{self.file}: {self.name} is {self.kind.name}, which gguf cannot dequantise") from None

    def _read(self, start: int, stop: int) -> np.ndarray:
        """The bytes of rows. The file is not mapped, because its pages would count as this process's memory."""
        offset, count = self.offset + start * self.row_bytes, (stop - start) * self.row_bytes
        return np.fromfile(self.file, np.uint8, count, offset=offset).reshape(stop - start, self.row_bytes)


def read_file(file: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The fields whose names are ``wanted``, and the tensors.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: gguf is not installed.
        ValueError: the file is damaged, has an unsupported byte order or version, or is not a GGUF file.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as missing:
        raise ImportError("reading a GGUF file needs the package gguf: pip install 'jattn[gguf]'") from missing
    if not file.is_file():
        raise FileNotFoundError(f"no file {str(file)!r}")
    with damaged(file), file.open("rb") as opened, contextlib.ExitStack() as stack:
        if file.stat().st_size < 24:
            raise ValueError(f"it has only {file.stat().st_size} bytes")
        header = _Header(stack.enter_context(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)))
        num_tensors, num_fields = header.start()
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name, kind = header.text(), header.number("u4")
            value = header.value(kind, keep=wanted(name) or name == "general.alignment")
            if name in fields:
                raise ValueError(f"it has the field {name} twice")
            fields[name] = value
        found = [header.tensor() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}, not a positive number")
        start, size = -(-header.at // alignment) * alignment, len(header.data)
        tensors: dict[str, StoredTensor] = {}
        for name, shape, number, offset in found:
            kind = GGMLQuantizationType(number)
            elements, bytes_of_them = GGML_QUANT_SIZES[kind]
            if shape[-1] % elements:
                raise ValueError(
                    f"{name} has rows of {shape[-1]} numbers, but {kind.name} needs a multiple of {elements}"
                )
            row_bytes = shape[-1] // elements * bytes_of_them
            if start + offset + math.prod(shape[:-1]) * row_bytes > size:
                raise ValueError(f"{name} of shape {list(shape)} ends beyond the file's {size} bytes")
            if name in tensors:
                raise ValueError(f"it has the tensor {name} twice")
            tensors[name] = StoredTensor(file, name, start + offset, kind, shape, row_bytes)
    return {name: x for name, x in fields.items() if wanted(name)}, tensors


@contextlib.contextmanager
def damaged(file: Path, problem: str = "is damaged or not a GGUF file") -> Iterator[None]:
    """Adds the name of the file and the problem to errors caused by a damaged file."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, NotImplementedError, RecursionError) as error:
        raise ValueError(f"{file} {problem}: {error}") from error


class _Header:
    """Reads everything before the tensors, from beginning to end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def start(self) -> tuple[int, int]:
        """The numbers of tensors and fields."""
        magic, version = bytes(self.data[:4]), self.data[4:8]
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r}, not with b'GGUF'")
        if struct.unpack(">I", version)[0] in (2, 3):
            raise ValueError("it is big-endian, but only little-endian files can be read")
        if struct.unpack("<I", version)[0] not in (2, 3):
            raise ValueError(f"it has version {struct.unpack('<I', version)[0]}; only versions 2 and 3 can be read")
        self.at = 8
        return self.number("u8"), self.number("u8")

    def take(self, size: int) -> int:
        """The start of the next ``size`` bytes."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise ValueError(f"{size} bytes starting at byte {start} end beyond the file's {len(self.data)} bytes")
        return start

    def numbers(self, code: str, count: int) -> list[Any]:
        """``count`` numbers of a NumPy type."""
        dtype = np.dtype(f"<{code}")
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(self.data[start : self.at], dtype).tolist()

    def number(self, code: str) -> Any:
        """One number of a NumPy type."""
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        """A UTF-8 string."""
        (size,) = _SIZE.unpack_from(self.data, self.take(8))
        start = self.take(size)
        return self.data[start : self.at].decode()

    def value(self, kind: int, keep: bool) -> Any:
        """A field's value, or None if it is skipped."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING and keep:
            return self.text()
        if kind == _STRING:
            self.take(*_SIZE.unpack_from(self.data, self.take(8)))
            return None
        if kind != _ARRAY:
            raise ValueError(f"a field's type is {kind}, which is not known")
        item, count = self.number("u4"), self.number("u8")
        if item in _NUMBERS and keep:
            return self.numbers(_NUMBERS[item], count)
        if item in _NUMBERS:
            self.take(count * np.dtype(_NUMBERS[item]).itemsize)
            return None
        if item not in _LEAST:
            raise ValueError(f"the type of an array's items is {item}, which is not known")
        if self.at + count * _LEAST[item] > len(self.data):
            raise ValueError(f"an array of {count} items ends beyond the file's {len(self.data)} bytes")
        if keep:
            return [self.value(item, keep) for _ in range(count)]
        for _ in range(count):
            self.value(item, keep)
        return None

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape and type, and where its data begin."""
        name, axes = self.text(), self.number("u4")
        if not 1 <= axes <= _MAX_AXES:
            raise ValueError(f"{name} has {axes} axes, expected 1 to {_MAX_AXES}")
        shape = tuple(reversed(self.numbers("u8", axes)))
        return name, shape, self.number("u4"), self.number("u8")


_SIZE = struct.Struct("<Q")
