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
_FLOATS = {"F32", "F16", "BF16"}  # each of them is exact in float32
_WINDOW_BYTES = 64 * 2**20  # of a mapped file that may be in memory at a time


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
