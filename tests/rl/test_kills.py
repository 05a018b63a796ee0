"""A pool, a buffer and a checkpoint that die at random moments: trained is what finished, once."""

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from kr.rl import buffer as buffers

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A trainer whose learner is the list of what it has trained, and whose checkpoint is that list.
TRAINER = """
import asyncio, json, os, sys
from kr import types
from kr.rl import buffer, pool, rollout

folder, steps, ahead, enough = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
version = 0

async def run(task, *parts, trajectory_id, sample, resume, should_pause, gate):
  begin = types.Segment([1], [0], [0.0], [-1])
  t = resume or types.Trajectory(trajectory_id, task, sample, [begin])
  while len(t.turns) < task.hops:
    if should_pause():
      t.stop = types.StopReason.PAUSED
      return t
    async with gate():
      await asyncio.sleep(0.001)
      t.segments[0].append_sampled([2], [-0.5], version)
    t.turns.append(types.Turn(0, len(t.turns) + 1, len(t.turns) + 2, version))
    print("a turn", flush=True)
  t.stop, t.answer = types.StopReason.ANSWERED, "a"
  return t

def tasks_of(step):
  return [types.Task(f"{step}.{i}", "?", "a", "k", hops=n) for i, n in enumerate((1, 3, 15))
          if step <= steps]

def checkpoint(state):
  with open(folder + "/new", "w") as file:
    json.dump(state, file)
    file.flush()
    os.fsync(file.fileno())
  os.replace(folder + "/new", folder + "/checkpoint")

async def main():
  global version
  try:
    state = json.load(open(folder + "/checkpoint"))
  except FileNotFoundError:
    state = {"step": 0, "trained": []}
  version = state["step"]
  with buffer.ReplayBuffer(folder + "/buffer.db") as store:
    store.rewind(version)
    pace = pool.Pace(6, max_staleness=ahead, enough=enough, max_pauses=2)
    print("ready", flush=True)
    async with pool.Pool(tasks_of, 2, pace, seed=0, policy=None, toolbox=None, chat=None,
                         limits=None, buffer=store, grade=lambda task, answer: True,
                         run=run) as acting:
      for step in range(version + 1, steps + 3):
        got = await acting.collect(step)
        rollout.assert_on_policy(got, step - 1, pace.oldest)
        store.consume([t.id for t in got], step)
        state = {"step": step, "trained": state["trained"] + [[t.id, step] for t in got]}
        await asyncio.to_thread(checkpoint, state)
        async with acting.publishing():
          version = step

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("ahead, enough", [(0, 1.0), (0, 0.5), (2, 1.0), (1, 0.5)])
def test_kills_at_random_moments_lose_no_finished_trajectory_and_train_none_twice(
    tmp_path, ahead, enough):
  rng, steps, kills = np.random.default_rng([ahead, int(10 * enough)]), 60, 0
  while True:
    child = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path), str(steps), str(ahead), str(enough)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    # Moments are counted in turns: a fast machine is killed as often as a slow one.
    for _ in range(rng.integers(1, 150) if kills < 25 else 10**6):
      if not child.stdout.readline():
        break
    else:
      time.sleep(rng.uniform(0, 0.003))
      child.kill()
      child.wait()
      kills += 1
      continue
    child.wait(120)
    assert child.returncode == 0, child.stderr.read()[-2000:]
    break
  with buffers.ReplayBuffer(tmp_path / "buffer.db") as store:
    finished = {t.id: t for step in range(1, steps + 1) for t in store.all(step)}
    counts = store.counts()
    rows = store.rows(finished)
  trained = dict(json.loads((tmp_path / "checkpoint").read_text())["trained"])
  assert kills > 5, "the run was over before it was killed often enough to say anything"
  assert counts == {"paused": 0, "finished": 6 * steps, "excluded": 0, "consumed": 6 * steps}
  assert trained == {id: row.consumed_step for id, row in rows.items()}
  assert len(json.loads((tmp_path / "checkpoint").read_text())["trained"]) == 6 * steps
  assert all(len(t.turns) == t.task.hops for t in finished.values())
