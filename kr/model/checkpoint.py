"""Orbax checkpoints of a run, atomic, written in the background.

    <directory>/<step>/policy      parameters                 } all that a server or an
    <directory>/<step>/meta        JSON: model, tokenizer, …  } evaluation restores
    <directory>/<step>/optimizer   optimizer state
    <directory>/<step>.policy      policy and meta alone, while the step's are being written

Orbax writes into a directory of another name and renames it when all of it is there, so a
name made of digits alone is a whole checkpoint, and a kill at any moment leaves at most
litter, which the next save sweeps away. Of a run on several hosts every process saves and
restores: it writes the pieces of the arrays that its devices hold, into one directory that all
of them see. What was saved on one mesh is restored onto any other.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
import numpy as np
import orbax.checkpoint as ocp

from kr.model import sharding
from kr.model import transformer
from kr.model.config import ModelConfig

_POLICY = ".policy"
_LITTER = (".orbax-checkpoint-tmp", ".removed", ".again", _POLICY)


class CheckpointError(ValueError):
  """A checkpoint that cannot be read or written; the text says what to do."""


def _items() -> ocp.CompositeCheckpointHandler:
  return ocp.CompositeCheckpointHandler(
      policy=ocp.PyTreeCheckpointHandler(),
      optimizer=ocp.PyTreeCheckpointHandler(),
      meta=ocp.JsonCheckpointHandler())


def _not_of_a_thread(record: logging.LogRecord) -> bool:
  """False for Orbax's threads logging the traceback of an error that `wait` raises anyway."""
  return not any(text in str(record.msg) for text in (
      "_SignalingThread.run() raised", "in background save thread"))


logging.getLogger("absl").addFilter(_not_of_a_thread)  # for good: they log after `save` raised


def _first() -> bool:
  """Whether this process is the one that removes and renames directories."""
  return jax.process_index() == 0


def _meet(what: str) -> None:
  """Waits until every process is here, so that all see the same directories."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


def _reason(error: BaseException) -> str:
  """The first line of an error: tensorstore's run over many lines and name source files."""
  if "No space left on device" in str(error):
    return "no space left on the disk"
  lines = str(error).strip().splitlines() or [""]
  return f"{type(error).__name__}: {lines[0][:300]}"


def _json_ready(meta: dict[str, Any]) -> dict[str, Any]:
  """meta with the model's config as a dict; raises CheckpointError if it is not JSON."""
  if "model" not in meta:
    raise CheckpointError("a checkpoint's meta needs 'model': the ModelConfig of its policy")
  if isinstance(meta["model"], ModelConfig):
    meta = {**meta, "model": dataclasses.asdict(meta["model"])}
  try:
    json.dumps(meta)
  except (TypeError, ValueError) as e:
    raise CheckpointError(f"a checkpoint's meta must be plain JSON: {e}") from e
  return meta


_ADVICE = "make room, then start the same command again; the checkpoints before it are whole."


@contextlib.contextmanager
def _writing(path: pathlib.Path) -> Iterator[None]:
  """Turns whatever goes wrong inside into a CheckpointError, and leaves no half behind."""
  try:
    yield
  except CheckpointError:
    raise
  except PermissionError as e:
    raise CheckpointError(f"may not write checkpoint {path}: {_reason(e)}. Choose a workdir that "
                          "this user may write to.") from e
  except Exception as e:  # tensorstore raises its own types, among them for a full disk
    if _first():
      shutil.rmtree(path.with_name(path.name + _LITTER[0]), ignore_errors=True)
    raise CheckpointError(f"could not write checkpoint {path}: {_reason(e)}. If the disk is full "
                          f"or a quota reached: {_ADVICE}") from e


def _write(checkpointer: ocp.Checkpointer, path: pathlib.Path, items: dict[str, Any]) -> None:
  """Writes the items to path in one atomic step, or begins to; path must not exist."""
  need_bytes = 2 ** 20 + sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(items))
  with _writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < need_bytes:
      raise CheckpointError(
          f"no room for checkpoint {path}: it needs {need_bytes / 2**20:.0f} MiB, the disk has "
          f"{free_bytes / 2**20:.0f} MiB: {_ADVICE}")
    checkpointer.save(path, args=ocp.args.Composite(**{
        k: ocp.args.JsonSave(v) if k == "meta" else ocp.args.PyTreeSave(v)
        for k, v in items.items()}))


