"""The numbers of an evaluation, against ones worked out by hand."""

from math import comb

import numpy as np
import pytest

from kr.eval import stats
from kr.types import StopReason, Task, ToolCall, ToolResult, Trajectory, Turn


def trajectory(task="t", sample=0, correct=True, turns=1, stop=StopReason.ANSWERED, kind="k",
               hops=1, urls=(), fault=None):
  """A trajectory of `turns` turns; all but the last make one call, and open urls in order."""
  steps = []
  for i in range(turns):
    results = [ToolResult("text", meta={"url": urls[i]} if i < len(urls) else {})]
    steps.append(Turn(0, 0, 0, 0) if i == turns - 1 else
                 Turn(0, 0, 0, 0, calls=[ToolCall("open", {})], results=results))
  return Trajectory(f"{task}-{sample}", Task(task, "q", "a", kind, hops=hops), sample,
                    turns=steps, stop=stop, correct=correct, fault=fault)


@pytest.mark.parametrize("n, c, k, expected", [
    (4, 0, 1, 0.0), (4, 1, 1, 0.25), (4, 4, 1, 1.0),
    (4, 1, 2, 0.5),        # 1 − C(3,2)/C(4,2) = 1 − 3/6
    (5, 2, 3, 0.9),        # 1 − C(3,3)/C(5,3) = 1 − 1/10
    (6, 1, 4, 2 / 3),      # 1 − C(5,4)/C(6,4) = 1 − 5/15
    (4, 1, 4, 1.0), (4, 0, 4, 0.0),
])
def test_pass_at_k_equals_the_numbers_worked_out_by_hand(n, c, k, expected):
  assert stats.pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n, c, k", [(3, 1, 4), (4, 5, 1), (4, -1, 1), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_has_no_estimate(n, c, k):
  with pytest.raises(ValueError, match="pass@"):
    stats.pass_at_k(n, c, k)


def test_pass_at_k_is_unbiased_over_draws_of_n():
  # E over c ~ Binomial(5, 0.3) of pass@3 is 1 − 0.7³ exactly.
  mean = sum(comb(5, c) * 0.3**c * 0.7**(5 - c) * stats.pass_at_k(5, c, 3) for c in range(6))
  assert mean == pytest.approx(1 - 0.7**3, abs=1e-12)


def test_the_bootstrap_interval_covers_the_true_mean_about_95_times_in_100():
  rng = np.random.default_rng(7)
  covered = 0
  for i in range(300):
    result = stats.bootstrap(rng.random(100) < 0.3, resamples=400, seed=i)
    covered += result["low"] <= 0.3 <= result["high"]
  assert 0.90 <= covered / 300 <= 0.98


def test_the_bootstrap_interval_has_the_width_of_the_normal_one():
  values = np.arange(400) % 2  # mean 0.5, standard error 0.5 / √400 = 0.025
  result = stats.bootstrap(values, resamples=4000)
  assert result["mean"] == 0.5
  assert result["low"] == pytest.approx(0.5 - 1.96 * 0.025, abs=0.004)
  assert result["high"] == pytest.approx(0.5 + 1.96 * 0.025, abs=0.004)


def test_the_bootstrap_depends_on_its_seed_alone():
  assert stats.bootstrap([0, 1, 1], seed=3) == stats.bootstrap([0, 1, 1], seed=3)
  assert stats.bootstrap([]) == {"mean": None, "low": None, "high": None}


def test_the_table_equals_the_numbers_worked_out_by_hand():
  groups = {
      "a": [trajectory("a", 0, True, 3, urls=("u1", "u2"), kind="x", hops=2),
            trajectory("a", 1, False, 2, urls=("u1",), kind="x", hops=2),
            trajectory("a", 2, False, 1, kind="x", hops=2),
            trajectory("a", 3, False, 5, StopReason.MAX_TURNS, urls=("u1", "u1"), kind="x",
                       hops=2, fault="max_turns")],
      "b": [trajectory("b", i, True, 1, kind="y") for i in range(4)],
  }
  table = stats.table(groups)
  means = {m: table[m]["mean"] for m in stats.METRICS}
  assert means == pytest.approx({
      "pass@1": (0.25 + 1) / 2, "pass@4": 1.0,
      "turns": (3 + 2 + 1 + 5 + 4) / 8, "turns_correct": (3 + 4) / 5,
      "tool_calls": (2 + 1 + 0 + 4) / 8, "pages": (2 + 1 + 0 + 1) / 8,
      "format_fault_rate": 1 / 8})
  for m in stats.METRICS:
    assert table[m]["low"] <= table[m]["mean"] <= table[m]["high"]
  assert (table["tasks"], table["trajectories"], table["infrastructure"]) == (2, 8, 0)
  assert table["stops"] == {"answered": 7, "max_turns": 1}
  assert table["faults"] == {"max_turns": 1}
  assert table["by_kind"]["x"]["pass@1"]["mean"] == 0.25
  assert table["by_kind"]["y"]["turns"]["mean"] == 1
  assert list(table["by_hops"]) == ["1", "2"]


def test_infrastructure_failures_are_counted_apart_and_never_scored():
  lost = trajectory("a", 3, None, 1, StopReason.INFRASTRUCTURE)
  table = stats.table({
      "a": [trajectory("a", i, i == 0) for i in range(3)] + [lost],
      "b": [trajectory("b", i, False) for i in range(4)],
      "c": [trajectory("c", 0, None, 1, StopReason.INFRASTRUCTURE)]})
  assert table["infrastructure"] == 2
  assert (table["tasks"], table["trajectories"]) == (2, 7)
  assert table["pass@1"]["mean"] == pytest.approx((1 / 3 + 0) / 2)
  assert table["pass@4"]["mean"] == 0.0  # task a has three scored samples: no estimate


def test_an_empty_evaluation_has_no_numbers_and_does_not_fail():
  table = stats.table({})
  assert table["pass@1"] == {"mean": None, "low": None, "high": None}
  assert table["tasks"] == 0


def test_turns_of_correct_trajectories_are_empty_when_none_is_correct():
  table = stats.table({"a": [trajectory("a", 0, False)]})
  assert table["turns_correct"] == {"mean": None, "low": None, "high": None}
  assert table["pass@4"]["mean"] is None


@pytest.mark.parametrize("stop, correct, text", [
    (None, None, "not ended"), (StopReason.PAUSED, None, "not ended"),
    (StopReason.ANSWERED, None, "not graded")])
def test_an_unfinished_or_ungraded_trajectory_is_refused(stop, correct, text):
  with pytest.raises(ValueError, match=text):
    stats.table({"a": [trajectory("a", 0, correct, 1, stop)]})
