"""The engine: everyone gets the result of running alone, whatever else happens meanwhile."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kr.model import device
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.model.engine import Engine, EngineError
from kr.model.request import Request

CFG = ModelConfig(vocab=61, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=32)
OLD = jax.tree.map(lambda a: a * 1.5, transformer.init(CFG, 3))
NEW = jax.tree.map(lambda a: a * 1.5, transformer.init(CFG, 4))
WAIT_S = 60


@jax.jit
def _logits(params, tokens):
  positions = jnp.arange(tokens.shape[1])[None]
  return transformer.logits(
      params, transformer.forward(params, CFG, tokens, positions, jnp.ones_like(tokens)))


def logprobs(tokens, params=OLD):
  """Independent reference: log p of each token but the first, by the learner's full forward."""
  padded = np.zeros((1, 128), np.int32)
  padded[0, :len(tokens)] = tokens
  logits = np.asarray(_logits(params, padded), np.float64)[0, :len(tokens) - 1]
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  return logp[np.arange(len(tokens) - 1), tokens[1:]]


def prompt(seed, n):
  return np.random.default_rng(seed).integers(0, 61, n).tolist()


@pytest.fixture(name="engine")
def fixture_engine():
  engine = Engine(OLD, CFG, slots=8, max_len=100, steps=4)
  yield engine
  engine.stop()


def together(engine, requests):
  """Submits all of them before the engine sees any: as many as it has slots begin at once."""
  engine.pause("in_place").result(WAIT_S)
  futures = [engine.submit(r) for r in requests]
  engine.resume().result(WAIT_S)
  return futures


class Gate:
  """Lets decode calls through one by one, so that a test decides what comes between."""

  def __init__(self, engine):
    self._entered, self._permits = threading.Semaphore(0), threading.Semaphore(0)
    self._open = False
    decode = engine._device.decode

    def gated(*args):
      if not self._open:
        self._entered.release()
        self._permits.acquire()
      return decode(*args)

    engine._device.decode = gated

  def wait(self):
    """Until the engine stands before a decode call."""
    assert self._entered.acquire(timeout=WAIT_S)

  def step(self):
    """One decode call, and on to the next."""
    self._permits.release()
    self.wait()

  def open(self):
    self._open = True
    self._permits.release()


def run(engine, ids, rid="r", **settings):
  return engine.submit(Request(rid, ids, **settings)).result(WAIT_S)


def test_64_concurrent_requests_get_what_each_would_get_alone(engine):
  prompts = [prompt(i % 40, 3 + i % 37) for i in range(64)]  # some twice, 8 slots: most queue
  futures = [engine.submit(Request(f"r{i}", p, max_new_tokens=5 + i % 9, temperature=0.0))
             for i, p in enumerate(prompts)]
  results = [f.result(WAIT_S) for f in futures]
  for i, (p, r) in enumerate(zip(prompts, results)):
    assert len(r.ids) == 5 + i % 9 and r.finish == {"type": "length", "length": len(r.ids)}
    np.testing.assert_allclose(r.logprobs, logprobs(p + r.ids)[len(p) - 1:], atol=3e-5)
  engine.flush().result(WAIT_S)
  for i in range(0, 64, 7):
    alone = run(engine, prompts[i], max_new_tokens=5 + i % 9, temperature=0.0)
    assert alone.ids == results[i].ids


def test_the_shapes_for_a_large_model_give_the_same_results(monkeypatch):
  monkeypatch.setattr(device, "LARGE_BYTES", 0)
  engine = Engine(OLD, CFG, slots=8, max_len=60, steps=4)
  calls = []
  prefill, decode = engine._device.prefill, engine._device.decode
  engine._device.prefill = lambda slots, *a: calls.append(len(slots)) or prefill(slots, *a)
  engine._device.decode = lambda slots, *a: calls.append(-len(slots)) or decode(slots, *a)
  prompts = [prompt(i, 20 + i) for i in range(5)]
  futures = together(engine, [Request(f"r{i}", p, max_new_tokens=4 + 4 * (i == 2))
                              for i, p in enumerate(prompts)])
  results = [f.result(WAIT_S) for f in futures]
  engine.stop()
  assert calls == [4, 1, -5, -1]  # no padding rows but for those five
  for p, r in zip(prompts, results):
    np.testing.assert_allclose(r.logprobs, logprobs(p + r.ids)[len(p) - 1:], atol=3e-5)


def test_the_next_turn_recomputes_only_what_is_new(engine):
  first = prompt(1, 20)
  a = run(engine, first, max_new_tokens=6)
  assert a.cached_tokens == 0
  second = first + a.ids + prompt(2, 30)
  b = run(engine, second, max_new_tokens=6)
  assert b.cached_tokens == 20 + 6 - 1  # the last sampled token was never an input
  np.testing.assert_allclose(b.logprobs, logprobs(second + b.ids)[len(second) - 1:], atol=3e-5)


