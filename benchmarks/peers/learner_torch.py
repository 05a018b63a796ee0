"""One update by transformers on torch: sdpa, fused AdamW, float32 or bfloat16 autocast."""

from __future__ import annotations

import contextlib
import time

import torch
import transformers
import worker


def main() -> None:
  given = worker.describe()
  torch.set_num_threads(given["threads"])
  batches = [tuple(map(torch.from_numpy, b))
             for b in worker.padded(given["data"], given["micro_rows"], 0)]
  learners = {}

  def learner(precision: str) -> tuple:
    if precision not in learners:
      model = transformers.AutoModelForCausalLM.from_pretrained(
        given["model"], dtype=torch.float32, attn_implementation="sdpa").train()
      learners[precision] = model, torch.optim.AdamW(
        model.parameters(), given["learning_rate"], betas=(0.9, 0.95), eps=1e-8,
        weight_decay=given["weight_decay"], fused=True)
    return learners[precision]

  def update(precision: str) -> tuple[float, float]:
    model, optimizer = learner(precision)
    autocast = (torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16"
                else contextlib.nullcontext())
    start, total = time.perf_counter(), 0.0
    optimizer.zero_grad(set_to_none=True)
    for tokens, coefficients, real in batches:
      tokens = tokens.long()
      mask = None if real.all() else real.long()  # without one, sdpa knows that it is causal
      with autocast:
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
      nll = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
      loss = torch.dot(nll, coefficients[:, 1:].flatten())
      loss.backward()
      total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), given["clip_norm"])
    optimizer.step()
    return total, time.perf_counter() - start

  worker.answer({"torch": torch.__version__, "transformers": transformers.__version__}, update)


if __name__ == "__main__":
  main()
