"""What the trainer's config means: checked, adopted by a workdir, its learner made.

`kr.train` is the one that reads a config; `kr.plan` asks here for what it compiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh
import ml_collections
import numpy as np
import optax

from kr import stages
from kr import types
from kr import wiring
from kr.agent import loop
from kr.model import attention
from kr.model import hf
from kr.model import sharding
from kr.model.checkpoint import Checkpoints
from kr.model.config import Execution, ModelConfig
from kr.model.lora import Lora
from kr.rl import advantage
from kr.rl import batch as batch_lib
from kr.rl import loss as loss_lib
from kr.rl import pool
from kr.rl import reward
from kr.rl import server
from kr.rl.learner import Learner
from kr.rl.optim import make_optimizer

ConfigDict = ml_collections.ConfigDict


# -------------------------------------------------------------------- learner


def learner_parts(config: ConfigDict
                  ) -> tuple[Execution, Lora | None, optax.GradientTransformation]:
  """How the model is run, the adapters if any, and the optimizer. Raises ValueError."""
  c, rl = config.learner, config.rl
  if c.attention not in attention.KINDS or c.head_chunk < 1:
    raise ValueError(f"attention={c.attention!r} must be one of {', '.join(attention.KINDS)}, and "
                     f"head_chunk={c.head_chunk} at least 1")
  how = Execution(precision=c.precision, remat=c.remat, scan=c.scan, attention=c.attention,
                  head_chunk=c.head_chunk)
  if c.lora_targets and not c.lora_rank:
    raise ValueError(f"lora_targets={tuple(c.lora_targets)!r} without a lora_rank would train all "
                     "parameters: set lora_rank, or leave lora_targets empty")
  adapters = Lora(c.lora_rank, c.lora_alpha, tuple(c.lora_targets)) if c.lora_rank else None
  return how, adapters, make_optimizer(
      rl.learning_rate, rl.warmup_steps, rl.clip_norm, rl.weight_decay, rl.b2, kind=c.optimizer,
      schedule=c.schedule, total_steps=rl.steps)


def check_platform(kind: str, platform: str) -> None:
  """Refuses a kernel of other hardware. A plan may name it. Raises ValueError."""
  needs = {"splash": "tpu", "cudnn": "gpu"}.get(kind, platform)
  if needs != platform:
    raise ValueError(f"attention={kind!r} needs a {needs.upper()}, this is a {platform.upper()}: "
                     "take auto")


def check_prefix(kind: str, cfg: ModelConfig, platform: str) -> None:
  """Whether this attention and model can do with a prefix that stands once. Raises ValueError."""
  if kind == "splash" or kind == "auto" and platform == "tpu":
    raise ValueError("with rl.share_prefix, attention must be blockwise: splash, which auto takes "
                     "on a TPU, knows no tokens that several segments see")
  if any(cfg.window_of(layer) for layer in range(cfg.layers)):
    raise ValueError("set rl.share_prefix=False: this model's sliding windows count places of a "
                     "row, and behind a shared prefix these are no longer a segment's own")


def make_mesh(config: ConfigDict) -> Mesh | None:
  """The mesh that config.learner names, or None for one device. Raises ValueError."""
  if not config.learner.mesh:
    return None
  rl, text = config.rl, config.learner.mesh
  # A colocated engine may have the other devices.
  beside = config.server.get("kind") == "colocated"
  mesh = sharding.make_mesh(text, sharding.enough(text)[0] if beside else None)
  if rl.micro_rows % (across := sharding.size(mesh, sharding.RULES["rows"])):
    raise ValueError(f"rl.micro_rows={rl.micro_rows} is not a multiple of the {across} parts that "
                     f"the mesh {config.learner.mesh} cuts rows into")
  sharding.zigzag(rl.row_tokens >> (rl.row_buckets - 1), mesh.shape["context"])
  return mesh


def make_learner(workdir: wiring.Workdir, config: ConfigDict, checkpoints: Checkpoints
                 ) -> tuple[Learner, int, dict[str, Any]]:
  """The learner, its step and meta: the latest checkpoint's, or 0 for the starting policy.

  With adapters the policy that they are trained beside stays the starting one, and a checkpoint
  holds them with the optimizer's state; its policy is the merged one, for server and evaluation.
  """
  with stages.users_error("config.learner"):
    how, adapters, optimizer = learner_parts(config)
    check_platform(how.attention, jax.default_backend())
    mesh = make_mesh(config)
    params, cfg = hf.load(workdir.start, mesh)
    if config.rl.share_prefix:
      check_prefix(how.attention, cfg, jax.default_backend())
    learner = Learner(cfg, params, optimizer, micro_rows=config.rl.micro_rows, mesh=mesh, how=how,
                      lora=adapters, seed=config.seed, off_policy=config.rl.off_policy,
                      ratio_cap=config.rl.ratio_cap)
  del params  # the learner has its own, and a large policy must not lie in memory twice
  latest = checkpoints.latest()
  if latest is None:
    checkpoints.save(0, *learner.state(), meta_of(learner))
    return learner, 0, {}
  like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
                      learner.state())
  learner.params = learner.opt_state = None  # their memory is for what is restored
  policy, optimizer_tree, meta = checkpoints.restore(latest, *like)
  learner.load(policy, optimizer_tree)
  return learner, latest, meta


def meta_of(learner: Learner, metrics: dict[str, Any] | None = None) -> dict[str, Any]:
  """A checkpoint's meta; the step's metrics in case that the process dies before writing them."""
  return {"model": learner.cfg, "tokenizer": "../../start", "metrics": metrics}


# -------------------------------------------------------------------- rollout


def pace(config: ConfigDict) -> pool.Pace:
  """How acting keeps step with learning. Raises UserError."""
  c, off_policy = config.rollout, config.rl.off_policy
  with stages.users_error("config.rollout"):
    result = pool.Pace(concurrency=c.concurrency, max_staleness=c.max_staleness,
                       budget_s=c.budget_s or None, enough=c.enough, max_pauses=c.max_pauses)
    if result.oldest and off_policy == "strict":
      raise ValueError(
          "with max_staleness above 0, a budget_s or enough below 1, trained tokens may be of "
          "older policies: set rl.off_policy to mask, tis, topr or keep, which say what becomes of "
          "them")
    if result.max_staleness and off_policy == "mask":
      raise ValueError(
          "with max_staleness above 0 acting soon runs ahead so far that all tokens are of older "
          "policies, and rl.off_policy=mask would train on none: take tis, topr or keep")
  return result


def limits(config: ConfigDict) -> loop.Limits:
  """The bounds of a training rollout: every rollout's, and those in seconds. Raises UserError."""
  c, unlimited = config.rollout, wiring.limits(config)
  with stages.users_error("config.rollout"):
    return dataclasses.replace(unlimited, turn_s=c.turn_s, tool_s=c.tool_s,
                               trajectory_s=c.trajectory_s)


