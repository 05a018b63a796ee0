"""One update is the same on one device, on any mesh, in few shapes, in less precision."""

import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from kr.model import transformer
from kr.model.config import Execution, ModelConfig, MoeConfig
from kr.model.lora import Lora
from kr.rl import batch as batch_lib
from kr.rl import learner as learner_lib
from kr.rl import loss
from kr.rl.learner import Learner, micro_batches, padded
from kr.rl.optim import make_optimizer
from kr import types

SCRIPT = pathlib.Path(__file__).parent / "mesh_script.py"
ROOT = SCRIPT.parents[2]
CFG = ModelConfig(vocab=11, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=16)
OPTIMIZER = make_optimizer(1e-2, 0, 1.0, 0.01)  # one object: programs are kept by it


def learner(**options):
  return Learner(CFG, transformer.init(CFG, 1), OPTIMIZER, **options)


def trajectory(name, prompt, sampled):
  t, s = types.Trajectory(name, types.Task(name, "q", "a", "k")), types.Segment()
  s.append_context(prompt)
  s.append_sampled(sampled, [-1.0] * len(sampled), 0)
  t.turns.append(types.Turn(0, len(prompt), len(s), 0))
  t.segments.append(s)
  return t


ITEMS = [(trajectory(str(i), [1 + i % 9] * (2 + 5 * (i == 3)), [3, 2 + i % 7]), [1.0 + i], True)
         for i in range(7)]


# -------------------------------------------------------------------- meshes


def run_script(*args):
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  return subprocess.Popen([sys.executable, str(SCRIPT), *map(str, args)], env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def results(process):
  out, err = process.communicate(timeout=1500)
  assert process.returncode == 0, err[-3000:]
  # Not line by line: Gloo prints to the same stream, in mid line too.
  rows = [json.loads(row) for row in re.findall(r"\{[^{}]*\}", out)]
  return {row.pop("case"): row for row in rows}, err


def assert_equal_to_one_device(rows):
  for case, row in rows.items():
    assert row["loss"] < 1e-5, case
    assert row["gradients"] < 1e-5, case  # of the largest; float32, other summation orders
    assert row["params"] < 1e-5, case
    assert row["as_declared"], case


@pytest.mark.slow
def test_any_mesh_of_eight_devices_takes_the_step_of_one_device():
  """Grouped heads; latent attention with experts; adapters; Muon; a state moved between meshes."""
  rows, err = results(run_script())
  assert_equal_to_one_device(rows)
  assert {case.split()[1] for case in rows} >= {
    "data=8", "fsdp=8", "context=8", "tensor=8", "expert=8", "tensor=2,fsdp=4"}
  assert {case.split()[0] for case in rows} == {
    "dense", "experts", "uneven", "adapters", "tis", "topr", "mask", "muon"}
  assert "rematerialization" not in err  # XLA's warning of a layout that it cannot get to


@pytest.mark.slow
def test_two_processes_take_the_step_of_one_device():
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
  for process in [run_script(i, port) for i in (0, 1)]:
    rows, _ = results(process)
    assert list(rows) == ["experts data=2,expert=2,tensor=2"]
    assert_equal_to_one_device(rows)


# -------------------------------------------------------------------- shapes


def test_rows_of_several_widths_take_the_step_of_one_width():
  wide, narrow = learner(micro_rows=1), learner(micro_rows=1)
  wide_metrics = wide.update(batch_lib.pack(ITEMS, 16))
  batches = batch_lib.pack_by_length(ITEMS, 16, 1, buckets=3)
  # 9 + 4 tokens in a wide row; five of 4 in narrow ones, four of which are as much as a wide one.
  assert [b.tokens.shape for b in batches] == [(1, 16), (8, 4)]
  metrics = narrow.update(batches)
  assert metrics["loss"] == pytest.approx(wide_metrics["loss"], rel=1e-5)
  assert metrics["grad_norm"] == pytest.approx(wide_metrics["grad_norm"], rel=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), wide.params,
               narrow.params)


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_a_shared_prefix_computed_once_takes_the_step_of_one_for_each_segment(attention):
  items = [(trajectory(str(i), [4, 5, 6, 7, 5] + [8] * (i % 3) + [9], [3, 2 + i % 7]), [1.0 + i],
            True) for i in range(7)]
  how = Execution(remat="none", attention=attention)
  apart, together = (learner(micro_rows=1, how=how) for _ in range(2))
  want = apart.update(batch_lib.pack(items, 32))
  batches = batch_lib.pack_by_length(items, 32, share_prefix=True)
  # 6 + 2 tokens and up to 2 more each: 62 in all, 32 of which need not be computed.
  assert [b.tokens.shape for b in batches] == [(1, 32)] and batches[0].padding_share == 0
  got = together.update(batches)
  for key in ("loss", "grad_norm", "entropy", "log_prob"):
    assert got[key] == pytest.approx(want[key], rel=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), apart.params,
               together.params)


