"""Sampled tokens per second of the inference server, over HTTP as the trainer uses it.

  python benchmarks/server.py

Two workloads with logprobs, each at several concurrencies: `plain` sends prompts of 64
random tokens and samples 64; `turns` plays trajectories of four turns (a shared
question of 100 tokens for each group of eight, 25 tokens sampled a turn, observations of
10 to 50 tokens), which is what an agent's rollout asks for. Prints a table, and one JSON
object a line. The model is random: its weights do not matter to speed.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
from absl import logging
import aiohttp
import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kr import wiring  # noqa: E402
from kr.model import checkpoint  # noqa: E402
from kr.model import transformer  # noqa: E402
from kr.model.config import ModelConfig  # noqa: E402
from kr.rl.server import ServerProcess  # noqa: E402

_REPEATS = flags.DEFINE_integer("repeats", 5, "Measurements per workload; the median counts.", 1)
_CONCURRENCY = flags.DEFINE_list("concurrency", ["1", "16", "64"], "Requests at once.")
_KV_HEADS = flags.DEFINE_integer("kv_heads", 2, "Key-value heads of the model (6 query heads).", 1)

VOCAB = 2048


class Client:
  """Sends requests and counts what comes back."""

  def __init__(self, url: str, session: aiohttp.ClientSession, seed: int):
    self._url, self._session = url, session
    self.rng = np.random.default_rng(seed)
    self.sampled = self.prompt = self.cached = 0

  def ids(self, count: int) -> list[int]:
    return self.rng.integers(0, VOCAB, count).tolist()

  async def generate(self, ids: list[int], new_tokens: int) -> list[int]:
    body = {"input_ids": ids, "return_logprob": True,
            "sampling_params": {"max_new_tokens": new_tokens}}
    async with self._session.post(self._url + "/generate", json=body) as response:
      response.raise_for_status()
      answer = await response.json()
    self.sampled += len(answer["output_ids"])
    self.prompt += len(ids)
    self.cached += answer["meta_info"]["cached_tokens"]
    return answer["output_ids"]


async def plain(client: Client, concurrency: int) -> None:
  await asyncio.gather(*(client.generate(client.ids(64), 64) for _ in range(concurrency)))


async def turns(client: Client, concurrency: int) -> None:
  async def trajectory(question: list[int]) -> None:
    history = list(question)
    for _ in range(4):
      history += await client.generate(history, 25)
      history += client.ids(int(client.rng.integers(10, 51)))

  questions = [client.ids(100) for _ in range((concurrency + 7) // 8)]
  await asyncio.gather(*(trajectory(questions[i // 8]) for i in range(concurrency)))


async def measure(url: str, workload: Any, concurrency: int) -> dict[str, float]:
  rates, cached = [], []
  async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0),
                                   timeout=aiohttp.ClientTimeout(total=600)) as session:
    for repeat in range(_REPEATS.value + 2):
      client = Client(url, session, repeat)
      started = time.perf_counter()
      await workload(client, concurrency)
      if repeat >= 2:  # the first two compile
        rates.append(client.sampled / (time.perf_counter() - started))
        cached.append(client.cached / client.prompt)
  return {"tokens_per_s": statistics.median(rates), "cached_share": statistics.median(cached)}


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  cfg = ModelConfig(vocab=VOCAB, width=192, layers=4, heads=6, kv_heads=_KV_HEADS.value,
                    head_dim=32, mlp=512)
  params = transformer.init(cfg, 0)
  count = sum(a.size for a in jax.tree.leaves(params))
  conditions = {"parameters": int(count), "width": cfg.width, "layers": cfg.layers,
                "kv_heads": cfg.kv_heads, "vocab": cfg.vocab, "precision": "float32",
                "cores": len(os.sched_getaffinity(0)), "jax": jax.__version__,
                "commit": wiring.commit(),
                "repeats": _REPEATS.value, "missing": ["sglang"]}
  with tempfile.TemporaryDirectory() as directory:
    checkpoint.save_policy(os.path.join(directory, "model"), params, cfg)
    log = os.path.join(directory, "log")
    with ServerProcess(os.path.join(directory, "model"), log=log) as server:
      for workload in (plain, turns):
        for concurrency in map(int, _CONCURRENCY.value):
          got = asyncio.run(measure(server.url, workload, concurrency))
          print(f"{workload.__name__:6} concurrency {concurrency:3}: {got['tokens_per_s']:8.0f} "
                f"tokens/s, {got['cached_share']:.0%} of prompt tokens reused", file=sys.stderr)
          print(json.dumps({
              "benchmark": "server", "metric": "server_tokens_per_s", "unit": "tokens/s",
              "kr": round(got["tokens_per_s"], 1), "peers": {}, "ratios": {},
              "conditions": {**conditions, "workload": workload.__name__,
                             "concurrency": concurrency,
                             "cached_share": round(got["cached_share"], 3)}}), flush=True)


if __name__ == "__main__":
  app.run(main)
