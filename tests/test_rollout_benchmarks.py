"""The benchmarks of rollouts in their smallest form, as commands of their own."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
REQUIRED = {"benchmark", "metric", "unit", "kr", "peers", "ratios", "conditions"}

pytestmark = pytest.mark.slow


def lines_of(script, *flags):
  done = subprocess.run([sys.executable, ROOT / "benchmarks" / script, "--quick", *flags],
                        capture_output=True, text=True, timeout=600)
  assert done.returncode == 0, done.stderr[-2000:]
  out = {line["metric"]: line for line in map(json.loads, done.stdout.splitlines())}
  assert out and all(set(line) == REQUIRED and line["kr"] > 0 for line in out.values())
  assert all({"commit", "threads", "precision", "missing"} <= set(line["conditions"])
             for line in out.values())
  return out


def test_every_mode_trains_more_a_second_than_the_synchronous_one_in_the_simulation():
  out = lines_of("rollout.py")
  assert set(out) == {"async_trajectories_per_s", "partial_trajectories_per_s",
                      "partial_async_trajectories_per_s"}
  assert all(line["ratios"]["synchronous"] > 1 for line in out.values())  # virtual time: no noise


def test_the_modes_run_on_the_real_server():
  out = lines_of("rollout.py", "--real")
  assert set(out) == {"async_trajectories_per_s", "partial_trajectories_per_s",
                      "partial_async_trajectories_per_s"}


def test_a_turn_of_many_trajectories_costs_what_it_is_said_to():
  out = lines_of("loop.py")
  assert set(out) == {"ms_per_turn", "mib_per_trajectory"}
  assert set(out["ms_per_turn"]["conditions"]["by_size"]) == {"20", "40"}