def test_shapes_are_few_and_counted():
  rng, one = np.random.default_rng(0), learner(micro_rows=2)
  seen = set()
  for _ in range(40):
    items = [(trajectory("t", [1] * rng.integers(1, 9), [2] * rng.integers(1, 9)), [1.0], True)
             for _ in range(rng.integers(1, 30))]
    for batch in batch_lib.pack_by_length(items, 16, 2, buckets=2):
      for rows in micro_batches(batch, 2 * batch.split, trained_multiple=8):
        seen.add((rows.tokens.shape, rows.target.shape))
  # Two widths, and 32 places for trained tokens in steps of 8.
  assert len(seen) <= 2 * 4
  assert [padded(n, 512) for n in (1, 513, 4096, 4097, 9000)] == [512, 1024, 4096, 5120, 10240]
  assert one.update(batch_lib.pack(ITEMS, 16, 2))["compiles"] == 1
  assert one.update(batch_lib.pack(ITEMS, 16, 2))["compiles"] == 1
  assert one.update(batch_lib.pack(ITEMS, 32, 2))["compiles"] == 2


# -------------------------------------------------------------------- buffers, precision, steps


def test_an_update_reuses_the_buffers_of_what_it_replaces():
  one = learner(micro_rows=2)
  batch = batch_lib.pack(ITEMS, 16, 2)
  before = jax.tree.leaves((one.params, one.opt_state))
  grads = learner_lib._zeros(one.params, CFG, None)
  rows = next(micro_batches(batch, 2))
  learner_lib._accumulate(one.params, None, grads, rows, CFG, one.how, None)
  assert all(a.is_deleted() for a in jax.tree.leaves(grads))
  assert not any(a.is_deleted() for a in before)
  one.update(batch)
  assert all(a.is_deleted() for a in before)


@pytest.mark.parametrize("precision", ["mixed", "bfloat16"])
def test_less_precision_keeps_float32_weights_and_nearly_the_loss(precision):
  exact, less = learner(micro_rows=8), learner(micro_rows=8, how=Execution(precision=precision))
  batch = batch_lib.pack(ITEMS, 16, 8)
  expected, got = exact.update(batch), less.update(batch)
  assert got["loss"] == pytest.approx(expected["loss"], rel=2e-2)
  assert got["loss"] != expected["loss"]  # it did compute otherwise
  assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-2)
  grads = learner_lib._zeros(less.params, CFG, None)
  grads, _ = learner_lib._accumulate(
    less.params, None, grads, next(micro_batches(batch, 8)), CFG, less.how, None)
  for a in jax.tree.leaves((less.params, grads)):
    assert a.dtype == np.float32
  assert {a.dtype.name for a in jax.tree.leaves(less.opt_state)} == {"float32", "int32"}


def test_rematerialisation_computes_again_what_it_says_and_changes_no_gradient():
  params, rows = transformer.init(CFG, 1), next(micro_batches(batch_lib.pack(ITEMS, 16, 8), 8))
  grads, products = {}, {}
  for remat in ("none", "dots", "block", "offload"):
    f = jax.grad(lambda p: loss.reinforce(p, CFG, rows, Execution(remat=remat))[0])
    program = str(jax.make_jaxpr(f)(params))
    products[remat] = program.count("dot_general")
    assert ("Host" in program) == (remat == "offload")
    grads[remat] = jax.jit(f)(params)
  again = {remat: n - products["none"] for remat, n in products.items()}
  # Of a layer's products, two are attention's; the last (down) is needed by nothing in the layer.
  assert again == {"none": 0, "dots": 2, "block": 8, "offload": 8}
  for got in grads.values():
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, grads["none"])


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_float32_products_are_not_left_to_what_an_accelerator_makes_of_them(attention):
  """A GPU would use TF32, a TPU bfloat16; on CPU only the program's text tells."""
  cfg = dataclasses.replace(CFG, layers=2, moe=MoeConfig(4, 2, 8, layers=(1,)))
  one = Learner(cfg, transformer.init(cfg, 1), OPTIMIZER, micro_rows=8,
                how=Execution(attention=attention), lora=Lora(2, 4.0, ("wq", "experts_up")))
  rows = next(micro_batches(batch_lib.pack(ITEMS, 16, 8), 8))
  text = learner_lib._accumulate.lower(
    one.params, one._frozen, one.params, rows, cfg, one.how, one.lora).as_text()
  products = [line for line in text.splitlines() if "dot_general" in line or "ragged_dot" in line]
  assert len(products) > 30
  assert [line for line in products if "[HIGHEST, HIGHEST]" not in line] == []


def test_a_skipped_step_leaves_the_optimizer_as_it_was():
  one, other = learner(micro_rows=8), learner(micro_rows=8)
  broken = [(t, [float("inf")], True) for t, _, _ in ITEMS]
  assert one.update(batch_lib.pack(broken, 16, 8))["skipped"] == 1
  batch = batch_lib.pack(ITEMS, 16, 8)
  assert one.update(batch) == other.update(batch)
  jax.tree.map(np.testing.assert_array_equal, one.state(), other.state())


def test_loading_a_state_continues_to_the_bit():
  batch = batch_lib.pack(ITEMS, 16, 8)
  one = learner(micro_rows=8)
  one.update(batch)
  saved = jax.tree.map(np.asarray, one.state())
  one.update(batch)
  other = learner(micro_rows=8)
  other.load(*saved)
  other.update(batch)
  jax.tree.map(np.testing.assert_array_equal, one.state(), other.state())
