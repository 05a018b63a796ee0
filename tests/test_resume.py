"""Resume is bit-exact: 20 steps are 10 steps, kill -9, and 10 more.

What is promised for the learner: the same trajectories in the same steps give the same
parameters, optimizer state and metrics, bit for bit, on one machine. The tasks of a step, the
ids of its trajectories, negative sample control and packing follow from the seed and the step.
Which tokens a rollout samples does not: the server deals its random numbers in the order in
which requests arrive, and tools and sockets decide that. So two runs of one seed differ; one
that is killed trains what its buffer holds already, and samples the rest anew.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from kr import stages
from kr import experiment
from kr import wiring
from kr.model import checkpoint
from kr.model import hf
from kr.model.checkpoint import Checkpoints
from test_configs import ROOT, load

STEPS = 20
# Trains two learners to the last step from wherever their checkpoints are; dies where it is told.
CHILD = """
import json, os, pathlib, signal, sys
import numpy as np
from kr import types
from kr.model import transformer
from kr.model.checkpoint import Checkpoints
from kr.model.config import ModelConfig
from kr.model.lora import Lora
from kr.rl import batch as batch_lib
from kr.rl import credit
from kr.rl.learner import Learner
from kr.rl.optim import make_optimizer

root, steps, kill = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
CFG = ModelConfig(vocab=40, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=24)
KINDS = {
    "all": (make_optimizer(1e-2, 5, 1.0, 0.01, schedule="cosine", total_steps=steps), None),
    "adapters": (make_optimizer(1e-2, 5, 1.0, 0.01, kind="muon"), Lora(2, 4.0)),
}

def trajectories(step):
  rng = np.random.default_rng([3, step])  # data cursor and random state are the step
  out = []
  for i in range(4):
    t, s = types.Trajectory(f"{step}-{i}", types.Task(str(i), "q", "a", "k")), types.Segment()
    s.append_context(rng.integers(0, 40, 5).tolist())
    for turn in range(2):
      start, n = len(s), int(rng.integers(2, 9))
      s.append_sampled(rng.integers(0, 40, n).tolist(), [-3.0] * n, step - 1)
      t.turns.append(types.Turn(0, start, len(s), 0))
      s.append_context([7])
    t.segments.append(s)
    t.stop, t.answer, t.correct = types.StopReason.ANSWERED, "a", bool(i % 2)
    t.meta["step_made"] = step
    out.append(t)
  return out

runs = {}
for kind, (optimizer, lora) in KINDS.items():
  learner = Learner(CFG, transformer.init(CFG, 0), optimizer, micro_rows=2, lora=lora, seed=1)
  checkpoints = Checkpoints(root / kind)
  if done := checkpoints.latest() or 0:
    learner.load(*checkpoints.restore(done, *learner.state())[:2])
  runs[kind] = learner, checkpoints, done

for step in range(1 + min(done for *_, done in runs.values()), steps + 1):
  for kind, (learner, checkpoints, done) in runs.items():
    if step <= done:
      continue
    made = trajectories(step)
    _, advantages, keep = credit.assign(made, gamma=0.9, format_penalty=0.2, negatives_keep=0.5,
                                        protect_faults=True, seed=[3, step])
    checkpoints.wait()
    metrics = learner.update(batch_lib.pack_by_length(zip(made, advantages, keep), 32, 2), step - 1)
    if step % 5 == 0:
      checkpoints.save_async(step, *learner.state(), {"model": CFG, "metrics": metrics})
    with open(root / f"{kind}.jsonl", "a") as file:
      file.write(json.dumps({"step": step, **metrics}) + "\\n")
    if kill == [f"{kind} {step}"]:
      os.kill(os.getpid(), signal.SIGKILL)  # while the checkpoint is being written
for _, checkpoints, _ in runs.values():
  checkpoints.wait()
"""


def child(root: pathlib.Path, *kill: str) -> subprocess.Popen:
  root.mkdir(exist_ok=True)
  return subprocess.Popen([sys.executable, "-c", CHILD, str(root), str(STEPS), *kill],
                          stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
                               "JAX_COMPILATION_CACHE_DIR": str(root.parent / "compiled"),
                               "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Directories of a run of 20 steps, and of one that was killed in step 10 and went on."""
  root = tmp_path_factory.mktemp("resume")
  straight, killed = child(root / "straight"), child(root / "killed", "adapters 10")
  assert straight.wait() == 0, straight.stderr.read()[-3000:]
  assert killed.wait() == -signal.SIGKILL, killed.stderr.read()[-3000:]
  assert Checkpoints(root / "killed" / "adapters").latest() in (5, 10)
  resumed = child(root / "killed")
  assert resumed.wait() == 0, resumed.stderr.read()[-3000:]
  return root / "straight", root / "killed"