def _read(path: pathlib.Path, like: dict[str, Any], advice: str) -> dict[str, Any]:
  """Reads the named items of a checkpoint; a value of `like` is a tree, or None for JSON."""
  if not path.is_dir():
    raise CheckpointError(f"there is no checkpoint {path}. {advice}")
  missing = [k for k in like if not (path / k).is_dir()]
  if missing:
    raise CheckpointError(f"checkpoint {path} has no {' and no '.join(missing)}. {advice}")
  for name, tree in like.items():
    if tree is not None:
      _check_shapes(path, name, tree, advice)
  args = {k: ocp.args.JsonRestore() if v is None else ocp.args.PyTreeRestore(
      v, restore_args=ocp.checkpoint_utils.construct_restore_args(v)) for k, v in like.items()}
  try:
    out = ocp.Checkpointer(_items()).restore(path, args=ocp.args.Composite(**args))
  except Exception as e:  # whatever Orbax, tensorstore or json make of damaged files
    raise CheckpointError(f"checkpoint {path} is damaged: {_reason(e)}. {advice}") from e
  return {k: out[k] for k in like}


def _flat(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
  """Leaf path -> (shape, dtype)."""
  return {"/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path):
          (tuple(x.shape), str(np.dtype(x.dtype)))
          for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _check_shapes(path: pathlib.Path, name: str, like: Any, advice: str) -> None:
  """Refuses a tree of other leaves, shapes or types: Orbax would cut, pad or cast unseen."""
  try:
    saved = _flat(ocp.PyTreeCheckpointHandler().metadata(path / name).tree)
  except Exception as e:
    raise CheckpointError(f"checkpoint {path} is damaged: {_reason(e)}. {advice}") from e
  want = _flat(like)
  for leaf in sorted(saved.keys() | want.keys()):
    if saved.get(leaf) != want.get(leaf):
      theirs, ours = (f"{x[1]}{list(x[0])}" if x else "nothing"
                      for x in (saved.get(leaf), want.get(leaf)))
      raise CheckpointError(
          f"checkpoint {path} is of another {'model' if name == 'policy' else 'optimizer'}: "
          f"{name}/{leaf} is {theirs}, this config has {ours}. "
          "Use the config it was made with, or another workdir.")


def _like(tree: Any) -> Any:
  """Shapes and types of a tree of arrays, to be restored onto the default device."""
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      np.shape(x), x.dtype, sharding=getattr(x, "sharding", None) or device), tree)


