"""Peak resident memory of the learner against vocabulary and length, on CPU.

  python benchmarks/memory.py           everything: about a quarter of an hour on two cores
  python benchmarks/memory.py --quick   the smallest points, to see that it works

`loss` is the loss with its gradient, `step` a whole update with AdamW. Each point is a fresh
process: one run compiles, then freed memory is given back and the kernel's high-water mark
reset (Linux); reported is the mark after a second run, less what was resident before it:
parameters and optimizer are not counted, gradients are. Three questions: what the head costs, its
logits in chunks or whole; what a layer's activations cost, recomputed or stored; and how
memory grows with one segment of 8,192 to 131,072 tokens. Prints a table and JSON lines.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from absl import app
from absl import flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_QUICK = flags.DEFINE_bool("quick", False, "The smallest points only: no numbers to quote.")
_PARTS = flags.DEFINE_list("parts", ["head", "layers", "length"], "Which questions to ask.")
_POINT = flags.DEFINE_string("point", None, "JSON of one point, measured in this process.")

SMALL = {"width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "mlp": 128}


# -------------------------------------------------------------------- one point, in its process


def batch_of(tokens: int, vocab: int, trained: str, segment: int) -> Any:
  """One row, segments of `segment` tokens; all trained, or a fifth: runs of 64 in 320."""
  import numpy as np

  from kr.rl.batch import Batch
  at = np.arange(tokens)
  starts = at % segment == 0
  mask = ~starts if trained == "all" else at % 320 >= 256
  row = lambda a, kind: np.asarray(a, kind)[None]
  return Batch(
    tokens=row(np.random.default_rng(0).integers(0, vocab, tokens), np.int32),
    positions=row(at % segment, np.int32), segment_ids=row(at // segment + 1, np.int32),
    mask=row(mask, np.int32), advantages=row(mask, np.float32),
    logprobs=row(mask * 0.0, np.float32), weights=row(mask, np.float32),
    versions=row(mask - 1, np.int32))


def resident(key: str) -> int:
  """VmRSS (now) or VmHWM (high-water mark) of this process, bytes."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(key + ":"):
      return int(line.split()[1]) * 1024
  raise SystemExit("benchmarks/memory.py needs Linux's /proc")


def measure(point: dict[str, Any]) -> dict[str, float]:
  """{"peak_bytes", "seconds", "loss"} of the second run of a point."""
  import jax

  from kr.model import transformer
  from kr.model.config import Execution, ModelConfig
  from kr.rl import loss as loss_lib
  from kr.rl.learner import Learner, micro_batches
  from kr.rl.optim import make_optimizer
  cfg = ModelConfig(vocab=point["vocab"], max_len=point["tokens"], **point["model"])
  how = Execution(remat=point["remat"], head_chunk=point["head_chunk"],
                  precision=point["precision"], scan=point["scan"])
  batch = lambda segment: batch_of(point["tokens"], point["vocab"], point["trained"], segment)
  params = transformer.init(cfg)
  if point["what"] == "step":
    learner = Learner(cfg, params, make_optimizer(1e-4, 1, 1.0, 0.1), micro_rows=1, how=how)
    del params
    run = lambda b: learner.update(b)["loss"]
  else:
    f = jax.jit(jax.value_and_grad(loss_lib.reinforce, has_aux=True), static_argnums=(1, 3))

    def run(b: Any) -> float:
      (loss, _), grads = f(params, cfg, next(micro_batches(b, 1)), how)
      jax.block_until_ready(grads)
      return float(loss)

  run(batch(min(point["tokens"], 1024)))  # compiles; attention over short segments is quick
  long = batch(point["tokens"])
  ctypes.CDLL(None).malloc_trim(0)
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  before, start = resident("VmRSS"), time.perf_counter()
  loss = run(long)
  return {"peak_bytes": resident("VmHWM") - before, "seconds": time.perf_counter() - start,
          "loss": loss}


