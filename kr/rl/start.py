"""The starting policy: from nothing to a researcher of mixed habits, by imitation.

A tokenizer trained on the world's pages, a decoder that can copy (`kr.model.induction`), and
the learner of the RL step itself with advantage 1 on what scripted researchers did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import json
import os
import pathlib

import numpy as np

from kr import types
from kr.agent.tokenizer import train_tokenizer
from kr.data import demos
from kr.data.world import World
from kr.model import hf
from kr.model import induction
from kr.model.config import ModelConfig
from kr.rl import batch as batch_lib
from kr.rl.learner import Learner, make_optimizer
from kr.tools.browser import render


def make_tokenizer(world: World, tasks: Sequence[types.Task], system: str, vocab: int, lines: int,
                   out_dir: str | os.PathLike) -> None:
  """Trains the tokenizer on what the policy will see: the tops of pages, questions, scaffold."""
  def texts() -> Iterator[str]:
    for entity in world.entities.values():
      title, html = world.store.get(entity["url"])
      yield "\n".join([title] + render(html, entity["url"])[0][:2 * lines])
      yield f"r1 {title}: "
    for task in tasks:
      yield f"{system} {task.question}"
      yield "".join(f"{n}={step['value']};" for chain in task.meta["chains"] for step in chain for n in "ab")
      if task.meta["expression"]:
        yield task.meta["expression"].replace(" ", "")
    for word in ("search", "open", "check", "guess", "result", "find", "python", "lookup", "query", "queries",
                 "round", "abs", "min", "max", "lines", "no results", "of"):
      yield from [word] * 200

  train_tokenizer(texts(), vocab, out_dir, scaffold=demos.SCAFFOLD)


def imitate(cfg: ModelConfig, demonstrations: Sequence[types.Trajectory], *, steps: int,
            trajectories_per_step: int, learning_rate: float, row_tokens: int, micro_rows: int, seed: int,
            on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None) -> Learner:
  """Trains a fresh policy on demonstrations, advantage 1 on every token they chose.

  What a demonstration did wrong is imitated too: it is there to be unlearned by RL.
  """
  learner = Learner(cfg, induction.init(cfg, seed),
                    make_optimizer(learning_rate, max(1, steps // 20), 1.0, 0.01, decay_steps=steps),
                    micro_rows=micro_rows)
  rng, order = np.random.default_rng(seed), []
  for step in range(steps):
    while len(order) < trajectories_per_step:
      order += rng.permutation(len(demonstrations)).tolist()
    chosen, order = order[:trajectories_per_step], order[trajectories_per_step:]
    packed = batch_lib.from_demonstrations([demonstrations[i] for i in chosen], row_tokens, micro_rows)
    on_step(step + 1, learner.update(packed))
  return learner


def save(learner: Learner, tokenizer_dir: str | os.PathLike, out_dir: str | os.PathLike,
         log: Sequence[dict]) -> None:
  """Writes the policy as a Hugging Face directory, with the log of its making beside it."""
  hf.export(learner.params, learner.cfg, tokenizer_dir, out_dir)
  (pathlib.Path(out_dir) / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
