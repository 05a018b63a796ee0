r"""Evaluates a run's policy on one of its task sets and prints the table.

    python -m kr.evaluate --workdir=runs/quickstart --split=heldout --samples=4

Trajectories and table are stored under workdir/eval/. The same command goes on after an
interruption.
"""

from __future__ import annotations

import os
import sys

from absl import flags

from kr import serving
from kr import wiring
from kr.data.grade import grade
from kr.eval import report
from kr.eval import runner
from kr.eval import stats

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "The run to evaluate.")
_SPLIT = flags.DEFINE_string("split", "heldout", "Which tasks: heldout or train.")
_SAMPLES = flags.DEFINE_integer("samples", None, "Rollouts of each task; default: the config's.",
                                lower_bound=1)
_TASKS = flags.DEFINE_integer("tasks", None, "How many tasks, the first ones; default: the "
                              "config's.", lower_bound=1)
_STEP = flags.DEFINE_string("step", "latest", "Which policy: latest, start, or a step's number.")


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise wiring.UserError(f"kr.evaluate takes flags only, not {' '.join(argv[1:])!r}; see --help")
  workdir, config = wiring.Workdir.open(_WORKDIR.value)
  tasks = workdir.load_tasks(_SPLIT.value)[:_TASKS.value or config.eval.tasks]
  policy_dir, step = workdir.policy(_STEP.value)
  name = f"{_SPLIT.value}-{step}"
  path = workdir.eval(name)
  if path.exists() and path.stat().st_mtime < policy_dir.stat().st_mtime:
    os.replace(path, path.with_suffix(".old.jsonl"))  # of an earlier policy of the same step

  # ------------------------------------------------------------------------------- run
  with serving.session(config, workdir, policy_dir) as session:
    async def run(policy):
      await policy.check_on_policy()
      return await runner.evaluate(
          tasks, _SAMPLES.value or config.eval.samples, policy=policy, toolbox=session.toolbox,
          chat=session.chat, limits=wiring.limits(config), grade=grade,
          concurrency=config.eval.concurrency, out_path=path, seed=config.seed, tag=name)
    trajectories = session.run(run)

  # ------------------------------------------------------------------------------- table
  table = report.flatten(stats.table(stats.by_task(trajectories), seed=config.seed))
  wiring.write_json(path.with_suffix(".json"), {
      "result": table, "policy": step, "split": _SPLIT.value, "seed": config.seed,
      "commit": wiring.commit(), "hardware": wiring.hardware()})
  print(f"{workdir.path}, policy {step}, {_SPLIT.value} tasks\n")
  print(report.format_table(table))
  print(f"\ntrajectories: {path}", file=sys.stderr)


if __name__ == "__main__":
  wiring.main_guard(main)
