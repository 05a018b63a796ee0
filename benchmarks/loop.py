"""What orchestration costs: many trajectories at once on one core; the policy costs nothing.

  python benchmarks/loop.py

Pool, replay buffer, agent loop, chat (the quick start's tokenizer) and toolbox are the real ones.
The policy answers at once with a turn of some 30 tokens that was made beforehand, the tool with a
text of 20 words. Each trajectory takes 30 turns; all of them run at the same time. Each size is a
process of its own, on one core: CPU time a turn, and how much the process grows a trajectory, at
its peak.
Prints a table, and one JSON object a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kr import types  # noqa: E402
from kr.agent import loop  # noqa: E402
from kr.agent.chat import Chat  # noqa: E402
from kr.agent.policy import Sampled  # noqa: E402
from kr.rl.buffer import ReplayBuffer  # noqa: E402
from kr.rl.pool import Pace, Pool  # noqa: E402
from kr.tools.base import Toolbox, ToolSpec  # noqa: E402

_SIZES = flags.DEFINE_list("sizes", ["100", "500", "2000", "5000"], "Trajectories at once.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Processes per size; the median counts.", 1)
_QUICK = flags.DEFINE_bool("quick", False, "As small as it gets, for tests.")
_ONE = flags.DEFINE_integer("one", 0, "Measure this size, in this process.")

TURNS = 30
MAIN = 2000  # the size that the JSON lines tell of


class Tool:
  """Answers at once."""
  spec = ToolSpec("search", "Searches.", {
      "type": "object", "properties": {"queries": {"type": "array", "items": {"type": "string"}}},
      "required": ["queries"]})

  async def call(self, session_id: str, arguments: dict[str, Any]) -> types.ToolResult:
    return types.ToolResult("Ayacucho is a city of Peru with its people and a history. " * 2)

  async def close(self, session_id: str) -> None:
    pass

  async def aclose(self) -> None:
    pass

  def snapshot(self, session_id: str) -> None:
    return None

  def restore(self, session_id: str, state: dict[str, Any]) -> None:
    pass


class Policy:
  """Says the same in every turn, and answers in the last; lets the others go first."""

  def __init__(self, chat: Chat):
    self._look = chat.turn("look it up", [types.ToolCall("search", {"queries": ["Ayacucho"]})])
    self._answer = chat.turn("so", answer="140033")
    self.running = self.most = 0

  async def generate(self, ids: list[int], *, rid: str, **unused) -> Sampled:
    self.running += 1
    self.most = max(self.most, self.running)
    await asyncio.sleep(0)
    self.running -= 1
    turn = list(self._answer if int(rid.split(".")[1]) == TURNS - 1 else self._look)
    return Sampled(turn, [-0.5] * len(turn), 0, "stop", len(ids), len(ids) - 1)


async def run(size: int, path: str) -> dict[str, float]:
  """CPU milliseconds a turn, and MiB a trajectory."""
  toolbox = Toolbox([Tool()])
  chat = Chat(ROOT / "starts" / "quickstart", toolbox.specs, "Research, then answer.", "brief")
  policy = Policy(chat)
  tasks = [types.Task(str(i), f"What is the population of town {i}?", "140033", "k")
           for i in range(size)]
  with ReplayBuffer(path) as buffer:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    async with Pool(lambda step: tasks, 1, Pace(size), seed=0, policy=policy, toolbox=toolbox,
                    chat=chat, limits=loop.Limits(TURNS, 10**6, 10**3), buffer=buffer,
                    grade=lambda task, answer: answer == task.answer) as pool:
      got = await pool.collect(1)
    seconds = time.process_time() - start
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  if len(got) != size or policy.most != size or any(len(t.turns) != TURNS for t in got):
    raise AssertionError("the trajectories did not run to their end, all at once")
  tokens = sum(len(s) for s in got[0].segments)
  return {"ms_per_turn": 1000 * seconds / (size * TURNS),
          "mib_per_trajectory": (after - before) / 1024 / size, "tokens": tokens}


def measure(size: int) -> dict[str, float]:
  done = subprocess.run([sys.executable, __file__, f"--one={size}"], capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(done.stderr[-2000:])
  return json.loads(done.stdout)


def main(argv: list[str]) -> None:
  del argv
  if _ONE.value:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
      print(json.dumps(asyncio.run(run(_ONE.value, os.path.join(folder, "buffer.db")))))
    return
  from kr import wiring  # not in the measured processes
  sizes = [20, 40] if _QUICK.value else [int(size) for size in _SIZES.value]
  got = {size: [] for size in sizes}
  for _ in range(1 if _QUICK.value else _REPEATS.value):
    for size in sizes:
      got[size].append(measure(size))
  median = {size: {key: statistics.median(one[key] for one in many) for key in many[0]}
            for size, many in got.items()}
  for size, one in median.items():
    print(f"{size:5} trajectories: {one['ms_per_turn']:.3f} ms a turn, "
          f"{one['mib_per_trajectory']:.3f} MiB a trajectory", file=sys.stderr)
  main_size = MAIN if MAIN in sizes else sizes[-1]
  for metric, unit in (("ms_per_turn", "ms"), ("mib_per_trajectory", "MiB")):
    print(json.dumps({
        "benchmark": "loop", "metric": metric, "unit": unit,
        "kr": round(median[main_size][metric], 4), "peers": {}, "ratios": {},
        "conditions": {
            "trajectories": main_size, "turns": TURNS, "tokens": median[main_size]["tokens"],
            "by_size": {str(size): round(one[metric], 4) for size, one in median.items()},
            "threads": 1, "precision": "none", "repeats": len(got[main_size]),
            "python": sys.version.split()[0], "commit": wiring.commit(),
            "missing": ["verifiers", "google-tunix"]}}), flush=True)


if __name__ == "__main__":
  app.run(main)
