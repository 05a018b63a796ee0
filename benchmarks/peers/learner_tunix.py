"""One update by google-tunix's Llama and an nnx.Optimizer, as its trainer does it.

float32, or bfloat16 for parameters and all else, which is how Tunix loads a model of that type.
Sequences are padded to one length, as its trainers do. Its Llama ignores the config's
rope_theta: the function is given it here, so that it computes the same loss.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import pathlib
import time

from flax import nnx
import jax
import jax.numpy as jnp
import optax
import worker
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as loader


def config(directory: str, remat: bool) -> llama.ModelConfig:
  c = json.loads((pathlib.Path(directory) / "config.json").read_text())
  llama.apply_rope = functools.partial(llama.apply_rope, rope_theta=c["rope_theta"])
  return llama.ModelConfig(
    num_layers=c["num_hidden_layers"], vocab_size=c["vocab_size"], embed_dim=c["hidden_size"],
    hidden_dim=c["intermediate_size"], num_heads=c["num_attention_heads"],
    head_dim=c["head_dim"], num_kv_heads=c["num_key_value_heads"], rope_theta=c["rope_theta"],
    norm_eps=c["rms_norm_eps"], weight_tying=c["tie_word_embeddings"],
    remat_config=llama.RematConfig.DECODER if remat else llama.RematConfig.NONE)


def loss_of(model: llama.Llama3, tokens: jax.Array, coefficients: jax.Array, real: jax.Array
            ) -> jax.Array:
  T = tokens.shape[1]
  positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
  causal = jnp.tril(jnp.ones((T, T), bool))[None] & real[:, None, :]
  logits, _ = model(tokens, positions, None, causal)
  log_p = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
  chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
  return -jnp.sum(coefficients[:, 1:] * chosen)


@functools.partial(nnx.jit, donate_argnames=("model", "optimizer"))
def step(model: llama.Llama3, optimizer: nnx.Optimizer, batch: tuple) -> jax.Array:
  loss, grads = nnx.value_and_grad(loss_of)(model, *batch)
  optimizer.update(model, grads)
  return loss


def main() -> None:
  given = worker.describe()
  batches = worker.padded(given["data"], given["micro_rows"], given["pad_to"])
  cfg = config(given["model"], given["remat"])
  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
  learners = {}

  def learner(precision: str) -> tuple:
    if precision not in learners:
      model = loader.create_model_from_safe_tensors(
        given["model"], cfg, mesh, dtype=getattr(jnp, precision))
      rule = optax.chain(
        optax.clip_by_global_norm(given["clip_norm"]),
        optax.adamw(given["learning_rate"], b1=0.9, b2=0.95,
                    weight_decay=given["weight_decay"]))
      if len(batches) > 1:  # how Tunix accumulates gradients
        rule = optax.MultiSteps(rule, len(batches))
      learners[precision] = model, nnx.Optimizer(model, rule, wrt=nnx.Param)
    return learners[precision]

  def update(precision: str) -> tuple[float, float]:
    model, optimizer = learner(precision)
    start = time.perf_counter()
    total = sum(float(step(model, optimizer, b)) for b in batches)
    jax.block_until_ready(nnx.state(model))
    return total, time.perf_counter() - start

  worker.answer({"tunix": importlib.metadata.version("google-tunix"),
                 "tunix_jax": jax.__version__}, update)


if __name__ == "__main__":
  main()
