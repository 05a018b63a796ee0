"""One update of SmolLM2-135M on CPU: kr's learner against torch and google-tunix.

  python benchmarks/learner.py                  four rows of 512 tokens, all of them trained
  python benchmarks/learner.py --trajectories   agents' trajectories: 20 % trained, long-tailed
  python benchmarks/learner.py --quick          a two-layer model, to see that it works

An update is forward, backward, global-norm clip and AdamW. Every learner runs in a process of its
own on the same weights and tokens. kr meets one peer at a time (all together would not fit in 24
GB), one update each in turn; the first two do not count (Tunix compiles in both); medians.
float32 and each one's mixed precision: kr's bfloat16 products, torch's autocast, Tunix' bfloat16
model. In float32 all first losses must agree to 1e-4 a token, or nothing is reported.
`share_of_gemm_peak`: the update's floating point operations (padding not counted) at its speed,
over those of the fastest large product measured here in jax and torch in that precision. Weights:
`bash launch/smollm2.sh`; without them, random ones of the same shape. Tunix needs `bash
launch/peers.sh`.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kr import wiring  # noqa: E402
from kr.model import heap  # noqa: E402

PEERS = pathlib.Path(__file__).resolve().parent / "peers"

_TRAJECTORIES = flags.DEFINE_bool("trajectories", False, "A realistic batch, padded by peers.")
_QUICK = flags.DEFINE_bool("quick", False, "Two small layers, one repeat: no numbers to quote.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Measured updates a variant; the median counts.", 1)
_MODEL = flags.DEFINE_string("model", str(ROOT / "starts" / "smollm2"), "Hugging Face directory.")
_COUNT = flags.DEFINE_integer("count", 16, "Trajectories in a batch.", 1)
_LONGEST = flags.DEFINE_integer("longest", 1024, "Tokens of the longest trajectory.", 64)
_VARIANTS = flags.DEFINE_list(
  "variants", ["kr:float32", "kr:mixed", "torch:float32", "torch:bfloat16", "tunix:float32",
               "tunix:bfloat16"], "What to measure.")

SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
         "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
         "rope_theta": 1e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
         "max_position_embeddings": 8192, "hidden_act": "silu", "attention_bias": False,
         "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
Sequence = tuple[np.ndarray, np.ndarray]  # tokens, and the coefficient of each one's log p


# -------------------------------------------------------------------- what is learned


def rows(vocab: int, count: int = 4, length: int = 512) -> list[Sequence]:
  """Random tokens, all trained but the first of each row; the loss is their mean."""
  rng = np.random.default_rng(0)
  coefficients = np.full(length, 1 / (count * (length - 1)), np.float32)
  coefficients[0] = 0
  return [(rng.integers(0, vocab, length), coefficients) for _ in range(count)]


def trajectories(vocab: int, count: int, longest: int) -> list[Sequence]:
  """Question, then turns of sampled tokens and an observation about four times as long.

  Lengths are log-normal with a median of a fifth of the longest, which one trajectory has.
  """
  rng = np.random.default_rng(0)
  lengths = np.exp(rng.normal(np.log(longest / 5), 0.7, count)).astype(int)
  lengths = np.clip(lengths, longest // 16, longest)
  lengths[rng.integers(count)] = longest
  out = []
  for length in lengths:
    coefficients, at = np.zeros(length, np.float32), longest // 20
    advantage = rng.normal()
    while at < length:
      turn = int(rng.integers(longest // 64, longest // 24))
      coefficients[at:at + turn] = advantage / count
      advantage *= 0.95
      at += turn + int(turn * rng.uniform(3, 5))
    out.append((rng.integers(0, vocab, length), coefficients))
  return out


def directory_of_weights(into: pathlib.Path, small: bool) -> tuple[str, dict[str, Any]]:
  """(directory, its config): the given one, or random weights of SmolLM2's shape."""
  given = pathlib.Path(_MODEL.value)
  if not small and (given / "config.json").exists():
    return str(given), json.loads((given / "config.json").read_text())
  from kr.model import hf
  from kr.model import transformer
  from safetensors.numpy import save_file
  config = {**SHAPE, **(SMALL if small else {})}
  (into / "config.json").write_text(json.dumps(config))
  cfg = hf.read_config(into)
  tensors = hf.to_tensors(transformer.init(cfg), cfg)
  save_file({k: np.ascontiguousarray(a) for k, a in tensors.items()},
            into / "model.safetensors", {"format": "pt"})
  return str(into), config


# -------------------------------------------------------------------- measuring


