"""What a step of a config would need on a mesh, without the hardware: `kr.train --plan`.

The learner's own compiled functions are lowered from abstract arrays and compiled ahead of time
for as many virtual CPU devices as the mesh has. Memory is the compiler's own account for one
device, collectives are read from the partitioned program, FLOPs are counted by formula.
"""

from __future__ import annotations

from collections import defaultdict
import dataclasses
import math
import pathlib
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import ml_collections
import optax

from kr import experiment
from kr import wiring
from kr.model import abstract
from kr.model import cost
from kr.model import families
from kr.model import hf
from kr.model import hlo
from kr.model import sharding
from kr.model import transformer
from kr.model.config import Execution, ModelConfig
from kr.model.lora import Lora
from kr.rl import learner
from kr.rl import loss as loss_lib

GIB = 2.0 ** 30
MOST = 1024  # devices of a mesh: each is a virtual one here
GROWTH = 4  # how many times more devices than asked for an advice may take


class Setting(NamedTuple):
  """What a step is compiled from: named values of a config. rows: of a whole step."""

  cfg: ModelConfig
  how: Execution
  mesh: str
  optimizer: optax.GradientTransformation
  lora: Lora | None
  micro_rows: int
  row_tokens: int
  segment_tokens: int
  trained_share: float
  rows: int


class Plan(NamedTuple):
  """Per device: bytes of what lies in memory at the peak, and what a whole step does.

  memory: component -> bytes, of the phase with the higher peak. host_bytes: in host memory.
  largest: the biggest buffers that are not of the state, as (bytes, shapes). flops, moved_bytes:
  by formula, recomputation included; model_flops: without. compiled_…: of the program's matrix
  products, where unknown_loops of it were counted as one round. network: of the whole step.
  """

  devices: int
  memory: dict[str, float]
  host_bytes: float
  largest: list[tuple[float, str]]
  flops: float
  model_flops: float
  moved_bytes: float
  compiled_flops: float
  compiled_bytes: float
  unknown_loops: int
  network: list[hlo.Collective]

  @property
  def total_bytes(self) -> float:
    return sum(self.memory.values())


# -------------------------------------------------------------------- from the config


def read(config: ml_collections.ConfigDict) -> Setting:
  """The setting of a config. Raises ValueError.

  A step is thought as long as it can get: all trajectories fill their context, the policy samples
  all tokens that it may.
  """
  rl, agent = config.rl, config.agent
  how, lora, optimizer = experiment.learner_parts(config)
  if how.attention not in ("plain", "auto"):  # a kernel that this machine cannot compile
    how = dataclasses.replace(how, attention="blockwise")
  trajectories = rl.tasks_per_step * rl.group_size
  rows = math.ceil(trajectories * agent.max_context_tokens / rl.row_tokens)
  return Setting(
      cfg=model_of(config), how=how, mesh=config.learner.mesh, optimizer=optimizer, lora=lora,
      micro_rows=rl.micro_rows, row_tokens=rl.row_tokens, segment_tokens=agent.max_context_tokens,
      trained_share=min(agent.max_turns * agent.max_turn_tokens / agent.max_context_tokens, 1.0),
      rows=math.ceil(rows / rl.micro_rows) * rl.micro_rows)


def model_of(config: ml_collections.ConfigDict) -> ModelConfig:
  """The model's shape: from `start.dir`, or, where that is not at hand, `config.model`.

  Both are Hugging Face's config.json, the latter as far as it matters.
  """
  path = pathlib.Path(config.start.dir, "config.json")
  if path.is_file():
    return hf.read_config(path.parent)
  if not (data := wiring.plain(config.get("model", ml_collections.ConfigDict()))):
    raise wiring.UserError(f"start.dir={config.start.dir} holds no config.json, and the config has "
                           "no `model` to plan with")
  try:
    return families.from_hf(data)
  except (ValueError, KeyError, TypeError) as e:
    raise wiring.UserError(f"config.model: {e}") from e


# -------------------------------------------------------------------- compiled, not run


def device_count(mesh: str) -> int:
  """How many devices a mesh takes. Raises ValueError if it leaves one axis open."""
  sizes = sharding.parse(mesh)
  if -1 in sizes.values():
    raise ValueError("a plan needs every mesh axis as a number: there are no devices to count")
  if (n := math.prod(sizes.values())) > MOST:
    raise ValueError(f"the mesh {mesh} has {n} devices; a plan makes {MOST} at most")
  return n


