"""Sampled tokens per second of kr.serve and of SGLang, over HTTP as the trainer uses them.

  python benchmarks/server.py            all of it: about ten minutes
  python benchmarks/server.py --quick    to see that it works

SGLang takes part where `bash launch/sglang.sh --install` was run: the same checkpoint, one server
beside the other, measured in turns, each idle while the other works. Two workloads with
logprobs, each at several concurrencies: `plain` sends prompts of 64 random tokens and samples
64; `turns` plays trajectories of four turns (a shared question of 100 tokens for each group of
eight, 25 tokens sampled a turn, observations of 10 to 50 tokens), which is what an agent's rollout
asks for. Prints a table, and one JSON object a line. The model is random: its weights do not
matter to speed.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from kr.model import hf  # noqa: E402
from kr.model import transformer  # noqa: E402
from kr.model.config import ModelConfig  # noqa: E402
from kr.rl.server import ServerProcess  # noqa: E402

_REPEATS = flags.DEFINE_integer("repeats", 5, "Measurements per workload; the median counts.", 1)
_CONCURRENCY = flags.DEFINE_list("concurrency", ["1", "16", "64"], "Requests at once.")
_QUICK = flags.DEFINE_bool("quick", False, "One measurement of each, at concurrency 1 and 16.")
_SGLANG_THREADS = flags.DEFINE_integer(
    "sglang_threads", 1, "Threads of SGLang's torch operators, beside its own processes.", 1)
_KV_HEADS = flags.DEFINE_integer("kv_heads", 2, "Key-value heads of the model (6 query heads).", 1)

VOCAB = 2048
_WARM_UP = 4  # runs of each workload: how many rows meet in a batch differs, and each compiles
SGLANG = ROOT / ".venv-sglang" / "kr-sglang.stamp"


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
            "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True}}
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


async def once(url: str, workload: Any, concurrency: int, seed: int) -> tuple[float, float]:
  """(sampled tokens per second, share of the prompts' tokens that were reused) of one run."""
  async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0),
                                   timeout=aiohttp.ClientTimeout(total=600)) as session:
    client = Client(url, session, seed)
    started = time.perf_counter()
    await workload(client, concurrency)
    return client.sampled / (time.perf_counter() - started), client.cached / client.prompt


def measure(servers: dict[str, ServerProcess], workload: Any, concurrency: int, repeats: int
            ) -> dict[str, tuple[float, float]]:
  """What `once` gives for each server, the medians."""
  got: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
  for repeat in range(-_WARM_UP, repeats):  # the first ones compile, and are not counted
    for name, server in servers.items():
      found = asyncio.run(once(server.url, workload, concurrency, repeat + _WARM_UP))
      if repeat >= 0:
        got[name].append(found)
  return {name: tuple(map(statistics.median, zip(*runs))) for name, runs in got.items()}


def report(got: dict[str, tuple[float, float]], workload: Any, concurrency: int,
           conditions: dict[str, Any]) -> None:
  """A line for a person, and one for a program."""
  for name, (rate, cached) in got.items():
    print(f"{workload.__name__:6} concurrency {concurrency:3}  {name:6} {rate:8.0f} tokens/s, "
          f"{cached:.0%} of prompt tokens reused", file=sys.stderr)
  peers = {name: round(rate, 1) for name, (rate, _) in got.items() if name != "kr"}
  print(json.dumps({
      "benchmark": "server", "metric": "server_tokens_per_s", "unit": "tokens/s",
      "kr": round(got["kr"][0], 1), "peers": peers,
      "ratios": {name: round(got["kr"][0] / rate, 3) for name, rate in peers.items()},
      "conditions": {**conditions, "workload": workload.__name__, "concurrency": concurrency,
                     "cached_share": {name: round(c, 3) for name, (_, c) in got.items()}},
  }), flush=True)


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  cfg = ModelConfig(vocab=VOCAB, width=192, layers=4, heads=6, kv_heads=_KV_HEADS.value,
                    head_dim=32, mlp=512, max_len=1024)
  params = transformer.init(cfg, 0)
  repeats = 1 if _QUICK.value else _REPEATS.value
  concurrencies = [1, 16] if _QUICK.value else [int(n) for n in _CONCURRENCY.value]
  peers = ["sglang"] if SGLANG.is_file() else []
  conditions = {
      "parameters": int(sum(a.size for a in jax.tree.leaves(params))), "width": cfg.width,
      "layers": cfg.layers, "kv_heads": cfg.kv_heads, "vocab": cfg.vocab, "precision": "float32",
      "threads": {"kr": len(os.sched_getaffinity(0)), "sglang": _SGLANG_THREADS.value},
      "cores": len(os.sched_getaffinity(0)), "jax": jax.__version__,
      "versions": {"sglang": SGLANG.read_text().split()[0]} if peers else {},
      "commit": wiring.commit(), "repeats": repeats, "missing": [] if peers else ["sglang"]}
  with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
    model = pathlib.Path(directory) / "model"
    hf.export(params, cfg, ROOT / "starts" / "quickstart", model)
    servers = {name: stack.enter_context(ServerProcess(
        model, kind=name, log=pathlib.Path(directory) / f"{name}.log", start_timeout_s=600,
        env={"OMP_NUM_THREADS": str(_SGLANG_THREADS.value)} if name == "sglang" else {}))
        for name in ["kr", *peers]}
    for workload in (plain, turns):
      for concurrency in concurrencies:
        report(measure(servers, workload, concurrency, repeats), workload, concurrency, conditions)


if __name__ == "__main__":
  app.run(main)
