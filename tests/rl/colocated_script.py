"""Run by test_colocated.py on 8 virtual devices; prints one JSON object.

A learner over some devices and an engine over the same or others: what the engine samples under
each published policy, how far its logprobs are from the learner's, and whose memory is held when.
"""

import asyncio
import dataclasses
import json
import os

os.environ["XLA_FLAGS"] = ("--xla_force_host_platform_device_count=8 "
                           "--xla_backend_optimization_level=0")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402

from kr import types  # noqa: E402
from kr.model import sharding  # noqa: E402
from kr.model import transformer  # noqa: E402
from kr.model.config import ModelConfig, MoeConfig  # noqa: E402
from kr.model.engine import Engine  # noqa: E402
from kr.rl import batch as batch_lib  # noqa: E402
from kr.rl.colocated import ColocatedClient  # noqa: E402
from kr.rl.learner import Learner  # noqa: E402
from kr.rl.optim import make_optimizer  # noqa: E402

DENSE = ModelConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64)
EXPERTS = dataclasses.replace(DENSE, moe=MoeConfig(experts=4, active=2, mlp=32, layers=(1,)))
PROMPT = [3, 1, 4, 1, 5]


def trajectory(ids, logprobs, version):
  t, s = types.Trajectory("t", types.Task("t", "q", "a", "k")), types.Segment()
  s.append_context(PROMPT)
  s.append_sampled(list(ids), list(logprobs), version)
  t.turns.append(types.Turn(0, len(PROMPT), len(s), version))
  t.segments.append(s)
  return t


def sizes(tree, kind):
  return sum(a.nbytes for a in jax.tree.leaves(tree) if a.sharding.memory_kind == kind)


async def run(cfg, learner_mesh, engine_mesh, alternate):
  learner = Learner(cfg, transformer.init(cfg, 1), make_optimizer(1e-2, 0, 1.0, 0.0),
                    micro_rows=learner_mesh.size if learner_mesh else 1, mesh=learner_mesh)
  engine = Engine(learner.policy, cfg, slots=4, max_len=64, mesh=engine_mesh)
  client = ColocatedClient(engine)
  out = {"gaps": [], "versions": [], "tokens": [], "held": []}
  for step in range(1, 4):
    if alternate:
      learner.park()
    turns = await asyncio.gather(*(
      client.generate(PROMPT, max_new_tokens=12, stop_ids=[], rid=f"{step}.{i}.0.")
      for i in range(3)))
    out["versions"].append(sorted({t.version for t in turns}))
    out["tokens"].append([t.ids for t in turns])
    held = {"optimizer": sizes(learner.opt_state, "device")}
    if alternate:
      await client.sleep()
      held["engine"] = sum(a.nbytes for a in jax.tree.leaves(
        (engine._device.params, engine._device._cache)))
    waiting = asyncio.create_task(client.generate(  # comes while the policy changes
      PROMPT, max_new_tokens=4, stop_ids=[], rid=f"{step}.w.0.")) if alternate else None
    batch = batch_lib.pack([(trajectory(t.ids, t.logprobs, step - 1), [1.0 + i], True)
                            for i, t in enumerate(turns)], 32,
                           learner_mesh.size if learner_mesh else 1)
    meanwhile = [] if alternate else [client.generate(
      PROMPT, max_new_tokens=40, stop_ids=[], rid=f"{step}.m.0.")]
    update, *beside = await asyncio.gather(
      asyncio.to_thread(learner.update, batch, step - 1), *meanwhile)
    out["gaps"].append(update["logprob_gap"])
    out["beside"] = [t.version for t in beside]
    held["optimizer_later"] = sizes(learner.opt_state, "device")
    out["held"].append(held)
    await client.update_weights(learner.policy, step)
    if waiting:
      out["waited"] = (await waiting).version
  out["checked"] = (await client.check_on_policy(PROMPT))["logprob_gap"]
  params = jax.tree.map(np.asarray, learner.policy)
  params["final_norm"] = params["final_norm"] * np.nan
  try:
    await client.update_weights(params, 9)
  except Exception as e:  # pylint: disable=broad-except
    out["refused"] = f"{type(e).__name__}: {e}"
  out["after_refusal"] = (await client.generate(PROMPT, max_new_tokens=2, stop_ids=[],
                                                rid="z.0.0.")).version
  await client.aclose()
  return out


def main():
  devices = jax.devices()
  mesh = lambda text, ds: sharding.make_mesh(text, ds)
  cases = {
    "one device": (DENSE, None, None, True),
    "same devices": (DENSE, mesh("fsdp=8", devices), mesh("tensor=2,data=4", devices), True),
    "disjoint": (DENSE, mesh("fsdp=4", devices[:4]), mesh("tensor=4", devices[4:]), False),
    "experts": (EXPERTS, mesh("fsdp=2,expert=2", devices[:4]),
                mesh("expert=2,tensor=2", devices[4:]), False),
  }
  for name, case in cases.items():
    print(json.dumps({"case": name, **asyncio.run(run(*case))}), flush=True)


if __name__ == "__main__":
  main()
