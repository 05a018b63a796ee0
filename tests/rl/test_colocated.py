"""The engine beside the learner in one process: one policy, handed over in memory."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "colocated_script.py"
CASES = ("one device", "same devices", "disjoint", "experts")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results():
  done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=1200,
                        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])})
  assert done.returncode == 0, done.stderr[-3000:]
  rows = [json.loads(line) for line in re.findall(r"^\{.*\}$", done.stdout, re.M)]
  assert [row["case"] for row in rows] == list(CASES)
  return {row["case"]: row for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_each_policy_that_is_published_samples_as_the_learner_computes(results, case):
  row = results[case]
  assert row["versions"] == [[0], [1], [2]]
  assert max(row["gaps"]) < 1e-5 and row["checked"] < 1e-5


def test_an_engine_over_a_mesh_samples_what_one_device_samples(results):
  first = {case: results[case]["tokens"][0] for case in CASES}
  assert first["one device"] == first["same devices"] == first["disjoint"]
  assert all(len(ids) == 12 for ids in first["experts"])


@pytest.mark.parametrize("case", ["one device", "same devices"])
def test_when_phases_alternate_engine_and_optimizer_are_never_held_together(results, case):
  for held in results[case]["held"]:
    assert held["optimizer"] == 0  # while the engine samples
    assert held["engine"] == 0 and held["optimizer_later"] > 0  # while the learner updates


@pytest.mark.parametrize("case", ["one device", "same devices"])
def test_a_request_that_comes_while_the_engine_sleeps_is_sampled_by_the_next_policy(results, case):
  assert results[case]["waited"] == 3


@pytest.mark.parametrize("case", ["disjoint", "experts"])
def test_on_disjoint_devices_the_old_policy_samples_while_the_next_is_computed(results, case):
  assert results[case]["beside"] == [2]
  assert all(held["optimizer"] > 0 for held in results[case]["held"])


@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_not_finite_are_refused_and_the_old_ones_go_on(results, case):
  assert results[case]["refused"].startswith("PolicyError: the engine did not take version 9")
  assert "NaN" in results[case]["refused"]
  assert results[case]["after_refusal"] == 3