# -------------------------------------------------------------------- the questions


def ask(**point: Any) -> dict[str, float]:
  point = {"model": SMALL, "what": "loss", "remat": "block", "head_chunk": 512,
           "precision": "float32", "scan": False, "trained": "all", **point}
  done = subprocess.run([sys.executable, __file__, f"--point={json.dumps(point)}"],
                        stdout=subprocess.PIPE, text=True)
  if done.returncode:
    raise SystemExit(f"the point {point} failed; its message is above")
  return json.loads(done.stdout.splitlines()[-1])


def mib(result: dict[str, float]) -> float:
  return round(result["peak_bytes"] / 2**20, 1)


def say(metric: str, kr: float, peers: dict[str, float], **conditions: Any) -> None:
  import jax
  from kr import wiring
  at = ", ".join(f"{k} {v}" for k, v in conditions.items())
  others = "".join(f"   {k} {v:.1f}" for k, v in peers.items())
  print(f"{metric}: {at}: {kr:.1f} MiB{others}", file=sys.stderr)
  print(json.dumps({
    "benchmark": "memory", "metric": metric, "unit": "MiB", "kr": kr, "peers": peers,
    "ratios": {k: round(v / kr, 2) for k, v in peers.items()},
    "conditions": {**conditions, "precision": "float32", "threads": len(os.sched_getaffinity(0)),
                   "jax": jax.__version__, "quick": _QUICK.value,
                   "commit": wiring.commit(), "missing": []}}), flush=True)


def head(quick: bool) -> None:
  """Vocabulary × length: kr's chunks of 512 tokens against whole logits."""
  for vocab in (8192,) if quick else (8192, 32768, 65536):
    for tokens in (1024,) if quick else (1024, 4096):
      for what in ("loss",) if quick else ("loss", "step"):
        chunks = ask(vocab=vocab, tokens=tokens, what=what)
        whole = ask(vocab=vocab, tokens=tokens, what=what, head_chunk=tokens)
        say("head_peak_mib", mib(chunks), {"whole_logits": mib(whole)}, what=what, vocab=vocab,
            tokens=tokens, model=SMALL, head_chunk=512)


def layers(quick: bool) -> None:
  """Length: layers recomputed from their input against everything stored.

  Scanned: with jax 0.10 on CPU, XLA undoes the recomputation of unrolled layers.
  """
  model = {**SMALL, "layers": 8} if quick else {"width": 256, "layers": 12, "heads": 4,
                                                "kv_heads": 2, "head_dim": 64, "mlp": 768}
  for tokens in (4096,) if quick else (1024, 4096, 16384):
    for what in ("loss",) if quick else ("loss", "step"):
      block, none = (ask(vocab=2048, tokens=tokens, what=what, model=model, remat=remat,
                         scan=True)
                     for remat in ("block", "none"))
      say("layers_peak_mib", mib(block), {"no_remat": mib(none)}, what=what, tokens=tokens,
          vocab=2048, model=model, scan=True)


def length(quick: bool) -> None:
  """One segment of a small model takes a step; a fifth of its tokens is trained."""
  first = None
  for tokens in (1024, 2048) if quick else (8192, 16384, 32768, 65536, 131072):
    got = ask(vocab=2048, tokens=tokens, what="step", trained="fifth")
    first = first or (tokens, mib(got))
    say("step_peak_mib", mib(got), {}, tokens=tokens, vocab=2048, model=SMALL,
        trained_share=0.2, seconds=round(got["seconds"], 1),
        growth_per_growth_of_length=round(mib(got) / first[1] / (tokens / first[0]), 2))


def main(argv: list[str]) -> None:
  del argv
  if _POINT.value:
    print(json.dumps(measure(json.loads(_POINT.value))))
    return
  for part in _PARTS.value:
    {"head": head, "layers": layers, "length": length}[part](_QUICK.value)


if __name__ == "__main__":
  app.run(main)
