"""How fast kr's decoder samples SmolLM2-135M, against transformers' `generate` on torch.

  python benchmarks/decode.py           batches of 1, 8, 32, prompts of 64 and 1,024: half an hour
  python benchmarks/decode.py --quick   a two-layer model, to see that it works

kr is the server's engine, in process: it samples at temperature 1 and gives the logprob of every
token; torch samples likewise, in float32 and in bfloat16, and need not give any. The variants
alternate; medians count. Decoding excludes the prompt: kr's is put into the cache by a request
without output, torch's clock starts at its first token. Prints a table, and JSON lines:
`decode_tokens_per_s` and `prefill_tokens_per_s`, whose peer is torch in its faster precision. For
batch 1, `bandwidth_bound` is the tokens/s at which reading the weights once a token, and the
cache, would take all of the measured memory bandwidth.
"""

from __future__ import annotations

from concurrent.futures import wait
import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any, Callable

from absl import app
from absl import flags
from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kr import wiring  # noqa: E402
from kr.model import hf  # noqa: E402
from kr.model import transformer  # noqa: E402
from kr.model.config import ModelConfig  # noqa: E402
from kr.model.engine import Engine  # noqa: E402
from kr.model.request import Request  # noqa: E402

_MODEL = flags.DEFINE_string(
  "model", str(ROOT / "starts" / "smollm2"), "Hugging Face directory; without it, random weights.")
_BATCH = flags.DEFINE_list("batch", ["1", "8", "32"], "Sequences at once.")
_PROMPT = flags.DEFINE_list("prompt", ["64", "1024"], "Tokens of a prompt.")
_NEW = flags.DEFINE_integer("new_tokens", 64, "Tokens sampled for each prompt.", 2)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Measurements a variant; the median counts.", 1)
_QUICK = flags.DEFINE_bool("quick", False, "Two small layers, once: no numbers to quote.")
_TORCH = flags.DEFINE_list("torch", ["float32", "bfloat16"], "Precisions of torch; empty: none.")

SMOLLM2 = ModelConfig(
  vocab=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536, rope_theta=1e5,
  norm_eps=1e-5, tied=True, max_len=2048, family="llama", qk_norm=False)
SMALL = dataclasses.replace(SMOLLM2, vocab=512, width=64, layers=2, heads=2, kv_heads=1,
                            head_dim=32, mlp=128)
Seconds = tuple[float, float]  # of the prompt, and of a token (of every sequence)


class Kr:
  """The engine with one slot for each sequence of the batch."""

  def __init__(self, params: Any, cfg: ModelConfig, batch: int, prompt: int, new: int):
    self._engine = Engine(params, cfg, slots=batch, max_len=prompt + new)
    self._new = new

  def __call__(self, prompts: np.ndarray) -> Seconds:
    self._engine.flush().result()
    prefill = self._run(prompts, 0)
    return prefill, self._run(prompts, self._new) / self._new

  def _run(self, prompts: np.ndarray, new: int) -> float:
    requests = [Request(f"r{i}", ids.tolist(), max_new_tokens=new)
                for i, ids in enumerate(prompts)]
    started = time.perf_counter()
    self._engine.pause("in_place")  # all arrive before the first is taken up
    futures = [self._engine.submit(r) for r in requests]
    self._engine.resume()
    wait(futures)
    jax.block_until_ready(self._engine._device._cache)  # a prompt's last chunk is not waited for
    seconds = time.perf_counter() - started
    assert all(len(f.result().logprobs) == new for f in futures)
    return seconds

  def close(self) -> None:
    self._engine.stop()


class Torch:
  """transformers' `generate`, with sdpa attention and its default cache."""

  def __init__(self, directory: str, cfg: ModelConfig, precision: str, new: int):
    import torch
    import transformers
    dtype = getattr(torch, precision)
    if directory:
      self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    else:
      self._model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**hf_config(cfg))).to(dtype)
    self._model.eval()
    self._torch, self._new = torch, new

  def __call__(self, prompts: np.ndarray) -> Seconds:
    torch, times = self._torch, []
    ids = torch.from_numpy(prompts).long()

    def clock(input_ids, scores, **kwargs):  # a stopping criterion, asked after every token
      times.append(time.perf_counter())
      return torch.zeros(len(input_ids), dtype=torch.bool)

    started = time.perf_counter()
    with torch.inference_mode():
      out = self._model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
        top_p=1.0, max_new_tokens=self._new, min_new_tokens=self._new, pad_token_id=0,
        stopping_criteria=[clock])
    assert out.shape[1] == ids.shape[1] + self._new
    return times[0] - started, (times[-1] - times[0]) / (self._new - 1)


def hf_config(c: ModelConfig) -> dict[str, Any]:
  """As the arguments of transformers' LlamaConfig."""
  return {"vocab_size": c.vocab, "hidden_size": c.width, "num_hidden_layers": c.layers,
          "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
          "intermediate_size": c.mlp, "rope_theta": c.rope_theta, "rms_norm_eps": c.norm_eps,
          "max_position_embeddings": c.max_len, "tie_word_embeddings": c.tied}


