"""Run by test_learner.py: the same update on one device and on meshes; prints how they differ.

    python mesh_script.py            all cases, on 8 virtual devices of this process
    python mesh_script.py 0 PORT     process 0 or 1 of two with 4 virtual devices each

One JSON object a line: the case, the largest difference in the loss, in the gradients (relative
to the largest one) and in the updated parameters, and whether all arrays lie as declared.
"""

import dataclasses
import json
import os
import sys

DISTRIBUTED = len(sys.argv) > 1
os.environ["XLA_FLAGS"] = (
  f"--xla_force_host_platform_device_count={4 if DISTRIBUTED else 8} "
  "--xla_backend_optimization_level=0")  # compiles faster; the partitioner works as ever
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

if DISTRIBUTED:
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))

import numpy as np  # noqa: E402

from kr import types  # noqa: E402
from kr.model import sharding  # noqa: E402
from kr.model import transformer  # noqa: E402
from kr.model.config import Execution, MlaConfig, ModelConfig, MoeConfig  # noqa: E402
from kr.model.lora import Lora  # noqa: E402
from kr.rl import batch as batch_lib  # noqa: E402
from kr.rl.learner import Learner  # noqa: E402
from kr.rl.optim import make_optimizer  # noqa: E402

DENSE = ModelConfig(vocab=32, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=32)
EXPERTS = dataclasses.replace(
  DENSE, layers=1, kv_heads=4, tied=False, mla=MlaConfig(8, 8, 4, 4, 4),
  moe=MoeConfig(experts=8, active=2, mlp=8, layers=(0,), score="sigmoid", groups=2,
                active_groups=1, shared=1))
UNEVEN = dataclasses.replace(  # an expert axis of 4 does not divide the experts
  EXPERTS, moe=MoeConfig(experts=6, active=2, mlp=8, layers=(0,)))
SCAN = Execution(scan=True)  # the reference is unrolled and recomputes nothing
ALONE = ("data=8", "fsdp=8", "context=8", "tensor=8", "expert=8")
MIXED = ("tensor=2,fsdp=4", "data=2,expert=2,context=2", "expert=2,fsdp=2,tensor=2")
OPTIMIZERS = {kind: make_optimizer(1e-2, 0, 1e9, 0.01, kind=kind) for kind in ("adamw", "muon")}


def trajectory(i):
  """A prompt, a turn of 1 to 6 tokens, an observation, a turn of 2."""
  t, s = types.Trajectory(str(i), types.Task(str(i), "q", "a", "k")), types.Segment()
  s.append_context([i % 9, 2, 5])
  for ids in ([3, i % 7] * (1 + i % 3), [5, 1]):
    start = len(s)
    s.append_sampled(ids, [-1.0] * len(ids), 0)
    t.turns.append(types.Turn(0, start, len(s), 0))
    s.append_context([10])
  t.segments.append(s)
  return t


BATCH = batch_lib.pack(
  [(trajectory(i), [1.0, float(i) - 3], True) for i in range(20)], 16, 8)  # two micro-batches
_ROWS, _PLACES = np.indices(BATCH.tokens.shape)
MIXED_VERSIONS = dataclasses.replace(  # rows of policies 0 and 1, ratios on both sides of 1
  BATCH, versions=np.where(BATCH.mask == 1, _ROWS % 2, -1).astype(np.int32),
  logprobs=np.where(BATCH.mask == 1, -1.0 - 5.0 * (_PLACES % 2), 0.0).astype(np.float32))


def learner(cfg, mesh=None, how=transformer.PLAIN, kind="adamw", **options):
  mesh = sharding.make_mesh(mesh) if mesh else None
  return Learner(cfg, transformer.init(cfg, 1), OPTIMIZERS[kind], micro_rows=8, mesh=mesh, how=how,
                 **options)


def moments(learner):
  """What Adam keeps of the gradient: a tenth of it, after one step without clipping."""
  return [x for path, x in jax.tree_util.tree_leaves_with_path(learner.opt_state)
          if ".mu" in jax.tree_util.keystr(path)]


def distance(got, expected):
  """The largest difference, over what this process holds of each array."""
  return max(float(np.abs(np.asarray(shard.data) - np.asarray(b)[shard.index]).max())
             for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
             for shard in a.addressable_shards)


def compare(name, mesh, got, loss, expected, expected_loss):
  scale = max(float(np.abs(np.asarray(m)).max()) for m in moments(expected))
  as_placed = jax.tree.map(lambda a: a.sharding, (got.params, moments(got))) == got.placed
  print(json.dumps({
    "case": f"{name} {mesh}", "loss": abs(loss - expected_loss) / abs(expected_loss),
    "gradients": distance(moments(got), moments(expected)) / scale,
    "params": distance(got.params, expected.params), "as_declared": as_placed}), flush=True)


def check(name, cfg, meshes, **options):
  """One step on each mesh; -> the learners on them, and the one on one device."""
  how = options.pop("how", transformer.PLAIN)
  step = MIXED_VERSIONS, 1 if "off_policy" in options else None
  expected = learner(cfg, **options)
  expected_loss = expected.update(*step)["loss"]
  out = []
  for mesh in meshes:
    got = learner(cfg, mesh, how, **options)
    got.placed = jax.tree.map(lambda a: a.sharding, (got.params, moments(got)))
    loss = got.update(*step)["loss"]
    compare(name, mesh, got, loss, expected, expected_loss)
    out.append(got)
  return out, expected


def main():
  if DISTRIBUTED:
    check("experts", EXPERTS, ["data=2,expert=2,tensor=2"])
    return
  alone, one = check("dense", DENSE, ALONE)
  (b,), _ = check("dense", DENSE, MIXED[:1], how=SCAN)
  a = alone[1]  # fsdp=8 -> tensor=2,fsdp=4: what a restored checkpoint does
  b.load(*jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding),
                       a.state(), b.state()))
  compare("dense restored", MIXED[0], b, b.update(BATCH)["loss"], one, one.update(BATCH)["loss"])
  check("experts", EXPERTS, ALONE + MIXED[1:])
  check("uneven", UNEVEN, ["data=2,expert=4"])
  check("adapters", DENSE, MIXED[:1], lora=Lora(2, 4.0, ("wq", "wo", "down")))
  check("tis", DENSE, MIXED[1:2], off_policy="tis")  # context: turns on two devices
  check("topr", DENSE, MIXED[1:2], off_policy="topr")
  check("mask", DENSE, MIXED[1:2], off_policy="mask")
  check("muon", DENSE, MIXED[:1], kind="muon")


if __name__ == "__main__":
  main()
