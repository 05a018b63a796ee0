"""One update by kr's learner, in a process of its own like its peers."""

from __future__ import annotations

import pathlib
import sys
import time

import worker

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from kr import types  # noqa: E402
from kr.model import hf  # noqa: E402
from kr.model.config import Execution  # noqa: E402
from kr.rl import batch as batch_lib  # noqa: E402
from kr.rl import optim  # noqa: E402
from kr.rl.learner import Learner  # noqa: E402


def trajectory(number: int, count: int, tokens: np.ndarray, coefficients: np.ndarray
               ) -> batch_lib.Item:
  """A trajectory of one segment whose turns are the runs of equal coefficients."""
  segment, turns, advantages = types.Segment(), [], []
  edges = np.flatnonzero(np.diff(coefficients)) + 1
  for start, stop in zip([0, *edges], [*edges, len(tokens)]):
    ids = tokens[start:stop].tolist()
    if coefficients[start]:
      segment.append_sampled(ids, [0.0] * len(ids), 0)
      turns.append(types.Turn(0, int(start), int(stop), 0))
      advantages.append(coefficients[start] * count)
    else:
      segment.append_context(ids)
  task = types.Task(str(number), "", "", "")
  return types.Trajectory(str(number), task, segments=[segment], turns=turns), advantages, True


def main() -> None:
  given = worker.describe()
  sequences = worker.sequences(given["data"])
  items = [trajectory(i, len(sequences), *s) for i, s in enumerate(sequences)]
  batches = batch_lib.pack_by_length(
    items, given["row_tokens"], given["micro_rows"], given["row_buckets"])
  params, cfg = hf.load(given["model"])
  optimizer = optim.make_optimizer(
    given["learning_rate"], 0, given["clip_norm"], given["weight_decay"])
  learners = {}

  def update(precision: str) -> tuple[float, float]:
    if precision not in learners:
      how = Execution(precision=precision, remat=given["remat"])
      learners[precision] = Learner(cfg, params, optimizer, micro_rows=given["micro_rows"],
                                    how=how)
    start = time.perf_counter()
    loss = learners[precision].update(batches)["loss"]
    jax.block_until_ready(learners[precision].params)
    return loss, time.perf_counter() - start

  worker.answer({"jax": jax.__version__,
                 "kr_padding_share": f"{batch_lib.padding_share(batches):.3f}"}, update)


if __name__ == "__main__":
  main()