# -------------------------------------------------------------------- the run's own state

# What may differ between two starts of one run: its length, and what changes no result.
# A mesh and what follows it change the result by rounding alone: a run may move to other devices.
_FREE = ("rl.steps:", "rl.keep_checkpoints:", "start.rebuild:", "start.dir:", "server.",
         "eval.concurrency:", "rollout.concurrency:", "rollout.grace_s:", "learner.mesh:",
         "learner.remat:", "learner.scan:", "learner.attention:", "learner.head_chunk:",
         "rl.share_prefix:")

# Keys that came later, and the values by which a run that was begun without them goes on.
_LATER = {
    "server.kind": "kr", "server.count": 1, "server.urls": (), "server.mesh": "",
    "rl.row_buckets": 1, "rl.share_prefix": False, "learner.mesh": "",
    "learner.precision": "float32", "learner.remat": "none", "learner.scan": False,
    "learner.attention": "auto", "learner.head_chunk": 1024, "learner.optimizer": "adamw",
    "learner.schedule": "constant", "learner.lora_rank": 0, "learner.lora_alpha": 32.0,
    "learner.lora_targets": (), "rollout.max_staleness": 0, "rollout.enough": 1.0,
    "rollout.max_pauses": 4, "rollout.turn_s": 0.0, "rollout.tool_s": 0.0,
    "rollout.trajectory_s": 0.0, "rollout.grace_s": 30.0, "rl.off_policy": "strict",
    "rl.ratio_cap": 2.0}


