"""The starting policy: from nothing to a researcher of mixed habits, by imitation.

A tokenizer trained on the world's pages, a decoder that can copy (`kr.model.induction`), and
the learner of the RL step itself with advantage 1 on what scripted researchers did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
import json
import os
import pathlib
import tempfile

import numpy as np
import tqdm

from kr import types
from kr.agent import loop
from kr.agent.chat import Chat
from kr.agent.tokenizer import train_tokenizer
from kr.data import demos
from kr.data.world import World
from kr.model import hf
from kr.model import induction
from kr.model.config import ModelConfig
from kr.rl import batch as batch_lib
from kr.rl.learner import Learner
from kr.rl.optim import make_optimizer
from kr.tools.base import Toolbox
from kr.tools.browser import render

# Words of the scripts that no page or question holds often enough to become tokens.
_WORDS = ("search open check guess result find python lookup query queries round abs min max lines "
          "of").split()


def build(world: World, tasks: Sequence[types.Task], toolbox: Toolbox,
          out_dir: str | os.PathLike, *, system: str, declare: str, limits: loop.Limits,
          lines: int, demonstrations: int, cfg: ModelConfig, steps: int,
          trajectories_per_step: int, learning_rate: float, row_tokens: int, micro_rows: int,
          seed: int) -> None:
  """Makes a starting policy and writes it as a Hugging Face directory, with log.jsonl.

  Closes the toolbox. The log's first line says how good the demonstrations were.
  """
  with tempfile.TemporaryDirectory() as tokenizer:
    make_tokenizer(world, tasks, system, cfg.vocab, lines, tokenizer)
    chat = Chat(tokenizer, toolbox.specs, system, declare=declare, max_calls=limits.max_calls)

    async def record(bar: tqdm.tqdm) -> list[types.Trajectory]:
      try:
        return await demos.record(tasks, demonstrations, chat=chat, toolbox=toolbox,
                                  limits=limits, seed=seed, on_progress=bar.update)
      finally:
        await toolbox.aclose()

    with tqdm.tqdm(total=demonstrations, desc="demonstrations") as bar:
      shown = asyncio.run(record(bar))
    log = [{"demonstrations": len(shown), "correct": np.mean([bool(d.correct) for d in shown])}]
    with tqdm.tqdm(total=steps, desc="imitate", unit="step") as bar:
      def on_step(step: int, metrics: dict[str, float]) -> None:
        log.append({"step": step, **metrics})
        bar.set_postfix_str(f"log p {metrics['log_prob']:.3f}")
        bar.update()

      learner = imitate(cfg, shown, steps=steps, trajectories_per_step=trajectories_per_step,
                        learning_rate=learning_rate, row_tokens=row_tokens, micro_rows=micro_rows,
                        seed=seed, on_step=on_step)
    hf.export(learner.params, cfg, tokenizer, out_dir)
  (pathlib.Path(out_dir) / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))


def make_tokenizer(world: World, tasks: Sequence[types.Task], system: str, vocab: int, lines: int,
                   out_dir: str | os.PathLike) -> None:
  """Trains the tokenizer on what the policy will see: the tops of pages, questions, scripts.

  Only pages that `tasks` lead to. A held-out name must be made of tokens that the policy has
  met: a name that is a token of its own, and never met, cannot be copied.
  """
  met = sorted({title for task in tasks for title in task.meta["entities"]})

  def texts() -> Iterator[str]:
    for title in met:
      url = world.entities[title]["url"]
      yield "\n".join([title] + render(world.store.get(url)[1], url)[0][:lines])
      yield f"r1 {title}: "
    for task in tasks:
      yield f"{system} {task.question}"
      steps = [step for chain in task.meta["chains"] for step in chain]
      yield "".join(f"{name}={step['value']};" for step in steps for name in "ab")
      yield (task.meta["expression"] or "").replace(" ", "")
    for word in _WORDS:
      yield from [word] * 200

  train_tokenizer(texts(), vocab, out_dir, scaffold=demos.SCAFFOLD)


def imitate(cfg: ModelConfig, demonstrations: Sequence[types.Trajectory], *, steps: int,
            trajectories_per_step: int, learning_rate: float, row_tokens: int, micro_rows: int,
            seed: int, on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
            ) -> Learner:
  """Trains a fresh policy on demonstrations, advantage 1 on every token they chose.

  What a demonstration did wrong is imitated too: it is there to be unlearned by RL.
  """
  optimizer = make_optimizer(learning_rate, max(1, steps // 20), clip_norm=1.0, weight_decay=0.01,
                             schedule="cosine", total_steps=steps)
  learner = Learner(cfg, induction.init(cfg, seed), optimizer, micro_rows=micro_rows)
  rng, order = np.random.default_rng(seed), []
  for step in range(1, steps + 1):
    while len(order) < trajectories_per_step:
      order += rng.permutation(len(demonstrations)).tolist()
    chosen, order = order[:trajectories_per_step], order[trajectories_per_step:]
    packed = batch_lib.from_demonstrations(
        [demonstrations[i] for i in chosen], row_tokens, micro_rows)
    on_step(step, learner.update(packed))
  return learner
