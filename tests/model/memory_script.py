"""Prints the peak of resident memory, beyond what jax takes, that importing and exporting a
model takes, as multiples of the model's size. Run by test_hf.py: a peak is a process's own."""

import json
import pathlib
import sys

import jax

from kr.model import hf, transformer
from kr.model.config import ModelConfig

CFG = ModelConfig(vocab=16384, width=512, layers=20, heads=8, kv_heads=4, head_dim=64, mlp=2048,
                  family="qwen3")


def peak_bytes() -> int:
  # Not getrusage: what it says of a child begins with its parent's size.
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(what: str, directory: pathlib.Path) -> None:
  if what == "make":
    hf.export(transformer.init(CFG), CFG, directory / "tokenizer", directory / "model")
    return
  hf.load(directory / "small")  # whatever the first use of jax takes
  before = peak_bytes()
  params, _ = hf.load(directory / "model")
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  imported = peak_bytes()
  hf.export(params, CFG, directory / "tokenizer", directory / "out", "bfloat16")
  print(json.dumps({"model_bytes": size, "import": (imported - before) / size,
                    "import_and_export": (peak_bytes() - before) / size}))


main(sys.argv[1], pathlib.Path(sys.argv[2]))