class Worker:
  """A learner in its own process and environment."""

  def __init__(self, python: str, script: str, given: dict[str, Any], directory: pathlib.Path):
    path = directory / f"{script}.json"
    path.write_text(json.dumps(given))
    self._process = subprocess.Popen(
      [python, str(PEERS / f"{script}.py"), str(path)], stdin=subprocess.PIPE,
      stdout=subprocess.PIPE, text=True, env=heap.environment())  # as kr.train does
    self.script, self.versions = script, self._read()

  def _read(self) -> dict[str, Any]:
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(f"{self.script} stopped; its message is above")
    return json.loads(line)

  def update(self, precision: str) -> dict[str, float]:
    self._process.stdin.write(precision + "\n")
    self._process.stdin.flush()
    return self._read()

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def gemm_peaks(small: bool) -> dict[str, float]:
  """FLOP/s of the fastest of two large products, by framework and precision."""
  import jax
  import jax.numpy as jnp
  out: dict[str, float] = {}

  def best(name: str, product: Any, flops: int) -> None:
    product()
    times = []
    for _ in range(1 if small else 15):
      start = time.perf_counter()
      product()
      times.append(time.perf_counter() - start)
    out[name] = max(out.get(name, 0), flops / min(times))

  shapes = [(128, 128, 128)] if small else [(2048, 2048, 2048), (2048, 576, 1536)]
  dot = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
  for n, k, m in shapes:
    for kind in ("float32", "bfloat16"):
      a, b = jnp.ones((n, k), kind), jnp.ones((k, m), kind)
      best(f"jax_{kind}", lambda: dot(a, b).block_until_ready(), 2 * n * k * m)
      try:
        import torch
      except ImportError:
        continue
      torch.set_num_threads(threads())
      x, y = (torch.ones(s, dtype=getattr(torch, kind)) for s in ((n, k), (k, m)))
      best(f"torch_{kind}", lambda: x @ y, 2 * n * k * m)
  return out


def flops(config: dict[str, Any], sequences: list[Sequence]) -> float:
  """Of one update, forward and twice that backward: products with parameters, the head for
  trained tokens only, and causal attention."""
  D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
  h, L = config["head_dim"], config["num_hidden_layers"]
  H, K = config["num_attention_heads"], config["num_key_value_heads"]
  lengths = np.array([len(tokens) for tokens, _ in sequences], float)
  trained = sum(int(np.count_nonzero(c)) for _, c in sequences)
  layer = lengths.sum() * (2 * D * (H + K) * h + 3 * D * F) + (lengths**2).sum() * H * h
  return 6 * (L * layer + trained * D * V)


def threads() -> int:
  return len(os.sched_getaffinity(0))


# -------------------------------------------------------------------- the run


def settings(directory: pathlib.Path, model: str, sequences: list[Sequence]
             ) -> dict[str, tuple[str, dict[str, Any]]]:
  """Each learner's python, and what its worker is told; writes the tokens beside."""
  np.savez(directory / "data.npz", tokens=np.concatenate([t for t, _ in sequences]),
           coefficients=np.concatenate([c for _, c in sequences]),
           lengths=[len(t) for t, _ in sequences])
  longest, long = max(len(t) for t, _ in sequences), _TRAJECTORIES.value
  common = {"model": model, "data": str(directory / "data.npz"), "threads": threads(),
            "learning_rate": 1e-5, "clip_norm": 1.0, "weight_decay": 0.1}
  # Tunix accumulates over micro-batches of one sequence: the full logits and plain attention of
  # more do not fit in memory.
  return {
    "kr": (sys.executable, {**common, "row_tokens": longest, "row_buckets": 2 if long else 1,
                            "micro_rows": 1 if long else 4, "remat": "none"}),
    "torch": (sys.executable, {**common, "micro_rows": 4}),
    "tunix": (str(ROOT / ".venv-peers" / "bin" / "python"),
              {**common, "micro_rows": 1 if long else 4, "pad_to": longest, "remat": False}),
  }


def installed(name: str) -> bool:
  import importlib.util
  if name == "torch":
    return all(importlib.util.find_spec(m) for m in ("torch", "transformers"))
  return name == "kr" or (ROOT / ".venv-peers" / "bin" / "python").exists()


def match(names: list[str], told: dict[str, Any], directory: pathlib.Path, repeats: int
          ) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
  """({variant: median seconds}, {variant: first loss}, versions) of learners in turn."""
  workers = {n: Worker(told[n][0], f"learner_{n}", told[n][1], directory) for n in names}
  variants = [v for v in _VARIANTS.value if v.split(":")[0] in workers]
  run = lambda v: workers[v.split(":")[0]].update(v.split(":")[1])
  first = {v: run(v)["loss"] for v in variants}
  seconds: dict[str, list[float]] = {v: [] for v in variants}
  for repeat in range(repeats + 1):
    for v in variants:
      taken = run(v)["seconds"]
      if repeat:
        seconds[v].append(taken)
        print(f"update {repeat} of {repeats}: {v} {taken:.2f} s", file=sys.stderr)
  for w in workers.values():
    w.close()
  return ({v: statistics.median(s) for v, s in seconds.items()}, first,
          {k: x for w in workers.values() for k, x in w.versions.items()})


