"""A real language model through every stage, with its own tokenizer and chat template."""

import json
import pathlib
import subprocess
import sys

import pytest

from kr.rl.buffer import ReplayBuffer

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parent.parent
START = ROOT / "starts" / "smollm2"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The workdir of `:tiny`, trained once."""
  if not (START / "config.json").is_file():
    pytest.skip("starts/smollm2 is not there: bash launch/smollm2.sh makes it")
  workdir = tmp_path_factory.mktemp("smollm2") / "run"
  done = subprocess.run(
      [sys.executable, "-m", "kr.train", "--config=configs/smollm2.py:tiny",
       f"--workdir={workdir}"], cwd=ROOT, capture_output=True, text=True, timeout=1800)
  assert done.returncode == 0, done.stderr[-3000:]
  return workdir


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def trajectories(run):
  with ReplayBuffer(run / "buffer.db") as buffer:
    return buffer.all(1)


def test_two_steps_are_taken_and_server_and_learner_agree(run):
  steps = rows(run / "metrics.jsonl")
  assert [row["step"] for row in steps] == [1, 2]
  assert all(row["logprob_gap"] < 1e-3 for row in steps)
  assert (run / "report.html").is_file() and (run / "summary.json").is_file()


def test_every_first_prompt_shows_the_examples_and_the_server_computes_them_once(run):
  from tokenizers import Tokenizer
  tokenizer = Tokenizer.from_file(str(START / "tokenizer.json"))
  done = trajectories(run)
  assert len(done) == 4
  for t in done:
    ids = t.segments[0].tokens[:t.turns[0].start]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.count("<tool_call>") >= 9 and t.task.question in text
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
  counts = [(t.meta["cached_tokens"], t.meta["prompt_tokens"]) for t in done]
  assert sum(2 * cached > prompt for cached, prompt in counts) >= 3, counts


def test_no_task_of_an_example_is_trained_or_evaluated(run):
  shown = [row["task"] for row in rows(run / "examples.jsonl")]
  heldout = rows(run / "tasks" / "heldout.jsonl")
  entities = {title for task in heldout for title in task["meta"]["entities"]}
  assert len(shown) == 6
  assert not {title for task in shown for title in task["meta"]["entities"]} & entities
  assert not {task["id"] for task in shown} & {t.task.id for t in trajectories(run)}
