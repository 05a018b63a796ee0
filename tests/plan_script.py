"""Run by test_plan.py: one learner's step, its memory as planned and as measured.

    python plan_script.py MESH REMAT SCAN     such as "fsdp=2,tensor=2" block 1; "" for one device

Prints one JSON object: the plan's bytes for all devices together, and the growth of this
process's resident memory over a step, from when nothing of the learner was in memory.
"""

import ctypes
import gc
import json
import math
import pathlib
import sys

import jax

MESH, REMAT, SCAN = sys.argv[1], sys.argv[2], sys.argv[3] == "1"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", max(math.prod(
    int(part.split("=")[1]) for part in MESH.split(",") if part), 1))

import numpy as np  # noqa: E402

from kr import plan  # noqa: E402
from kr.model import sharding  # noqa: E402
from kr.model import transformer  # noqa: E402
from kr.model.config import Execution, ModelConfig  # noqa: E402
from kr.rl.batch import Batch  # noqa: E402
from kr.rl.learner import Learner  # noqa: E402
from kr.rl.optim import make_optimizer  # noqa: E402

CFG = ModelConfig(vocab=8192, width=512, layers=6, heads=8, kv_heads=4, head_dim=64, mlp=2048)
HOW = Execution(remat=REMAT, scan=SCAN, head_chunk=256)
ROWS, TOKENS = 4, 512


def resident(field: str) -> int:
  """Bytes of this process: VmRSS now, VmHWM at most since `forget`."""
  status = pathlib.Path("/proc/self/status").read_text()
  return int(status.split(field + ":")[1].split()[0]) * 1024


def trim() -> None:
  gc.collect()
  ctypes.CDLL("libc.so.6").malloc_trim(0)


def batch() -> Batch:
  rng = np.random.default_rng(0)
  whole = np.ones((ROWS, TOKENS), np.int32)
  mask = (np.arange(TOKENS) % 2 * whole).astype(np.int32)
  return Batch(
      tokens=rng.integers(1, CFG.vocab, whole.shape, np.int32),
      positions=np.arange(TOKENS, dtype=np.int32) * whole, segment_ids=whole, mask=mask,
      advantages=mask.astype(np.float32), logprobs=np.zeros(whole.shape, np.float32),
      weights=mask.astype(np.float32) / ROWS, versions=mask - 1)


optimizer = make_optimizer(1e-4, 1, 1.0, 0.0)
planned = plan.make(plan.Setting(
    CFG, HOW, MESH, optimizer, None, micro_rows=ROWS, row_tokens=TOKENS, segment_tokens=TOKENS,
    trained_share=0.5, rows=ROWS))
mesh = sharding.make_mesh(MESH) if MESH else None
learner = Learner(CFG, jax.tree.map(np.asarray, transformer.init(CFG)), optimizer, micro_rows=ROWS,
                  mesh=mesh, how=HOW)
learner.update(batch())  # compiles
trim()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
learner.update(batch())
peak = resident("VmHWM")
del learner
trim()
print(json.dumps({"planned": planned.total_bytes * planned.devices, "devices": planned.devices,
                  "measured": peak - resident("VmRSS"), **planned.memory}))
