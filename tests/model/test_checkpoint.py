"""Checkpoints: bit for bit, atomic under kill -9, and a clear word when something is wrong."""

import asyncio
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kr.model import checkpoint, transformer
from kr.model.checkpoint import CheckpointError, Checkpoints
from kr.model.config import ModelConfig

CFG = ModelConfig(vocab=50, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=24)
META = {"model": CFG, "tokenizer": "runs/a/tokenizer", "cursor": 17}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@pytest.fixture
def state():
  """(params, opt_state) after one update, so that no leaf is all zeros."""
  params = transformer.init(CFG, 0)
  _, opt_state = OPTIMIZER.update(params, OPTIMIZER.init(params), params)
  return params, opt_state


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert x.dtype == y.dtype and x.shape == y.shape
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)


def test_restore_gives_the_saved_bits_and_meta(state, tmp_path):
  params, opt_state = state
  params["embed"] = params["embed"].at[0, :4].set(jnp.array([np.nan, -0.0, 1e-42, np.inf]))
  big = np.random.default_rng(0).bit_generator.state  # integers of 128 bits
  Checkpoints(tmp_path).save(3, params, opt_state, {**META, "random": big})
  got_params, got_opt, meta = Checkpoints(tmp_path).restore(3, zeros(params), zeros(opt_state))
  assert_same_bits((params, opt_state), (got_params, got_opt))
  assert ModelConfig(**meta.pop("model")) == CFG
  assert meta == {**{k: v for k, v in META.items() if k != "model"}, "random": big}


def test_restore_needs_shapes_only(state, tmp_path):
  Checkpoints(tmp_path).save(0, *state, META)
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
  assert_same_bits(state, Checkpoints(tmp_path).restore(0, *like)[:2])