def test_a_group_shares_its_prompt(engine):
  ids = prompt(3, 40)
  futures = [engine.submit(Request(f"r{i}", ids, max_new_tokens=4)) for i in range(8)]
  results = [f.result(WAIT_S) for f in futures]
  assert sorted(r.cached_tokens for r in results) == [0] + [39] * 7
  for r in results:
    np.testing.assert_allclose(r.logprobs, logprobs(ids + r.ids)[39:], atol=3e-5)


def test_a_seeded_request_repeats_itself_in_any_company(engine):
  ids = prompt(4, 10)
  alone = run(engine, ids, seed=2 ** 40 + 1, max_new_tokens=12)
  futures = [engine.submit(Request(f"r{i}", prompt(i, 9 + i), max_new_tokens=12)) for i in range(5)]
  again = run(engine, ids, seed=2 ** 40 + 1, max_new_tokens=12)
  other = run(engine, ids, seed=1, max_new_tokens=12)
  for f in futures:
    f.result(WAIT_S)
  assert again.ids == alone.ids != other.ids


def test_a_stop_token_ends_the_output_and_is_kept(engine):
  free = run(engine, prompt(5, 8), max_new_tokens=11, temperature=0.0)
  stop = free.ids[6]
  first = free.ids.index(stop)
  r = run(engine, prompt(5, 8), max_new_tokens=11, temperature=0.0, stop_ids=frozenset([stop]))
  assert r.ids == free.ids[:first + 1] and len(r.logprobs) == first + 1
  assert r.finish == {"type": "stop", "matched": stop}


def test_the_context_bounds_the_output(engine):
  r = run(engine, prompt(6, 97), max_new_tokens=50)
  assert len(r.ids) == 3 and r.finish == {"type": "length", "length": 3}
  np.testing.assert_allclose(r.logprobs, logprobs(prompt(6, 97) + r.ids)[96:], atol=3e-5)


def test_scoring_equals_the_full_forward_pass(engine):
  ids = prompt(7, 100)  # several chunks, up to the very end of the context
  r = run(engine, ids, max_new_tokens=0, score_from=0)
  assert r.ids == [] and r.finish == {"type": "length", "length": 0}
  np.testing.assert_allclose(r.input_logprobs, logprobs(ids), atol=3e-5)
  part = run(engine, ids, max_new_tokens=0, score_from=60)
  assert part.cached_tokens == 60
  np.testing.assert_allclose(part.input_logprobs, logprobs(ids)[60:], atol=3e-5)


@pytest.mark.parametrize("request_,text", [
    (Request("r", []), "empty"),
    (Request("r", [1] * 100), "longer than the context length allows (99 tokens)"),
    (Request("r", [1] * 101, max_new_tokens=0), "(100 tokens)"),
    (Request("r", [1, 61]), "outside the vocabulary (0 to 60)"),
    (Request("r", [-1]), "outside the vocabulary"),
])
def test_an_impossible_request_is_refused(engine, request_, text):
  with pytest.raises(ValueError) as error:
    engine.submit(request_)
  assert text in str(error.value)


def test_a_live_rid_is_refused_and_free_again_afterwards(engine):
  gate = Gate(engine)
  future = engine.submit(Request("same", prompt(1, 5)))
  gate.wait()
  with pytest.raises(ValueError, match="Duplicate request"):
    engine.submit(Request("same", prompt(1, 5)))
  gate.open()
  future.result(WAIT_S)
  run(engine, prompt(1, 5), rid="same")


def test_abort_answers_with_what_there_is(engine):
  gate = Gate(engine)
  requests = [Request(f"r{i}", prompt(i, 8), max_new_tokens=16) for i in range(9)]
  futures = dict(zip([r.rid for r in requests], together(engine, requests)))
  gate.wait()
  gate.step()
  engine.abort("r2")
  engine.abort("r8")  # still queued: there are 8 slots
  engine.abort("nobody")
  gate.step()
  running, queued = futures["r2"].result(WAIT_S), futures["r8"].result(WAIT_S)
  assert running.finish["type"] == queued.finish["type"] == "abort"
  assert len(running.ids) == len(running.logprobs) == 8 and queued.ids == []
  gate.open()
  assert len(futures["r1"].result(WAIT_S).ids) == 16


