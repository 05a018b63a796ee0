"""Each benchmark of the learner in its smallest form, as its own command."""

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
                        capture_output=True, text=True, timeout=900)
  assert done.returncode == 0, done.stderr[-2000:]
  out = [json.loads(line) for line in done.stdout.splitlines()]
  assert out and all(set(line) == REQUIRED for line in out)
  for line in out:
    assert line["kr"] > 0
    assert set(line["ratios"]) == set(line["peers"])
    assert {"commit", "threads", "precision", "missing"} <= set(line["conditions"])
  return out


@pytest.mark.parametrize("flags", [[], ["--trajectories"]])
def test_learner_computes_the_loss_of_torch_before_it_is_compared(flags):
  variants = "--variants=kr:float32,torch:float32"
  (line,) = lines_of("learner.py", variants, *flags)
  assert line["benchmark"] == "learner"
  assert set(line["peers"]) == {"torch"}
  assert line["conditions"]["loss_gap"] < 1e-4
  assert (line["conditions"]["trained_share"] < 0.5) == bool(flags)


def test_memory_chunks_and_recomputation_save_memory():
  by_metric = {line["metric"]: line for line in lines_of("memory.py", "--parts=head,layers")}
  assert by_metric["head_peak_mib"]["ratios"]["whole_logits"] > 1.2
  assert by_metric["layers_peak_mib"]["ratios"]["no_remat"] > 1.2


def test_decode_samples_what_torch_samples_and_says_what_bounds_it():
  decode, prefill = lines_of("decode.py")
  assert [decode["metric"], prefill["metric"]] == ["decode_tokens_per_s", "prefill_tokens_per_s"]
  assert set(decode["peers"]) == {"torch"} and decode["conditions"]["bandwidth_bound"] > 0