class Checkpoints:
  """The checkpoints of one run: `keep` newest steps under one directory.

  Raises CheckpointError, whose text says what to do, for whatever goes wrong on disk; what goes
  wrong in the background is raised by the next call that writes or waits.
  """

  def __init__(self, directory: str | os.PathLike[str], keep: int = 2):
    if keep < 1:
      raise CheckpointError(f"keep must be at least 1 checkpoint, not {keep}")
    self.directory = pathlib.Path(directory).absolute()
    self.keep = keep
    self._background: ocp.AsyncCheckpointer | None = None
    self._begun: tuple[int, pathlib.Path] | None = None  # the step that is being written, where

  def steps(self) -> list[int]:
    """The steps that have a whole checkpoint, ascending."""
    if not self.directory.is_dir():
      return []
    return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdecimal())

  def latest(self) -> int | None:
    """The newest step, or None if there is none."""
    return max(self.steps(), default=None)

  def policy_path(self, step: int) -> str:
    """What `restore_policy` takes: the directory of one step."""
    return str(self.directory / str(step))

  def save(self, step: int, params: Any, opt_state: Any, meta: dict[str, Any]) -> None:
    """Writes step's checkpoint, then removes all but the `keep` newest.

    meta: plain JSON; `meta["model"]` is the policy's ModelConfig (or its asdict), and
    `meta["tokenizer"]`, a directory, is where its tokenizer lies. A checkpoint of the same
    step is replaced.
    """
    meta = _json_ready(meta)
    self.sweep()
    self._begin(step, params, opt_state, meta)
    self.wait()

  def save_async(self, step: int, params: Any, opt_state: Any, meta: dict[str, Any]) -> str:
    """Writes the policy, and begins to write the whole checkpoint in the background.

    Returns what `restore_policy` takes: a whole copy of the policy, which the next save removes.
    Until `wait` has returned, `latest` may be an earlier step. The arrays may be donated
    meanwhile: an accelerator's have been copied to the host, a CPU's are not overwritten.
    """
    meta = _json_ready(meta)
    self.sweep()
    policy = self.directory / f"{step}{_POLICY}"
    _write(ocp.Checkpointer(_items()), policy, {"policy": params, "meta": meta})
    self._begin(step, params, opt_state, meta)
    return str(policy)

  def wait(self) -> None:
    """Returns when nothing is being written; the checkpoint that was is whole, or it raises."""
    if self._begun is None:
      return
    (step, target), self._begun = self._begun, None
    with _writing(target):
      self._background.wait_until_finished()
    if _first():
      if target.name != str(step):
        self._remove(step)
        target.rename(self.policy_path(step))
      for old in self.steps()[:-self.keep]:
        self._remove(old)
    _meet(f"kr checkpoint {step}")

  def restore(self, step: int, like_params: Any, like_opt: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(params, opt_state, meta) of a step, bit for bit what was saved.

    like_params, like_opt: trees of arrays (or jax.ShapeDtypeStruct) of the same structure;
    each leaf is restored with the sharding that its counterpart has.
    """
    self.wait()
    others = [s for s in self.steps() if s != step]
    advice = (f"Remove that directory to go on from step {max(others)}." if others else
              "There is no other checkpoint: start again in a new workdir.")
    out = _read(pathlib.Path(self.policy_path(step)),
                {"policy": _like(like_params), "optimizer": _like(like_opt), "meta": None}, advice)
    return out["policy"], out["optimizer"], out["meta"]

  def sweep(self) -> None:
    """Waits, and removes what killed saves and removals left behind, and copies of policies."""
    self.wait()
    if _first() and self.directory.is_dir():
      for path in self.directory.iterdir():
        if any(mark in path.name for mark in _LITTER):
          shutil.rmtree(path, ignore_errors=True)
    _meet("kr checkpoint sweep")

  def _begin(self, step: int, params: Any, opt_state: Any, meta: dict[str, Any]) -> None:
    path = pathlib.Path(self.policy_path(step))
    target = path.with_name(path.name + ".again") if path.exists() else path
    if self._background is None:
      self._background = ocp.AsyncCheckpointer(
          _items(), async_options=ocp.options.AsyncOptions(
              create_directories_asynchronously=False))  # what may not be written is said at once
    _write(self._background, target, {"policy": params, "optimizer": opt_state, "meta": meta})
    self._begun = (step, target)

  def _remove(self, step: int) -> None:
    """Renames first: a kill in mid-removal must not leave half a step under its name."""
    path = self.directory / str(step)
    away = path.with_name(path.name + ".removed")
    shutil.rmtree(away, ignore_errors=True)
    path.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def save_policy(path: str | os.PathLike[str], params: Any, cfg: ModelConfig,
                tokenizer: str = "") -> None:
  """Writes a policy alone, so that `restore_policy(path)` reads it; path must not exist."""
  path = pathlib.Path(path).absolute()
  if path.exists():
    raise CheckpointError(f"{path} exists already: remove it or choose another path")
  shutil.rmtree(path.with_name(path.name + _LITTER[0]), ignore_errors=True)
  meta = _json_ready({"model": cfg, "tokenizer": tokenizer})
  _write(ocp.Checkpointer(_items()), path, {"policy": params, "meta": meta})


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
  """The meta of a checkpoint's directory: `model`, `tokenizer` and what the run added."""
  advice = "Give the directory of one step of a run, such as runs/quickstart/checkpoints/12."
  return _read(pathlib.Path(path).absolute(), {"meta": None}, advice)["meta"]


def restore_policy(path: str | os.PathLike[str], mesh: Mesh | None = None
                   ) -> tuple[dict[str, Any], ModelConfig]:
  """(params, config) of a checkpoint's policy item; the optimizer is neither read nor needed.

  path: `Checkpoints.policy_path(step)`, or what `save_policy` wrote. mesh: where the parameters
  are put, each device's pieces alone; None: the default device.
  """
  path = pathlib.Path(path).absolute()
  try:
    cfg = ModelConfig(**read_meta(path)["model"])
  except (KeyError, TypeError) as e:
    raise CheckpointError(f"checkpoint {path} names no model that this version of kr knows: "
                          f"{_reason(e)}. Restore it with the version that wrote it.") from e
  like = transformer.declared_map(lambda p: jax.ShapeDtypeStruct(
      p.shape, np.float32, sharding=mesh and NamedSharding(
          mesh, sharding.spec(mesh, p.axes, p.shape))), cfg)
  advice = "Use another step's directory."
  return _read(path, {"policy": _like(like)}, advice)["policy"], cfg
