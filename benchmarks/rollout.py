"""Trajectories trained per second: synchronous, asynchronous, partial, and both at once.

  python benchmarks/rollout.py            a simulated server and tools, in virtual time
  python benchmarks/rollout.py --real     kr.serve with the quick start's policy, in real time

The pool, the replay buffer and the agent loop are the real ones. What they meet is drawn once for
each trajectory, the same in all modes: turns log-normal with mean 23 (2.6 % beyond 70, at most
100); tokens of a turn log-normal with mean 240; a tool's seconds log-normal with mean 2 and a long
tail. A token takes 30 ms when all places of the server are taken, and 20 ms when one is. A step
trains 16 groups of 4, in 1 s a trajectory, and publishes in 5 s. All modes have as many places.

  synchronous   a step rolls out, all of it, then learns
  asynchronous  max_staleness 1: acting goes on while the learner learns
  partial       a step ends when `enough` of its groups are complete; the rest is resumed
  both          and: what `partial_async_trajectories_per_s` says

Prints a table, and one JSON object a line. With --real, turns are a third as many, since the policy
is a small one with a short context, and the learner is a pause, as if it had its own device.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
from absl import logging
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kr import types  # noqa: E402
from kr import wiring  # noqa: E402
from kr.agent import loop  # noqa: E402
from kr.agent.parse import Action  # noqa: E402
from kr.agent.policy import PolicyClient, Sampled  # noqa: E402
from kr.rl.buffer import ReplayBuffer  # noqa: E402
from kr.rl.pool import Pace, Pool  # noqa: E402
from kr.rl.server import ServerProcess  # noqa: E402
from kr.tools.base import Toolbox, ToolSpec  # noqa: E402

_REPEATS = flags.DEFINE_integer("repeats", 5, "Measurements per mode; the median counts.", 1)
_STEPS = flags.DEFINE_integer("steps", 12, "Steps of a measurement.", 1)
_ENOUGH = flags.DEFINE_float("enough", 0.5, "The share of its groups that ends a partial step.")
_REAL = flags.DEFINE_bool("real", False, "kr.serve instead of the simulation.")
_QUICK = flags.DEFINE_bool("quick", False, "As small as it gets, for tests.")

GROUPS, GROUP_SIZE, PLACES = 16, 4, 64
ANSWER, CALL = 2, 1  # what a turn's last token says in the simulation
PEERS = {"asynchronous": "async", "partial": "partial", "both": "partial_async"}


def modes() -> dict[str, Pace]:
  enough = {"enough": _ENOUGH.value, "max_pauses": 4}
  return {"synchronous": Pace(PLACES), "asynchronous": Pace(PLACES, max_staleness=1),
          "partial": Pace(PLACES, **enough), "both": Pace(PLACES, max_staleness=1, **enough)}


class VirtualLoop(asyncio.SelectorEventLoop):
  """An event loop whose clock jumps to the next timer instead of waiting for it."""

  def __init__(self):
    super().__init__()
    self._now, real = 0.0, self._selector.select

    def select(timeout: float | None):
      if timeout is None:
        raise RuntimeError("deadlock: nothing runs and no timer is set")
      self._now += max(timeout, 0.0)
      return real(0)

    self._selector.select = select

  def time(self) -> float:
    return self._now


def lognormal(rng: np.random.Generator, mean: float, sigma: float) -> float:
  return float(rng.lognormal(math.log(mean) - sigma ** 2 / 2, sigma))


class Workload:
  """What each trajectory meets, and the chat that reads it: the last token of a turn says what it
  is. A random number belongs to a trajectory and a turn, whenever it is asked for."""
  stop_ids: list[int] = []

  def __init__(self, seed: int, scale: float):
    self.seed, self.scale = seed, scale

  def rng(self, rid: str, turn: int) -> np.random.Generator:
    return np.random.default_rng([self.seed, int(rid, 16), turn])

  def turns(self, rid: str) -> int:
    return min(100, max(1, round(lognormal(self.rng(rid, 0), 23, 0.7)))) // self.scale or 1

  def prompt(self, question: str) -> list[int]:
    return [3, 4, 5]

  def observation(self, results: list[types.ToolResult]) -> list[int]:
    return [6, 7]

  def parse(self, ids: list[int]) -> Action:
    if ids[-1] == ANSWER:
      return Action("", answer="!")
    return Action("", calls=[types.ToolCall("look", {})])


class Tool:
  """Takes its time."""
  spec = ToolSpec("look", "Looks.", {"type": "object", "properties": {}})

  def __init__(self, workload: Workload, mean_s: float):
    self._workload, self._mean_s, self._calls = workload, mean_s, {}

  async def call(self, session_id: str, arguments: dict[str, Any]) -> types.ToolResult:
    turn = self._calls[session_id] = self._calls.get(session_id, 0) + 1
    rng = self._workload.rng(session_id, 2**32 - turn)
    await asyncio.sleep(lognormal(rng, self._mean_s, 1.2))
    return types.ToolResult("seen")

  async def close(self, session_id: str) -> None:
    self._calls.pop(session_id, None)

  async def aclose(self) -> None:
    pass

  def snapshot(self, session_id: str) -> dict[str, Any] | None:
    return {"calls": self._calls[session_id]} if session_id in self._calls else None

  def restore(self, session_id: str, state: dict[str, Any]) -> None:
    self._calls[session_id] = state["calls"]


class Simulated:
  """A policy server: a turn takes longer the more of them run."""

  def __init__(self, workload: Workload):
    self._workload, self.version, self.running = workload, 0, 0
    self.sampled_s = self.wasted_s = 0.0

  async def generate(self, ids: list[int], *, rid: str, **unused) -> Sampled:
    id, turn, _ = rid.split(".", 2)
    tokens = lognormal(self._workload.rng(id, 1 + int(turn)), 240, 0.6)
    self.running += 1
    version = self.version
    duration_s = tokens * 0.02 * (1 + 0.5 * self.running / PLACES)
    try:
      await asyncio.sleep(duration_s)
    finally:
      self.running -= 1
    self.sampled_s += duration_s
    if version != self.version:
      self.wasted_s += duration_s
      return Sampled([], [], version, "abort", mixed=True)
    last = ANSWER if int(turn) + 1 >= self._workload.turns(id) else CALL
    return Sampled([8, last], [-0.5, -0.5], version, "stop")

  async def publish(self, version: int) -> None:
    await asyncio.sleep(5.0)
    self.version = version


class Served(PolicyClient):
  """kr.serve: it samples what the workload says, and the last token says what a turn is."""

  def __init__(self, url: str, workload: Workload, model: str):
    super().__init__(url)
    self._workload, self._model = workload, model

  async def generate(self, ids: list[int], *, rid: str, max_new_tokens: int, **options) -> Sampled:
    id, turn, _ = rid.split(".", 2)
    tokens = min(32, max(4, round(lognormal(self._workload.rng(id, 1 + int(turn)), 12, 0.6))))
    sampled = await super().generate(ids, rid=rid, max_new_tokens=tokens, **options)
    if sampled.ids:  # the history is the benchmark's, not the policy's
      sampled.ids[-1] = ANSWER if int(turn) + 1 >= self._workload.turns(id) else CALL
    return sampled

  async def publish(self, version: int) -> None:
    await self.update_weights(self._model, version)


async def train(server: Any, workload: Workload, pace: Pace, path: str, *, steps: int,
                tool_s: float, update_s: float, drain: bool = True) -> float:
  """Trajectories trained per second of the event loop's clock; update_s: seconds for each."""
  clock = asyncio.get_running_loop().time

  def tasks_of(step: int) -> list[types.Task]:
    return [types.Task(f"{step}.{i}", "?", "!", "k") for i in range(GROUPS if step <= steps else 0)]

  with ReplayBuffer(path) as buffer:
    toolbox = Toolbox([Tool(workload, tool_s)], timeout_s=1e6)
    async with Pool(tasks_of, GROUP_SIZE, pace, seed=workload.seed, policy=server, toolbox=toolbox,
                    chat=workload, limits=loop.Limits(200, 10**6, 64), buffer=buffer,
                    grade=lambda task, answer: True, clock=clock) as pool:
      start, trained = clock(), 0
      for step in range(1, steps + 1):
        got = await pool.collect(step)
        await asyncio.sleep(update_s * len(got))
        buffer.consume([t.id for t in got], step)
        async with pool.publishing() if drain else contextlib.nullcontext():
          await server.publish(step)
        trained += len(got)
      rate = trained / (clock() - start)
      pool.leave()
  return rate


