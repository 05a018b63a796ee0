"""Safetensors files, read and written tensor by tensor: a model need not fit in memory twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import json
import os
import pathlib
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

INDEX = "model.safetensors.index.json"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
MAX_SHARD_BYTES = 5 * 10**9  # what Hugging Face's own files keep to
_CODES = {"float32": "F32", "bfloat16": "BF16"}
# Each of them is exact in float32.
_FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": DTYPES["bfloat16"]}


class HfError(ValueError):
  """A directory that kr cannot read or write as a model; the text says why."""


class Spec(NamedTuple):
  """A tensor that is to be written."""
  name: str
  shape: tuple[int, ...]


# -------------------------------------------------------------------- writing


def write(directory: pathlib.Path, specs: Iterable[Spec], tensor: Callable[[str], np.ndarray],
          dtype: str = "float32", max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
  """Writes model.safetensors, or shards of at most max_shard_bytes with an index.

  tensor(name) gives one tensor at a time, in the order of specs; it is cast to dtype,
  float32 or bfloat16 (rounded to nearest).
  """
  itemsize = DTYPES[dtype].itemsize
  groups: list[list[Spec]] = [[]]
  filled = 0
  for spec in specs:
    size = itemsize * int(np.prod(spec.shape, dtype=np.int64))
    if groups[-1] and filled + size > max_shard_bytes:
      groups.append([])
      filled = 0
    groups[-1].append(spec)
    filled += size
  names = (["model.safetensors"] if len(groups) == 1 else
           [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))])
  total = 0
  for name, group in zip(names, groups):
    total += _write_file(directory / name, group, tensor, dtype)
  if len(groups) > 1:
    where = {spec.name: name for name, group in zip(names, groups) for spec in group}
    (directory / INDEX).write_text(json.dumps(
        {"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")


def _write_file(path: pathlib.Path, specs: list[Spec], tensor: Callable[[str], np.ndarray],
                dtype: str) -> int:
  """Writes one file; -> bytes of its tensors. The format: safetensors' README."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # the loaders of others insist
  offset = 0
  for name, shape in specs:
    end = offset + DTYPES[dtype].itemsize * int(np.prod(shape, dtype=np.int64))
    header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
    offset = end
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # so that the data is aligned
  with open(path, "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for name, shape in specs:
      x = np.ascontiguousarray(np.asarray(tensor(name)).astype(DTYPES[dtype], copy=False))
      if x.shape != shape:
        raise ValueError(f"tensor {name} has shape {x.shape}, planned was {shape}")
      f.write(x.reshape(-1).view(np.uint8).data)
    f.flush()
    os.fsync(f.fileno())
  return offset


# -------------------------------------------------------------------- reading


class Reader:
  """The tensors of a directory. Their bytes are read when asked for, and not kept.

  Raises HfError for missing or damaged files.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    self._where: dict[str, tuple[pathlib.Path, int, str, tuple[int, ...]]] = {}
    try:
      for path in _files(pathlib.Path(directory)):
        self._add(path)
    except FileNotFoundError as e:
      raise HfError(f"{directory} has no weights as safetensors: {e}") from e
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError,
            struct.error) as e:
      raise e if isinstance(e, HfError) else HfError(
          f"the weights in {directory} are damaged: {e}") from e

  def _add(self, path: pathlib.Path) -> None:
    if path.is_dir():
      raise HfError(f"{path} is a directory, not a file of weights")
    with safetensors.safe_open(path, "np"):  # checks the header, and that all bytes are there
      pass
    with open(path, "rb") as f:
      size, = struct.unpack("<Q", f.read(8))
      header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    for name, t in header.items():
      if name in self._where:
        raise HfError(f"tensor {name} is in {self._where[name][0].name} and in {path.name}")
      self._where[name] = path, 8 + size + t["data_offsets"][0], t["dtype"], tuple(t["shape"])

  def names(self) -> set[str]:
    """The names of all tensors."""
    return set(self._where)

  def check(self, name: str, shape: tuple[int, ...]) -> None:
    """Refuses, by name, a tensor that is missing, of another shape, or no float."""
    if name not in self._where:
      raise HfError(f"tensor {name} is missing")
    path, _, kind, found = self._where[name]
    if kind not in _FLOATS:
      raise HfError(f"{path}: {name} is of type {kind}; supported: {', '.join(sorted(_FLOATS))}")
    if found != shape:
      raise HfError(f"tensor {name} has shape {list(found)}, config.json means {list(shape)}")

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A piece of a tensor, as it is stored: a view of the file, mapped for as long as it lives."""
    path, offset, kind, shape = self._where[name]
    return np.memmap(path, _FLOATS[kind], "r", offset, shape)[index]


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
  """The safetensors files: one, or the shards that the index lists."""
  if not (directory / INDEX).is_file():
    return [directory / "model.safetensors"]
  names = json.loads((directory / INDEX).read_text())["weight_map"].values()
  if other := [n for n in names if not n or pathlib.PurePath(n).name != n]:
    raise HfError(f"{directory / INDEX} names {other[0]!r}, which is not a file beside it")
  return [directory / name for name in sorted(set(names))]