def bandwidth() -> float:
  """Bytes/s at which all threads together read an array that no cache holds: the best of
  several reads, by a sum and by matrix-vector products."""
  a = jnp.ones((2 ** 17, 1024), jnp.float32)  # 512 MiB
  reads: list[Callable[[], Any]] = [
    lambda f=jax.jit(jnp.sum): f(a),
    lambda f=jax.jit(lambda a, x: a @ x), x=jnp.ones(a.shape[1]): f(a, x),
    lambda f=jax.jit(lambda a, x: x @ a), x=jnp.ones(a.shape[0]): f(a, x)]
  best = float("inf")
  for read in reads * 6:
    started = time.perf_counter()
    jax.block_until_ready(read())
    best = min(best, time.perf_counter() - started)
  return a.nbytes / best


def conditions(cfg: ModelConfig, directory: str, missing: list[str]) -> dict[str, Any]:
  out = {"model": directory and os.path.basename(directory) or "random weights",
         "layers": cfg.layers, "width": cfg.width, "vocab": cfg.vocab, "precision": "float32",
         "threads": len(os.sched_getaffinity(0)), "jax": jax.__version__,
         "commit": wiring.commit(), "missing": missing}
  if "torch" not in missing:
    import torch
    import transformers
    out |= {"torch": torch.__version__, "transformers": transformers.__version__,
            "torch_threads": torch.get_num_threads()}
  return out


def report(metric: str, rates: dict[str, float], about: dict[str, Any]) -> None:
  """Prints one JSON object. rates: tokens/s of `kr` and of each precision of torch."""
  torch = {name: rate for name, rate in rates.items() if name != "kr"}
  best = max(torch, key=torch.get, default="")
  peers = {"torch": round(torch[best], 1)} if best else {}
  print(json.dumps({
    "benchmark": "decode", "metric": metric, "unit": "tokens/s", "kr": round(rates["kr"], 1),
    "peers": peers, "ratios": {"torch": round(rates["kr"] / torch[best], 3)} if best else {},
    "conditions": {**about, "torch_precision": best,
                   "torch_all": {name: round(rate, 1) for name, rate in torch.items()}}}),
    flush=True)


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  quick = _QUICK.value
  directory = _MODEL.value if os.path.isdir(_MODEL.value) and not quick else ""
  cfg = SMALL if quick else SMOLLM2
  params, cfg = hf.load(directory) if directory else (transformer.init(cfg), cfg)
  prompts_of, batches = ([16], [2]) if quick else (map(int, _PROMPT.value), _BATCH.value)
  new, repeats = (4, 1) if quick else (_NEW.value, _REPEATS.value)
  missing = ["tunix"]
  if not importlib.util.find_spec("torch") or not importlib.util.find_spec("transformers"):
    missing.append("torch")
  torch = {p: Torch(directory, cfg, p, new) for p in _TORCH.value if p and "torch" not in missing}
  about = {**conditions(cfg, directory, missing), "new_tokens": new, "repeats": repeats,
           "quick": quick}
  speed = bandwidth()
  weight_bytes = sum(a.size * 4 for a in jax.tree.leaves(params))
  rng = np.random.default_rng(0)
  for prompt in prompts_of:
    for batch in map(int, batches):
      variants: dict[str, Any] = {"kr": Kr(params, cfg, batch, prompt, new), **torch}
      seconds: dict[str, list[Seconds]] = {name: [] for name in variants}
      for repeat in range(-1, repeats):  # the first compiles
        prompts = rng.integers(0, cfg.vocab, (batch, prompt)).astype(np.int32)
        for name, variant in variants.items():
          got = variant(prompts)
          if repeat >= 0:
            seconds[name].append(got)
      variants["kr"].close()
      decode = {n: batch / statistics.median(t for _, t in s) for n, s in seconds.items()}
      prefill = {n: batch * prompt / statistics.median(t for t, _ in s) for n, s in seconds.items()}
      cache = (prompt + new / 2) * cfg.layers * cfg.kv_heads * (cfg.key_dim + cfg.value_dim) * 4
      here = {**about, "batch": batch, "prompt_tokens": prompt,
              "bandwidth_gb_per_s": round(speed / 1e9, 1),
              "bandwidth_bound": round(batch * speed / (weight_bytes + batch * cache), 1)}
      print(f"prompt {prompt:5} batch {batch:3}: " + ", ".join(
        f"{n} {decode[n]:.1f} (prompt {prefill[n]:.0f})" for n in variants)
        + f" tokens/s; bound by bandwidth {here['bandwidth_bound']}", file=sys.stderr)
      report("decode_tokens_per_s", decode, here)
      report("prefill_tokens_per_s", prefill, here)


if __name__ == "__main__":
  app.run(main)
