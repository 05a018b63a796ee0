"""The benchmarks of rollouts in their smallest form, as commands of their own."""

import pytest

from test_benchmarks import lines_of

pytestmark = pytest.mark.slow


def by_metric(script, *flags):
  return {line["metric"]: line for line in lines_of(script, *flags)}


def test_every_mode_trains_more_a_second_than_the_synchronous_one_in_the_simulation():
  out = by_metric("rollout.py")
  assert set(out) == {"async_trajectories_per_s", "partial_trajectories_per_s",
                      "partial_async_trajectories_per_s"}
  assert all(line["ratios"]["synchronous"] > 1 for line in out.values())  # virtual time: no noise


def test_the_modes_run_on_the_real_server():
  out = by_metric("rollout.py", "--real")
  assert set(out) == {"async_trajectories_per_s", "partial_trajectories_per_s",
                      "partial_async_trajectories_per_s"}


def test_a_turn_of_many_trajectories_costs_what_it_is_said_to():
  out = by_metric("loop.py")
  assert set(out) == {"ms_per_turn", "mib_per_trajectory"}
  assert set(out["ms_per_turn"]["conditions"]["by_size"]) == {"20", "40"}