def steps_of_a_measurement() -> int:
  return 2 if _QUICK.value else _STEPS.value


def simulated(pace: Pace, seed: int, path: str, drain: bool = True) -> tuple[float, float]:
  """(trajectories per second, share of the sampling that was wasted)."""
  workload = Workload(seed, 1)
  server = Simulated(workload)
  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    rate = runner.run(train(server, workload, pace, path, steps=steps_of_a_measurement(),
                            tool_s=2.0, update_s=1.0, drain=drain))
  return rate, server.wasted_s / server.sampled_s


def real(pace: Pace, seed: int, path: str, url: str, model: str, steps: int
         ) -> tuple[float, float]:
  workload = Workload(seed, 3)

  async def run() -> float:
    client = Served(url, workload, model)
    try:
      await client.update_weights(model, 0)
      return await train(client, workload, pace, path, steps=steps, tool_s=0.3, update_s=0.05)
    finally:
      await client.aclose()
  return asyncio.run(run()), 0.0


def measure(measures: dict[str, Any]) -> dict[str, tuple[float, float]]:
  """Medians of alternating measurements: {name: (rate, wasted)}."""
  got: dict[str, list[tuple[float, float]]] = {name: [] for name in measures}
  for repeat in range(1 if _QUICK.value else _REPEATS.value):
    for name, one in measures.items():
      with tempfile.TemporaryDirectory() as folder:
        got[name].append(one(repeat, os.path.join(folder, "buffer.db")))
      print(f"{repeat} {name:20} {got[name][-1][0]:.4f} trajectories/s", file=sys.stderr)
  return {name: tuple(statistics.median(column) for column in zip(*values))
          for name, values in got.items()}