def test_the_policy_restores_alone_without_the_optimizer(state, tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(5, *state, META)
  shutil.rmtree(tmp_path / "5" / "optimizer")
  params, cfg = checkpoint.restore_policy(checkpoints.policy_path(5))
  assert cfg == CFG
  assert_same_bits(params, state[0])
  assert checkpoint.read_meta(checkpoints.policy_path(5))["tokenizer"] == "runs/a/tokenizer"


@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_saved_alone_restores_with_its_config(tied, tmp_path):
  cfg = dataclasses.replace(CFG, tied=tied)
  params = transformer.init(cfg, 1)
  checkpoint.save_policy(tmp_path / "start", params, cfg, "tok")
  got, got_cfg = checkpoint.restore_policy(tmp_path / "start")
  assert got_cfg == cfg
  assert_same_bits(params, got)
  with pytest.raises(CheckpointError, match="exists already"):
    checkpoint.save_policy(tmp_path / "start", params, cfg)


def test_the_newest_are_kept_and_latest_names_the_last(state, tmp_path):
  checkpoints = Checkpoints(tmp_path / "new", keep=2)
  assert checkpoints.latest() is None
  for step in (0, 9, 10, 11):  # by number, not by spelling
    checkpoints.save(step, *state, META)
  assert checkpoints.steps() == [10, 11]
  assert checkpoints.latest() == 11


def test_saving_a_step_again_replaces_it(state, tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, zeros(state[0]), state[1], META)
  checkpoints.save(1, *state, {**META, "cursor": 18})
  params, _, meta = checkpoints.restore(1, *state)
  assert_same_bits(params, state[0])
  assert meta["cursor"] == 18
  assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_saving_and_restoring_work_inside_a_running_event_loop(state, tmp_path):
  async def main():
    Checkpoints(tmp_path).save(1, *state, META)
    return Checkpoints(tmp_path).restore(1, *state)
  assert_same_bits(asyncio.run(main())[:2], state)


def test_what_a_killed_save_left_behind_is_not_seen_and_is_swept(state, tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, *state, META)
  for litter in ("2.orbax-checkpoint-tmp", "0.removed", "1.again"):
    shutil.copytree(tmp_path / "1", tmp_path / litter)
  assert checkpoints.latest() == 1
  checkpoints.save(2, *state, META)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_kill_9_in_mid_save_leaves_the_previous_checkpoint(how, tmp_path):
  """A child saves step after step; it is killed while the directory of a save is being filled."""
  child = textwrap.dedent(f"""
      import jax.numpy as jnp
      from kr.model.checkpoint import Checkpoints
      from kr.model.config import ModelConfig
      checkpoints, cfg = Checkpoints({str(tmp_path)!r}), {CFG!r}
      first = (checkpoints.latest() or 0) + 1
      for step in range(first, first + 1000):
        x = {{"w": jnp.full((64, 1024), step, jnp.float32)}}
        checkpoints.{how}(step, x, x, {{"model": cfg, "step": step}})
        print(step, flush=True)
      """)
  like = {"w": jax.ShapeDtypeStruct((64, 1024), jnp.float32)}
  for kill_at in (0.0, 0.01):  # seconds into a save
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": os.getcwd()})
    announced = int(process.stdout.readline())
    while not any(p.name.split(".", 1)[1:] == ["orbax-checkpoint-tmp"] for p in tmp_path.iterdir()):
      assert process.poll() is None
    time.sleep(kill_at)
    process.send_signal(signal.SIGKILL)
    announced = max([announced, *map(int, process.communicate()[0].split())])

    latest = Checkpoints(tmp_path).latest() or 0
    # + 1: committed, killed before it said so. - 1: the policy announced, the rest under way.
    assert latest in (announced - (how == "save_async"), announced, announced + 1)
    if latest:
      params, opt_state, meta = Checkpoints(tmp_path).restore(latest, like, like)
      assert meta["step"] == latest
      assert (np.asarray(params["w"]) == latest).all()
      assert (np.asarray(opt_state["w"]) == latest).all()


def test_a_policy_is_whole_as_soon_as_an_asynchronous_save_returns(state, tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, *state, META)
  params = jax.tree.map(lambda x: x + 1, state[0])
  path = checkpoints.save_async(2, params, state[1], META)
  got, cfg = checkpoint.restore_policy(path)
  assert_same_bits(got, params)
  assert cfg == CFG
  checkpoints.wait()
  assert checkpoints.steps() == [1, 2]
  assert_same_bits(checkpoints.restore(2, *state)[:2], (params, state[1]))
  assert_same_bits(checkpoint.restore_policy(path)[0], params)  # a server may still read there
  checkpoints.sweep()
  assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_arrays_that_are_donated_during_a_save_are_saved_as_they_were(tmp_path):
  donate = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
  checkpoints = Checkpoints(tmp_path)
  x = jnp.arange(2.0 ** 20)
  want = np.arange(2.0 ** 20, dtype=np.float32)
  checkpoints.save_async(1, {"w": x}, {"w": x + 1}, META)
  x = donate(x)
  assert float(x[5]) == -1
  checkpoints.wait()
  params, opt_state, _ = checkpoints.restore(1, {"w": x}, {"w": x})
  np.testing.assert_array_equal(params["w"], want)
  np.testing.assert_array_equal(opt_state["w"], want + 1)


def test_what_fails_in_the_background_is_raised_by_the_next_wait_and_save(tmp_path):
  """A file size limit, which the policy meets and the optimizer does not, stands for the disk."""
  child = textwrap.dedent(f"""
      import resource
      import numpy as np
      from kr.model.checkpoint import CheckpointError, Checkpoints
      from kr.model.config import ModelConfig
      checkpoints, meta = Checkpoints({str(tmp_path)!r}), {{"model": {CFG!r}}}
      x = {{"w": np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)}}
      small = {{"w": np.zeros(4, np.float32)}}
      checkpoints.save(1, small, x, meta)
      resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # bytes
      for again in checkpoints.wait, lambda: checkpoints.save_async(3, small, small, meta):
        checkpoints.save_async(2, small, x, meta)
        try:
          again()
        except CheckpointError as e:
          print(e)
      checkpoints.save(3, small, small, meta)
      """)
  done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True,
                        env={**os.environ, "PYTHONPATH": os.getcwd()})
  assert done.stdout.count("could not write checkpoint") == 2, done.stdout + done.stderr
  assert done.stdout.count("make room") == 2
  assert "Traceback" not in done.stdout + done.stderr
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.steps() == [1, 3]
  # Threads of a failed write may leave litter even after the error: the next save sweeps it.
  checkpoints.save(4, {"w": np.zeros(4)}, {"w": np.zeros(4)}, {"model": CFG})
  assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4"]


