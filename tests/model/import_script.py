"""Imports a model onto meshes of 8 virtual devices and exports it again. Run by test_hf.py.

    python import_script.py DIRECTORY            one process
    python import_script.py DIRECTORY 0 PORT     process 0 or 1 of two with 4 devices each

DIRECTORY holds model/ and tokenizer/. One JSON object a line: the mesh, whether every piece and
the exported file have the bits of the source, and what share of the weights was read.
"""

import json
import os
import pathlib
import sys

TWO = len(sys.argv) > 2
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 if TWO else 8}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

if TWO:
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"localhost:{sys.argv[3]}", 2, int(sys.argv[2]))

import numpy as np  # noqa: E402

from kr.model import hf, sharding, shards  # noqa: E402


def main(directory: pathlib.Path) -> None:
  whole, cfg = hf.load(directory / "model")
  total = sum(x.size for x in jax.tree.leaves(whole))
  read = shards.Reader.read
  for axes in ("fsdp=8",) if TWO else ("fsdp=2,tensor=2,expert=2", "tensor=4,data=2"):
    count = 0

    def counted(self, name, index):
      nonlocal count
      out = read(self, name, index)
      count += out.size
      return out

    shards.Reader.read = counted
    params, _ = hf.load(directory / "model", sharding.make_mesh(axes))
    shards.Reader.read = read
    same = all(np.array_equal(s.data, np.asarray(full)[s.index])
               for x, full in zip(jax.tree.leaves(params), jax.tree.leaves(whole))
               for s in x.addressable_shards)
    hf.export(params, cfg, directory / "tokenizer", directory / "out")
    files = [(directory / d / "model.safetensors").read_bytes() for d in ("model", "out")]
    print(json.dumps({"mesh": axes, "same": same, "exported": files[0] == files[1],
                      "read": count / total}), flush=True)


main(pathlib.Path(sys.argv[1]))