def make(s: Setting) -> Plan:
  """Compiles the setting's step for its mesh, and counts. Raises ValueError for what clashes."""
  n = device_count(s.mesh)
  mesh = sharding.make_mesh(s.mesh, jax.devices("cpu")[:n]) if n > 1 else None
  with jax.set_mesh(mesh) if mesh else jax.default_device(jax.devices("cpu")[0]):
    declared = learner._trained(s.cfg, s.lora)
    params = abstract.arrays(declared, mesh)
    frozen = abstract.arrays(transformer.declare(s.cfg), mesh) if s.lora else None
    rows = abstract_rows(s, mesh)
    state = learner._init.lower(params, s.optimizer, s.cfg, s.lora).compile()
    state = jax.tree.map(
      lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where if mesh else None),
      jax.eval_shape(s.optimizer.init, params), state.output_shardings)
    accumulate, text, report = hlo.partitioned(learner._accumulate.lower(
      params, frozen, params, rows, s.cfg, s.how, s.lora))
    apply, text_of_apply, _ = hlo.partitioned(learner._apply.lower(
      params, state, params, s.optimizer, s.cfg, s.lora))
  sizes = dict(mesh.shape) if mesh else {}
  memory = peak(accumulate, apply, {
    "parameters": abstract.bytes_of([params, frozen]), "gradients": abstract.bytes_of(params),
    "optimizer": abstract.bytes_of(state), "rows": abstract.bytes_of(rows)})
  host_bytes = 0.0
  if s.how.remat == "offload":  # a CPU has one memory, so the layers' inputs are still in there
    host_bytes = (s.cfg.layers * s.micro_rows * s.row_tokens * s.cfg.width
                  * (2 if s.how.precision == "bfloat16" else 4)
                  / (rows.row.shape[0] if mesh else 1))
    memory["temporaries"] -= host_bytes
  times = s.rows / s.micro_rows
  first, second = hlo.parse(text), hlo.parse(text_of_apply)
  network = [c._replace(times=c.times * times) for c in hlo.collectives(first, sizes)]
  flops, moved = hlo.products(first)
  stats = apply.memory_analysis()
  tokens = s.rows * s.row_tokens / n
  trained = tokens * s.trained_share
  again = 0.0 if s.how.remat in ("none", "dots") else 1.0
  return Plan(
    devices=n,
    memory=memory, host_bytes=host_bytes,
    largest=largest(report),
    flops=cost.step_flops(s.cfg, tokens, s.segment_tokens, trained, again),
    model_flops=cost.step_flops(s.cfg, tokens, s.segment_tokens, trained),
    moved_bytes=stats.argument_size_in_bytes + stats.output_size_in_bytes + cost.step_bytes(
      s.cfg, tokens, trained, times, sizes, 4 if s.how.precision == "float32" else 2, again),
    compiled_flops=flops * times, compiled_bytes=moved * times,
    unknown_loops=first.unknown,
    network=network + hlo.collectives(second, sizes))


def abstract_rows(s: Setting, mesh: Mesh | None) -> loss_lib.Rows:
  """A micro-batch of full rows, with as many trained tokens as the setting says."""
  across = sharding.size(mesh, sharding.RULES["rows"]) if mesh else 1
  along = sharding.size(mesh, "context") if mesh else 1
  if s.micro_rows % across:
    raise ValueError(f"rl.micro_rows={s.micro_rows} is not a multiple of the {across} parts that "
                     "the mesh cuts rows into")
  sharding.zigzag(s.row_tokens, along)  # refuses what it cannot split
  trained = s.micro_rows // across * math.ceil(s.row_tokens / along * s.trained_share)
  by_row = NamedSharding(mesh, sharding.spec(mesh, ("rows", "tokens"))) if mesh else None
  by_piece = NamedSharding(mesh, P(loss_lib.PIECES, None)) if mesh else None
  whole = jax.ShapeDtypeStruct((s.micro_rows, s.row_tokens), jnp.int32, sharding=by_row)
  piece = lambda dtype: jax.ShapeDtypeStruct(
    (across * along, learner.padded(trained, 512)), dtype, sharding=by_piece)
  return loss_lib.Rows(*[whole] * 3, *[piece(jnp.int32)] * 3, *[piece(jnp.float32)] * 3)


def peak(accumulate: Any, apply: Any, state: dict[str, float]) -> dict[str, float]:
  """Components at the higher of two peaks: while gradients are taken, or while they are applied.

  All of `state` stays throughout but the rows, which are gone when gradients are applied.
  """
  def fresh(compiled: Any) -> float:
    m = compiled.memory_analysis()
    return m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes

  taken = {**state, "temporaries": fresh(accumulate)}
  applied = {**state, "rows": 0.0, "temporaries": fresh(apply)}
  return max(taken, applied, key=lambda parts: sum(parts.values()))