# Saves from a mesh of 8 devices, in `processes` processes, and restores onto others.
MESHES = """
import sys
import jax
process, processes, port, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_num_cpu_devices", 8 // processes)
if processes > 1:
  jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
import numpy as np
import optax
from kr.model import checkpoint, sharding, transformer
from kr.model.config import ModelConfig

cfg = ModelConfig(vocab=48, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=24)
optimizer = optax.adamw(1e-3)
host = jax.tree.map(np.asarray, transformer.init(cfg, 0))

def state(mesh):
  params = sharding.shard(mesh, host, transformer.declare(cfg))
  with jax.set_mesh(mesh):
    return params, jax.jit(lambda p: optimizer.update(p, optimizer.init(p), p)[1])(params)

def check(mesh):
  got = checkpoints.restore(1, *state(mesh))[:2]
  assert got[0]["embed"].sharding.mesh.size == mesh.size
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(saved)):
    for piece in a.addressable_shards:
      assert np.asarray(piece.data).tobytes() == np.ascontiguousarray(b[piece.index]).tobytes()

checkpoints = checkpoint.Checkpoints(path)
mesh = sharding.make_mesh("fsdp=8")
params, opt_state = state(mesh)
checkpoints.save_async(1, params, opt_state, {"model": cfg})
checkpoints.wait()
whole = jax.jit(lambda t: t, out_shardings=jax.NamedSharding(mesh, jax.P()))
saved = jax.tree.map(lambda a: np.asarray(whole(a).addressable_data(0)), (params, opt_state))
assert any(np.any(a) for a in jax.tree.leaves(saved[1]))
check(sharding.make_mesh("tensor=2,fsdp=4"))
restored, _ = checkpoint.restore_policy(checkpoints.policy_path(1), mesh)
assert restored["embed"].sharding == params["embed"].sharding
if processes == 1:
  check(sharding.make_mesh("", jax.devices()[:1]))
  checkpoint.restore_policy(checkpoints.policy_path(1))
print("equal")
"""


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_one_mesh_saved_is_restored_bit_for_bit_onto_another(processes, tmp_path):
  with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
  children = [subprocess.Popen(
      [sys.executable, "-c", MESHES, str(i), str(processes), str(port), str(tmp_path)],
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      env={**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"})
      for i in range(processes)]
  for out, err in [child.communicate(timeout=240) for child in children]:
    assert out.strip().endswith("equal"), err[-3000:]


def damage(path: pathlib.Path):
  """Overwrites the middle of each data file of an item."""
  for file in [p for p in path.rglob("*") if p.is_file() and p.stat().st_size > 200]:
    data = bytearray(file.read_bytes())
    data[len(data) // 3:len(data) // 2] = b"\xa5" * (len(data) // 2 - len(data) // 3)
    file.write_bytes(data)


@pytest.mark.parametrize("item", ["policy", "optimizer", "meta"])
def test_a_damaged_checkpoint_is_refused_with_advice(item, state, tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, *state, META)
  checkpoints.save(2, *state, {**META, "pad": "x" * 500})
  damage(tmp_path / "2" / item)
  with pytest.raises(CheckpointError, match="2 is damaged.*go on from step 1"):
    checkpoints.restore(2, *state)
  assert_same_bits(checkpoints.restore(1, *state)[:2], state)


@pytest.mark.parametrize("item", ["policy", "optimizer", "meta"])
def test_an_incomplete_or_emptied_checkpoint_is_refused_with_advice(item, state, tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(2, *state, META)
  for file in [p for p in (tmp_path / "2" / item).rglob("*") if p.is_file()]:
    file.write_bytes(b"")
  with pytest.raises(CheckpointError, match="damaged.*new workdir"):
    checkpoints.restore(2, *state)
  shutil.rmtree(tmp_path / "2" / item)
  with pytest.raises(CheckpointError, match=f"has no {item}"):
    checkpoints.restore(2, *state)


def test_a_missing_checkpoint_is_refused_with_advice(state, tmp_path):
  with pytest.raises(CheckpointError, match="no checkpoint.*new workdir"):
    Checkpoints(tmp_path).restore(4, *state)
  with pytest.raises(CheckpointError, match="directory of one step"):
    checkpoint.restore_policy(tmp_path / "nowhere")
  Checkpoints(tmp_path).save(1, *state, META)
  with pytest.raises(CheckpointError, match="directory of one step"):
    checkpoint.restore_policy(tmp_path)  # the run's directory instead of a step's


def test_another_model_or_optimizer_is_refused_by_the_leaf_that_differs(state, tmp_path):
  params, opt_state = state
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, params, opt_state, META)
  wider = transformer.init(dataclasses.replace(CFG, vocab=60), 0)
  with pytest.raises(CheckpointError, match=r"policy/embed is float32\[50, 16\].*\[60, 16\]"):
    checkpoints.restore(1, wider, opt_state)
  untied = transformer.init(dataclasses.replace(CFG, tied=False), 0)
  with pytest.raises(CheckpointError, match="policy/head is nothing"):
    checkpoints.restore(1, untied, opt_state)
  with pytest.raises(CheckpointError, match="another optimizer"):
    checkpoints.restore(1, params, optax.sgd(0.1, momentum=0.9).init(params))
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  with pytest.raises(CheckpointError, match="bfloat16"):
    checkpoints.restore(1, half, opt_state)


def test_meta_must_be_json_and_name_the_model(state, tmp_path):
  with pytest.raises(CheckpointError, match="needs 'model'"):
    Checkpoints(tmp_path).save(1, *state, {"tokenizer": "x"})
  with pytest.raises(CheckpointError, match="plain JSON"):
    Checkpoints(tmp_path).save(1, *state, {**META, "cursor": np.int64(3)})
  with pytest.raises(CheckpointError, match="at least 1"):
    Checkpoints(tmp_path, keep=0)
  assert Checkpoints(tmp_path).latest() is None


def test_a_policy_of_an_unknown_config_is_refused(state, tmp_path):
  Checkpoints(tmp_path).save(1, *state, META)
  file = tmp_path / "1" / "meta" / "metadata"
  meta = json.loads(file.read_text())
  meta["model"]["experts"] = 8
  file.write_text(json.dumps(meta))
  with pytest.raises(CheckpointError, match="experts.*version that wrote it"):
    checkpoint.restore_policy(tmp_path / "1")


def test_a_full_disk_is_said_before_anything_is_written(state, tmp_path, monkeypatch):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, *state, META)
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
  with pytest.raises(CheckpointError, match="no room.*make room"):
    checkpoints.save(2, *state, META)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]


def test_a_write_that_fails_halfway_is_said_and_leaves_the_previous_checkpoint(tmp_path):
  """A file size limit stands for a disk that fills up while the save is under way."""
  child = textwrap.dedent(f"""
      import resource
      import numpy as np
      from kr.model.checkpoint import CheckpointError, Checkpoints
      from kr.model.config import ModelConfig
      checkpoints, meta = Checkpoints({str(tmp_path)!r}), {{"model": {CFG!r}}}
      x = {{"w": np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)}}
      checkpoints.save(1, x, x, meta)
      resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # bytes
      try:
        checkpoints.save(2, x, x, meta)
      except CheckpointError as e:
        print(e)
      """)
  done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True,
                        env={**os.environ, "PYTHONPATH": os.getcwd()})
  assert "could not write checkpoint" in done.stdout and "make room" in done.stdout, done.stderr
  assert "Traceback" not in done.stdout + done.stderr
  assert [p.name for p in tmp_path.iterdir()] == ["1"]  # the half is not left to fill the disk
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.latest() == 1
  x = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
  like = {"w": jax.ShapeDtypeStruct(x.shape, x.dtype)}
  assert np.asarray(checkpoints.restore(1, like, like)[0]["w"]).tobytes() == x.tobytes()


def test_a_place_that_cannot_be_written_is_said(state, tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(CheckpointError, match="could not write|may not write"):
    Checkpoints(tmp_path / "file" / "checkpoints").save(1, *state, META)