def check_losses(first: dict[str, float], sequences: list[Sequence]) -> float:
  """The largest difference among the float32 losses, per unit of coefficient."""
  scale = sum(float(np.abs(c).sum()) for _, c in sequences)
  exact = {v: loss for v, loss in first.items() if v.endswith(":float32")}
  gap = (max(exact.values()) - min(exact.values())) / scale if exact else 0.0
  if not gap <= 1e-4:
    raise SystemExit(f"the float32 losses differ by {gap:.1e} a token, so these are not the "
                     f"same updates: {exact}")
  return gap


def report(matches: list[dict[str, float]], first: dict[str, float], sequences: list[Sequence],
           config: dict[str, Any], peaks: dict[str, float], conditions: dict[str, Any]) -> None:
  """matches: {variant: median seconds} of each. kr's speed is the median over them."""
  tokens, work = sum(len(t) for t, _ in sequences), flops(config, sequences)
  seconds = {v: statistics.median(m[v] for m in matches if v in m) for v in first}
  shares = {}
  for v, s in seconds.items():
    kind = "float32" if v.endswith(":float32") else "bfloat16"
    shares[v] = work / s / max(p for name, p in peaks.items() if name.endswith(kind))
    print(f"{v:16} {tokens / s:8.1f} tokens/s  {shares[v]:5.1%} of the {kind} product's peak  "
          f"loss {first[v]:.6f}", file=sys.stderr)

  def best(name: str, of: dict[str, float]) -> float:
    return min(s for v, s in of.items() if v.startswith(name + ":"))

  peers, ratios = {}, {}
  for m in matches:
    for name in {v.split(":")[0] for v in m} - {"kr"}:
      peers[name] = round(tokens / best(name, m), 1)
      ratios[name] = round(best(name, m) / best("kr", m), 2)
  metric = "trajectory_tokens_per_s" if _TRAJECTORIES.value else "update_tokens_per_s"
  print(json.dumps({
    "benchmark": "learner", "metric": metric, "unit": "tokens/s",
    "kr": round(tokens / best("kr", seconds), 1), "peers": peers, "ratios": ratios,
    "conditions": {
      **conditions, "precision": "each learner's best", "trained_share": round(
        sum(int(np.count_nonzero(c)) for _, c in sequences) / tokens, 3), "tokens": tokens,
      "tokens_per_s": {v: round(tokens / s, 1) for v, s in seconds.items()},
      "share_of_gemm_peak": {k: round(x, 3) for k, x in shares.items()},
      "gemm_peak_gflops": {k: round(x / 1e9, 1) for k, x in peaks.items()}}}), flush=True)


def main(argv: list[str]) -> None:
  del argv
  quick, long = _QUICK.value, _TRAJECTORIES.value
  repeats = 1 if quick else _REPEATS.value
  wanted = list(dict.fromkeys(v.split(":")[0] for v in _VARIANTS.value))
  present = [name for name in wanted if installed(name)]
  if "kr" not in present:
    raise SystemExit("--variants needs at least one of kr's: the others are compared to it")
  with tempfile.TemporaryDirectory() as text:
    directory = pathlib.Path(text)
    model, config = directory_of_weights(directory, quick)
    peaks = gemm_peaks(quick)
    if long:
      count, longest = (4, 64) if quick else (_COUNT.value, _LONGEST.value)
      sequences = trajectories(config["vocab_size"], count, longest)
    else:
      sequences = rows(config["vocab_size"], *((2, 32) if quick else ()))
    told = settings(directory, model, sequences)
    peers = [name for name in present if name != "kr"]
    results = [match(["kr", *peer], told, directory, repeats)
               for peer in ([[p] for p in peers] or [[]])]
  first = {v: loss for _, losses, _ in results for v, loss in losses.items()}
  lengths = sorted(len(t) for t, _ in sequences)
  report([seconds for seconds, _, _ in results], first, sequences, config, peaks, {
    "model": pathlib.Path(model).name if model == _MODEL.value else "random weights",
    "layers": config["num_hidden_layers"], "width": config["hidden_size"],
    "rows": len(lengths), "lengths": lengths, "threads": threads(),
    "malloc": heap.HUGE_PAGES,
    **{k: x for _, _, versions in results for k, x in versions.items()},
    "loss_gap": float(f"{check_losses(first, sequences):.1e}"), "repeats": repeats,
    "quick": quick, "commit": wiring.commit(), "missing": sorted(set(wanted) - set(present))})


if __name__ == "__main__":
  app.run(main)
