"""What the contract's tests share: talking to a server, and what the learner makes of it."""

import asyncio
import functools
import json
import pathlib

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np

from kr.agent.policy import PolicyClient
from kr.model import hf
from kr.model import transformer
from kr.model.config import ModelConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
START = ROOT / "starts" / "quickstart"  # Whose tokenizer the policies have.
# Heads of 128, as SGLang-JAX wants them. The logits are scaled up: a random policy's are flat.
CFG = ModelConfig(vocab=768, width=64, layers=2, heads=2, kv_heads=2, head_dim=128, mlp=128,
                  qk_norm=True, max_len=1024)
SHARPNESS = 3.0
VOCAB, MAX_LEN = CFG.vocab, 768


def make_policy(path, seed):
  """A small random policy as a Hugging Face directory."""
  params = transformer.init(CFG, seed)
  params["final_norm"] = params["final_norm"] * SHARPNESS
  hf.export(params, CFG, START, path)
  return path


def talk(server, work):
  """The value of work(post, client), where post(path, body) gives (status, JSON or text)."""
  async def whole():
    client = PolicyClient(server.url, backoff_s=0.05)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
      async def post(path, body=None, data=None, method="POST"):
        async with session.request(method, server.url + path, json=body, data=data) as response:
          text = await response.text()
          try:
            return response.status, json.loads(text)
          except ValueError:
            return response.status, text
      try:
        return await work(post, client)
      finally:
        await client.aclose()
  return asyncio.run(whole())


def body(ids, rid=None, tokens=16, **sampling):
  return {"input_ids": ids, "return_logprob": True, **({"rid": rid} if rid else {}),
          "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, **sampling}}


def prompt(seed, length=12):
  return np.random.default_rng(seed).integers(0, VOCAB - 20, length).tolist()


def sampled(answer):
  """(ids, logprobs) of an answer, after a look at whether they belong together."""
  meta = answer["meta_info"]
  ids = [t for _, t, _ in meta["output_token_logprobs"]]
  logprobs = [p for p, _, _ in meta["output_token_logprobs"]]
  assert ids == answer["output_ids"] and meta["completion_tokens"] == len(ids)
  assert all(p <= 0 for p in logprobs)
  return ids, logprobs


def finish(answer):
  return answer["meta_info"]["finish_reason"]["type"]


@functools.partial(jax.jit, static_argnames="cfg")
def forward(params, tokens, segment_ids, cfg):
  x = transformer.forward(params, cfg, tokens, jnp.arange(MAX_LEN)[None], segment_ids)
  return jax.nn.log_softmax(transformer.logits(params, x))


@functools.cache
def policy(path):
  return hf.load(path)


def distribution(path, ids):
  """The learner's own log-probabilities after each of ids [T,V]."""
  params, cfg = policy(path)
  rest = MAX_LEN - len(ids)
  tokens, segment_ids = [*ids, *[0] * rest], [*[1] * len(ids), *[0] * rest]
  return np.asarray(forward(params, jnp.asarray([tokens]), jnp.asarray([segment_ids]), cfg)
                    )[0, :len(ids)]


def reference(path, ids):
  """The learner's own log-probabilities of ids[1:] [T-1]."""
  return distribution(path, ids)[np.arange(len(ids) - 1), ids[1:]]


def assert_sampled_by(path, ids, out, logprobs):
  """Checks that logprobs are those of `out` after `ids` under the policy in `path`."""
  np.testing.assert_allclose(logprobs, reference(str(path), ids + out)[len(ids) - 1:], atol=1e-4)


async def midway(post, act, *, requests=3, tokens=500, partial):
  """act()'s value and the answers of requests that it hit while they were being sampled.

  How fast a server samples is not known: tries other moments until partial(answer) holds for all.
  """
  for n, delay_s in enumerate((0.3, 0.1, 1.0, 0.03, 3.0, 0.01, 6.0, 12.0)):
    tasks = [asyncio.create_task(post("/generate", body(prompt(i), f"m{n}.{i}.", tokens)))
             for i in range(requests)]
    await asyncio.sleep(delay_s)
    value = await act(n)
    answers = await asyncio.gather(*tasks)
    assert all(status == 200 for status, _ in answers)
    if all(partial(answer) for _, answer in answers):
      return value, [answer for _, answer in answers]
  raise AssertionError(f"never hit requests midway; the last: {answers}")


def aborted_with_tokens(answer):
  return finish(answer) == "abort" and answer["output_ids"] != []


def spans(answer):
  return [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]


async def publish(post, path, version, **options):
  return await post("/update_weights_from_disk", {
      "model_path": str(path), "weight_version": version, **options})