def largest(report: str, count: int = 3) -> list[tuple[float, str]]:
  """The biggest buffers of XLA's memory report, one of each shape; not all live at once."""
  units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
  out: dict[str, float] = {}
  for size, unit, shapes in re.findall(
      r"^ *[\d.]+\w*\( *\d+%\); *([\d.]+)(\w+); *\d+; *\d+; *(.*)$", report, re.MULTILINE):
    shape = max(re.findall(r"[a-z]\w*\[[\d,]*\]", shapes), key=hlo.type_bytes)
    out[shape] = max(out.get(shape, 0.0), float(size) * units.get(unit, 1))
  return sorted(((size, shape) for shape, size in out.items()), reverse=True)[:count]


# -------------------------------------------------------------------- what to say


def seconds(plan: Plan, chip: cost.Chip) -> dict[str, float]:
  """The least time that a step takes by each of the three limits, were it alone."""
  return {
    "compute": plan.flops / chip.flops,
    "memory": plan.moved_bytes / chip.hbm_bandwidth,
    "network": sum(c.received_bytes * c.times / cost.link_bandwidth(chip, c.group)
                   for c in plan.network),
  }


def table(s: Setting, plan: Plan, name: str) -> str:
  """The plan as a page of text."""
  chip = cost.CHIPS[name]
  layers, head = cost.active_parameters(s.cfg)
  lines = [
    f"{cost.total_parameters(s.cfg) / 1e6:,.0f} M parameters, {(layers + head) / 1e6:,.0f} M of "
    f"them multiply a token; {s.mesh or 'one device'}: {plan.devices} x {name}",
    f"a step at most: {s.rows} rows of {s.row_tokens} tokens, {s.micro_rows} at a time, "
    f"{s.trained_share:.0%} of them trained",
    f"{s.how.precision}, remat {s.how.remat}" + (f", LoRA {s.lora.rank}" if s.lora else "")
    + "; compiled for CPU devices, whose attention is blockwise", "",
    "memory of a device           GiB",
    *(f"  {part:<22}{size / GIB:>8.2f}" for part, size in plan.memory.items()),
    f"  {'together':<22}{plan.total_bytes / GIB:>8.2f}  of {chip.hbm_bytes / GIB:.2f}: "
    + verdict(plan, chip),
  ]
  if plan.host_bytes:
    lines.append(f"  {'in host memory':<22}{plan.host_bytes / GIB:>8.2f}")
  lines += ["  largest temporaries: " + "; ".join(
    f"{size / GIB:.2f} {shapes}" for size, shapes in plan.largest)] if plan.largest else []
  lines += ["", "a step on a device",
            f"  by formula   {plan.flops:>9.3g} FLOPs (without recomputation "
            f"{plan.model_flops:.3g}), {plan.moved_bytes / 1e9:.3g} GB moved",
            f"  as compiled  {plan.compiled_flops:>9.3g} FLOPs, {plan.compiled_bytes / 1e9:.3g} GB "
            "moved, in matrix products"
            + (f", {plan.unknown_loops} loops counted once" if plan.unknown_loops else "")]
  return "\n".join([*lines, *network_lines(plan, chip), "", *bound_lines(s, plan, name)])


def network_lines(plan: Plan, chip: cost.Chip) -> list[str]:
  """One line for each mesh axis, or axes together: GB received by kind, and seconds."""
  volume: dict[tuple, dict[str, float]] = defaultdict(lambda: defaultdict(float))
  spent: dict[tuple, float] = defaultdict(float)
  for c in plan.network:
    volume[c.axes][c.kind] += c.received_bytes * c.times / 1e9
    spent[c.axes] += c.received_bytes * c.times / cost.link_bandwidth(chip, c.group)
  if not volume:
    return []
  short = [kind.removeprefix("collective-") for kind in hlo.KINDS]
  row = lambda name, values, last: f"  {name:<20}" + "".join(
    f"{v:>{len(k) + 2}}" for k, v in zip(short, values)) + f"{last:>10}"
  out = ["", row("received, GB", short, "seconds")]
  for axes in sorted(volume, key=lambda axes: -spent[axes]):
    if spent[axes] > 1e-6:
      values = [f"{volume[axes][kind]:.4g}" if volume[axes][kind] else "" for kind in hlo.KINDS]
      out.append(row("+".join(axes), values, f"{spent[axes]:.3g}"))
  return out


