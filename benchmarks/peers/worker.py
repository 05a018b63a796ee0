"""What a learner under measurement says and is told; the same in every environment.

A worker is started with the path of a JSON description, and gets one line on its standard
input for each update: the name of the precision. It answers each with a JSON line:
{"loss", "seconds"}. The first line, before any, is its versions.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Callable

import numpy as np


def describe() -> dict[str, Any]:
  """The description: model (a directory), data (npz), pad_to, micro_rows, and so on."""
  with open(sys.argv[1]) as file:
    return json.load(file)


def sequences(path: str) -> list[tuple[np.ndarray, np.ndarray]]:
  """[(tokens, coefficient)], each [length]: the loss is −Σ coefficient · log p(token)."""
  data = np.load(path)
  cuts = np.cumsum(data["lengths"])[:-1]
  return list(zip(np.split(data["tokens"], cuts), np.split(data["coefficients"], cuts)))


def padded(path: str, micro_rows: int, pad_to: int) -> list[tuple[np.ndarray, ...]]:
  """Micro-batches of `micro_rows` sequences in their order, padded on the right to the longest
  of each, or to `pad_to` if that is not 0: [(tokens, coefficients, real)], each [B,T]."""
  out = []
  given = sequences(path)
  for start in range(0, len(given), micro_rows):
    part = given[start:start + micro_rows]
    width = pad_to or max(len(tokens) for tokens, _ in part)
    tokens = np.zeros((len(part), width), np.int32)
    coefficients, real = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, bool)
    for i, (t, c) in enumerate(part):
      tokens[i, :len(t)], coefficients[i, :len(t)], real[i, :len(t)] = t, c, True
    out.append((tokens, coefficients, real))
  return out


def answer(versions: dict[str, str], update: Callable[[str], tuple[float, float]]) -> None:
  """Serves until the standard input ends; update(precision) -> (loss, seconds)."""
  out = os.fdopen(os.dup(1), "w")  # what libraries print goes elsewhere
  os.dup2(2, 1)
  print(json.dumps(versions), file=out, flush=True)
  for line in sys.stdin:
    loss, seconds = update(line.strip())
    print(json.dumps({"loss": loss, "seconds": seconds}), file=out, flush=True)