def rows(path: pathlib.Path) -> dict[int, dict[str, float]]:
  """Step -> its metrics; a step that was trained again counts as the last time."""
  out = [json.loads(line) for line in path.read_text().splitlines()]
  return {row["step"]: {k: v for k, v in row.items() if k != "compiles"} for row in out}


def leaves(path: pathlib.Path) -> dict[str, bytes]:
  """Every array of a checkpoint's policy and optimizer items, by its path in the tree."""
  import orbax.checkpoint as ocp
  out = {}
  for item in ("policy", "optimizer"):
    tree = ocp.PyTreeCheckpointer().restore(path / item)
    for key, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
      out[item + jax.tree_util.keystr(key)] = np.asarray(x).tobytes()
  return out


@pytest.mark.parametrize("kind", ["all", "adapters"])
def test_parameters_and_optimizer_state_are_those_of_a_run_that_was_not_killed(runs, kind):
  straight, killed = (leaves(run / kind / str(STEPS)) for run in runs)
  assert straight == killed and any("mu" in name for name in straight)
  assert leaves(runs[0] / kind / str(STEPS - 5)) != straight  # it still moved


@pytest.mark.parametrize("kind", ["all", "adapters"])
def test_metrics_of_every_step_are_those_of_a_run_that_was_not_killed(runs, kind):
  straight, killed = (rows(run / f"{kind}.jsonl") for run in runs)
  assert list(straight) == list(range(1, STEPS + 1))
  assert straight == killed
  assert len({row["loss"] for row in straight.values()}) == STEPS


# -------------------------------------------------------------------- of kr.train


@pytest.fixture
def config():
  return load(ROOT / "configs" / "quickstart.py").get_config("tiny")


@pytest.fixture
def workdir(tmp_path, config):
  workdir = wiring.Workdir.create(tmp_path / "run")
  config.start.dir = str(ROOT / config.start.dir)
  stages.make_start(workdir, config, None, [])
  return workdir


def bits(tree) -> dict[str, bytes]:
  return {jax.tree_util.keystr(k): np.asarray(x).tobytes()
          for k, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_adapters_begin_at_the_starting_policy_and_are_resumed_apart_from_it(workdir, config):
  config.learner.update(lora_rank=2, lora_targets=("wq", "down"))
  checkpoints = Checkpoints(workdir.checkpoints)
  learner, step, _ = experiment.make_learner(workdir, config, checkpoints)
  assert step == 0
  begin, _ = hf.load(workdir.start)
  assert bits(checkpoint.restore_policy(checkpoints.policy_path(0))[0]) == bits(begin)

  learner.params = jax.tree.map(lambda a: a + 0.01, learner.params)
  checkpoints.save(1, *learner.state(), experiment.meta_of(learner, {"loss": 0.5}))
  again, step, meta = experiment.make_learner(workdir, config, checkpoints)
  assert step == 1 and meta["metrics"] == {"loss": 0.5}
  assert bits(again.params) == bits(learner.params)
  served = bits(checkpoint.restore_policy(checkpoints.policy_path(1))[0])
  changed = {name for name, x in bits(begin).items() if served[name] != x}
  assert changed == {"['layers']['wq']", "['layers']['down']"}
  assert served == bits(again.policy)


@pytest.mark.parametrize("change, words", [
    ({"mesh": "fsdp=4096"}, "needs 4096 devices"),
    ({"lora_rank": 2, "lora_targets": ("wqq",)}, "lora_targets has wqq"),
])
def test_what_this_machine_or_model_cannot_do_is_said_before_anything_runs(
    workdir, config, change, words):
  config.learner.update(change)
  with pytest.raises(wiring.UserError, match=f"config.learner: .*{words}"):
    experiment.make_learner(workdir, config, Checkpoints(workdir.checkpoints))
  assert not workdir.checkpoints.exists()