def check_config(config: ConfigDict) -> None:
  """Refuses missing keys and values out of range before anything starts."""
  if missing := [key for key in _LATER if key.split(".")[1] not in config.get(
      key.split(".")[0], {})]:
    raise wiring.UserError(f"the config lacks {', '.join(missing)}: take them over from "
                           "configs/quickstart.py")
  rl = config.rl
  for key in ("eval.tasks", "eval.samples", "eval.concurrency", "rollout.concurrency",
              "server.slots"):
    section, name = key.split(".")
    if config[section][name] < 1:
      raise wiring.UserError(f"{key}={config[section][name]} must be at least 1")
  if config.server.kind not in (kinds := (*server.KINDS, "colocated")):
    raise wiring.UserError(f"server.kind={config.server.kind!r} is none of {', '.join(kinds)}")
  with stages.users_error("config.rl"):
    if rl.off_policy not in loss_lib.KINDS:
      raise ValueError(f"off_policy={rl.off_policy!r} is none of {', '.join(loss_lib.KINDS)}")
    if not rl.ratio_cap > 0:
      raise ValueError(f"ratio_cap={rl.ratio_cap} must be above 0")
    reward.step_rewards(types.StopReason.ANSWERED, True, 1, rl.gamma, rl.format_penalty)
    advantage.negative_sample_control([], rl.negatives_keep, np.random.default_rng(0))
    if min(rl.tasks_per_step, rl.group_size, rl.micro_rows, rl.row_tokens) < 1:
      raise ValueError("tasks_per_step, group_size, micro_rows and row_tokens must be at least 1")
    if rl.steps < 0 or not rl.learning_rate > 0:
      raise ValueError("steps must not be negative, and learning_rate must be above 0")
    if odd := [k for k, v in rl.items() if isinstance(v, float) and not np.isfinite(v)]:
      raise ValueError(f"{', '.join(odd)} must be finite")
    if not 0 <= rl.b2 < 1 or not rl.clip_norm > 0 or min(rl.warmup_steps, rl.weight_decay) < 0:
      raise ValueError(f"b2={rl.b2} must be at least 0 and below 1, clip_norm={rl.clip_norm} above "
                       f"0, warmup_steps={rl.warmup_steps} and weight_decay={rl.weight_decay} not "
                       "negative")
    if rl.keep_checkpoints < 2:
      raise ValueError("keep_checkpoints must be at least 2: the server may still need the last "
                       "policy while the next one is published")
    batch_lib.pack_by_length([], rl.row_tokens, rl.micro_rows, rl.row_buckets)
  pace(config)
  limits(config)
  if not config.rollout.grace_s > 0:
    raise wiring.UserError(f"rollout.grace_s={config.rollout.grace_s} must be above 0: the seconds "
                           "that SIGTERM leaves the run to stop")
  with stages.users_error("config.learner"):
    learner_parts(config)
    sharding.parse(config.learner.mesh)
  with stages.users_error("config.server"):
    sharding.parse(config.server.mesh)


def adopt_config(workdir: wiring.Workdir, config: ConfigDict) -> None:
  """Makes `config` the workdir's, or refuses a workdir of another one and says what differs.

  A key binds from the moment that something was made by it: until then it can be corrected.
  """
  latest = Checkpoints(workdir.checkpoints).latest()
  if workdir.config.is_file():
    saved = workdir.load_config()
    for key, value in _LATER.items():
      section, _, name = key.partition(".")
      saved[section] = {name: value, **saved.get(section, {})}
    made = {"world": (workdir.world(saved) / "manifest.json").is_file(),
            "tasks": workdir.tasks("train").is_file(), "start": workdir.start.is_dir()}
    differences = [line for line in wiring.config_differences(saved, config)
                   if not line.startswith(_FREE)
                   and made.get(line.split(".")[0], latest is not None)]
    if differences:
      raise wiring.UserError(
          f"{workdir.path} is the workdir of another config; what differs:\n  "
          + "\n  ".join(differences)
          + "\nGive another --workdir, or the config that the run was started with.")
    if config.rl.steps < (latest or 0):
      raise wiring.UserError(f"{workdir.path} is past step {config.rl.steps} already: a run can "
                             "be extended, not shortened. Give another --workdir.")
  workdir.save_config(config)


def finished(workdir: wiring.Workdir, config: ConfigDict) -> bool:
  """Whether the last stage has left its summary for this many steps."""
  summary = stages.read_derived(workdir.summary)
  return (workdir.report.is_file() and bool(summary)
          and summary["config"]["rl"]["steps"] == config.rl.steps)