def test_retracted_requests_go_on_under_the_new_weights(engine):
  gate = Gate(engine)
  ids = prompt(8, 12)
  future = engine.submit(Request("r", ids, max_new_tokens=16))
  gate.wait()
  gate.step()
  paused = engine.pause("retract")
  gate.open()
  assert paused.result(WAIT_S) == 1 and engine.load == (0, 1)
  assert engine.update(NEW, "1").result(WAIT_S) == 1
  assert not future.done()
  engine.resume().result(WAIT_S)
  r = future.result(WAIT_S)
  assert r.versions == [("0", 0, 8), ("1", 8, 16)] and r.retractions == 1 and r.version == "1"
  want = np.concatenate([logprobs(ids + r.ids)[11:19], logprobs(ids + r.ids, NEW)[19:]])
  np.testing.assert_allclose(r.logprobs, want, atol=3e-5)


def test_requests_paused_in_place_keep_their_cache_but_leave_it_to_nobody(engine):
  gate = Gate(engine)
  ids = prompt(9, 30)
  future = engine.submit(Request("r", ids, max_new_tokens=12))
  gate.wait()
  paused = engine.pause("in_place")
  gate.open()
  paused.result(WAIT_S)
  engine.update(NEW, "1").result(WAIT_S)
  engine.resume().result(WAIT_S)
  r = future.result(WAIT_S)
  assert r.versions == [("0", 0, 4), ("1", 4, 12)] and r.retractions == 0
  again = run(engine, ids, max_new_tokens=4)
  assert again.cached_tokens == 0
  np.testing.assert_allclose(again.logprobs, logprobs(ids + again.ids, NEW)[29:], atol=3e-5)


def test_pause_abort_ends_everything_and_new_requests_wait(engine):
  gate = Gate(engine)
  future = engine.submit(Request("r", prompt(1, 8), max_new_tokens=16))
  gate.wait()
  paused = engine.pause("abort")
  gate.open()
  paused.result(WAIT_S)
  assert future.result(WAIT_S).finish["type"] == "abort"
  waiting = engine.submit(Request("later", prompt(1, 8), max_new_tokens=4))
  assert engine.flush().result(WAIT_S) is False  # something is queued
  assert not waiting.done()
  engine.resume().result(WAIT_S)
  assert len(waiting.result(WAIT_S).ids) == 4


def test_an_update_under_load_never_mixes_versions(engine):
  prompts = [prompt(i, 5 + i) for i in range(30)]
  gate = Gate(engine)
  futures = together(
      engine, [Request(f"r{i}", p, max_new_tokens=10) for i, p in enumerate(prompts)])
  gate.wait()
  update = engine.update(NEW, "1")
  gate.open()
  update.result(WAIT_S)
  results = [f.result(WAIT_S) for f in futures]
  assert [r.version for r in results] == ["0"] * 8 + ["1"] * 22
  for p, r in zip(prompts, results):
    assert r.versions == [(r.version, 0, 10)]
    want = logprobs(p + r.ids, OLD if r.version == "0" else NEW)
    np.testing.assert_allclose(r.logprobs, want[len(p) - 1:], atol=3e-5)


def test_an_update_drops_the_cache_unless_told_otherwise(engine):
  ids = prompt(10, 40)
  run(engine, ids, max_new_tokens=4)
  engine.update(NEW, "1").result(WAIT_S)
  assert run(engine, ids, max_new_tokens=4).cached_tokens == 0
  engine.update(NEW, "2", flush=False).result(WAIT_S)
  assert run(engine, ids, max_new_tokens=4).cached_tokens == 39


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(engine):
  before = run(engine, prompt(1, 9), temperature=0.0)
  other = transformer.init(ModelConfig(**{**CFG.__dict__, "mlp": 48}), 0)
  with pytest.raises(ValueError, match="do not fit.*down.*48"):
    engine.update(other, "1")
  broken = {**NEW, "final_norm": np.full(16, np.nan, np.float32)}
  with pytest.raises(ValueError, match="final_norm.*NaN"):
    engine.update(broken, "1")
  after = run(engine, prompt(1, 9), temperature=0.0)
  assert after.ids == before.ids and after.version == "0"


def test_nobody_waits_for_a_dead_engine():
  died = threading.Event()
  engine = Engine(OLD, CFG, slots=2, max_len=32, steps=4, on_death=died.set)

  def broken(*args):
    raise RuntimeError("device lost")

  engine._device.decode = broken
  futures = [engine.submit(Request(f"r{i}", [1, 2, 3])) for i in range(5)]
  for future in futures:
    with pytest.raises(EngineError, match="device lost"):
      future.result(WAIT_S)
  assert died.wait(WAIT_S) and not engine.alive
  with pytest.raises(EngineError, match="has stopped"):
    engine.submit(Request("late", [1])).result(WAIT_S)


def test_warm_up_changes_nothing():
  engine = Engine(OLD, CFG, slots=8, max_len=100, steps=4)
  try:
    engine.warm_up(1)
    r = run(engine, prompt(1, 20), max_new_tokens=5)
    np.testing.assert_allclose(r.logprobs, logprobs(prompt(1, 20) + r.ids)[19:], atol=3e-5)
  finally:
    engine.stop()