def bound_lines(s: Setting, plan: Plan, name: str) -> list[str]:
  """Seconds by each limit, and what follows for the step."""
  limits = seconds(plan, cost.CHIPS[name])
  least = max(limits.values())
  tokens = s.rows * s.row_tokens
  share = plan.model_flops / least / cost.CHIPS[name].flops
  return [
    f"bound on {name}: " + ", ".join(f"{what} {t:.3g} s" for what, t in limits.items()),
    f"  at least {least:.3g} s a step, {max(limits, key=limits.get)}-bound",
    f"  at most {tokens / least:,.0f} tokens/s, {tokens / least / plan.devices:,.0f} a chip: "
    f"{share:.0%} model FLOPs utilisation",
  ]


def verdict(plan: Plan, chip: cost.Chip) -> str:
  """Whether it fits, by how much not, and what takes most."""
  over = plan.total_bytes - chip.hbm_bytes
  if over <= 0:
    return f"fits, {-over / GIB:.2f} left"
  worst = max(plan.memory, key=plan.memory.get)
  return f"does NOT fit by {over / GIB:.2f}; most are {worst}"


# -------------------------------------------------------------------- what would make it fit


def remedies(s: Setting, plan: Plan, chip: cost.Chip) -> list[dict[str, Any]]:
  """Changes of the config, the gentle first: key -> value. Each comes on top of those before."""
  sizes = {**dict.fromkeys(sharding.AXES, 1), **sharding.parse(s.mesh)}
  state = sum(plan.memory[part] for part in ("parameters", "gradients", "optimizer"))
  across = lambda: math.prod(sizes[a] for a in sharding.RULES["rows"])
  out: list[dict[str, Any]] = []

  def reshape(**new: int) -> None:
    sizes.update(new)
    out.append({"learner.mesh": write(sizes), "rl.micro_rows": across()})

  if s.how.remat in ("none", "dots"):
    out.append({"learner.remat": "block"})
  if s.micro_rows > across():
    out.append({"rl.micro_rows": across()})
  if s.how.precision != "bfloat16":
    out.append({"learner.precision": "bfloat16"})
  if sizes["data"] > 1:  # copies of the state cost memory for nothing
    reshape(fsdp=sizes["fsdp"] * sizes["data"], data=1)
  if state > 0.7 * chip.hbm_bytes:
    need = math.ceil(math.log2(state / (0.7 * chip.hbm_bytes)))
    reshape(fsdp=sizes["fsdp"] * min(2 ** need, GROWTH))
  for axis in ("tensor", "context", "context"):  # tensor splits the head, context the rows
    whole = s.cfg.heads if axis == "tensor" else s.row_tokens // 2
    if sizes["fsdp"] % 2 == 0 and whole % (2 * sizes[axis]) == 0:
      reshape(**{"fsdp": sizes["fsdp"] // 2, axis: sizes[axis] * 2})
  if s.how.remat != "offload":
    out.append({"learner.remat": "offload"})
  if s.lora is None and state > plan.total_bytes / 4:
    out.append({"learner.lora_rank": 16})
  return out


def write(sizes: dict[str, int]) -> str:
  """The text of a mesh, as `sharding.parse` reads it."""
  return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1)


def advise(config: ml_collections.ConfigDict, plan: Plan, name: str) -> list[str]:
  """Tries one remedy after the other until the step fits; says what each brings."""
  chip, given, out, best = cost.CHIPS[name], {}, [], plan.total_bytes
  for change in remedies(read(config), plan, chip):
    trial = ml_collections.ConfigDict(config)
    trial.update_from_flattened_dict(given | change)
    plan = make(read(trial))
    flags = " ".join(f"--config.{key}={value}" for key, value in (given | change).items())
    out.append(f"  {flags}\n    {plan.total_bytes / GIB:.2f} GiB: {verdict(plan, chip)}")
    if plan.total_bytes <= chip.hbm_bytes:
      return ["what makes it fit, one change after the other:", *out]
    if plan.total_bytes < best:
      given, best = given | change, plan.total_bytes
  return ["not enough, one change after the other (next: more chips, or shorter rows by",
          "--config.rl.row_tokens and --config.agent.max_context_tokens):", *out]


def main(config: ml_collections.ConfigDict, name: str) -> int:
  """Prints the plan of a config on its mesh of chips `name`; -> 0 if it fits, else 1.

  Must come before jax has seen its devices: it makes as many as the mesh has.
  """
  try:
    s = read(config)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", GROWTH * device_count(s.mesh))
    jax.config.update("jax_enable_compilation_cache", False)  # what is kept is not dumped
    abstract.group_products()
    plan = make(s)
    print(table(s, plan, name), flush=True)
    if plan.total_bytes <= cost.CHIPS[name].hbm_bytes:
      return 0
    print("", *advise(config, plan, name), sep="\n", flush=True)
  except ValueError as e:
    raise wiring.UserError(f"--plan: {e}") from e
  return 1