def report(rates: dict[str, tuple[float, float]], conditions: dict[str, Any]) -> None:
  synchronous = rates["synchronous"][0]
  for name, metric in PEERS.items():
    rate, peers = rates[name][0], {"synchronous": synchronous}
    if name == "both" and "resampled" in rates:  # turns that meet a publication are sampled again
      peers["resampling"] = rates["resampled"][0]
    print(f"{name:13} {rate:.4f} trajectories/s, {rate / synchronous:.2f} x synchronous",
          file=sys.stderr)
    print(json.dumps({
        "benchmark": "rollout", "metric": f"{metric}_trajectories_per_s",
        "unit": "trajectories/s", "kr": round(rate, 5),
        "peers": {k: round(v, 5) for k, v in peers.items()},
        "ratios": {k: round(rate / v, 3) for k, v in peers.items()},
        "conditions": conditions}), flush=True)


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  conditions = {"groups": GROUPS, "group_size": GROUP_SIZE, "places": PLACES,
                "steps": steps_of_a_measurement(),
                "repeats": 1 if _QUICK.value else _REPEATS.value,
                "enough": _ENOUGH.value, "max_pauses": 4, "max_staleness": "0, and 1 where async",
                "threads": len(os.sched_getaffinity(0)), "precision": "float32",
                "python": sys.version.split()[0], "commit": wiring.commit(), "missing": []}
  if not _REAL.value:
    measures = {name: lambda seed, path, pace=pace: simulated(pace, seed, path)
                for name, pace in modes().items()}
    measures["resampled"] = lambda seed, path: simulated(modes()["both"], seed, path, drain=False)
    rates = measure(measures)
    report(rates, {**conditions, "server": "simulated, in virtual time", "turns_mean": 23,
                   "resampling_wastes": round(rates["resampled"][1], 3)})
    return
  with tempfile.TemporaryDirectory() as folder:
    model = str(ROOT / "starts" / "quickstart")
    with ServerProcess(model, slots=PLACES, max_len=768, warm_up=True,
                       log=os.path.join(folder, "log")) as server:
      start = time.monotonic()
      real(Pace(PLACES), 99, os.path.join(folder, "warm.db"), server.url, model, steps=1)
      print(f"warm-up {time.monotonic() - start:.0f} s", file=sys.stderr)
      report(measure({name: lambda seed, path, pace=pace: real(
          pace, seed, path, server.url, model, steps_of_a_measurement())
                      for name, pace in modes().items()}),
             {**conditions, "server": "kr.serve, quick start's policy", "turns_mean": 8})


if __name__ == "__main__":
  app.run(main)
