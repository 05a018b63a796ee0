"""Reads a compiled program (XLA's HLO as text): what it sends over which axis, what it multiplies.

The text to read is that of the partitioned program before a backend touched it
(`partitioned`): its collectives have the types that an accelerator would send, where the CPU
backend, say, turns bfloat16 into float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
import math
import pathlib
import re
import tempfile
from typing import Any, NamedTuple

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# Operations that only rename, reshape or retype what they are given.
_VIEWS = ("bitcast", "reshape", "transpose", "copy", "convert")
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


class Op(NamedTuple):
  """One instruction: its type as text, opcode, operands' names, and the rest of its line."""

  type: str
  opcode: str
  operands: tuple[str, ...]
  rest: str
  root: bool


class Program(NamedTuple):
  """computations: name -> instruction's name -> Op. times: name -> how often it runs.

  unknown: how many loops there are whose length the text does not tell; counted as 1.
  """

  computations: dict[str, dict[str, Op]]
  times: dict[str, float]
  unknown: int


class Collective(NamedTuple):
  """What one device receives by one instruction. axes: the mesh axes that its groups span."""

  kind: str
  axes: tuple[str, ...]
  received_bytes: float  # each time
  times: float
  group: tuple[int, ...]  # devices of the first group


def partitioned(lowered: Any) -> tuple[Any, str, str]:
  """Compiles; -> (compiled, the partitioned program's text, the largest buffers' report).

  On one device, which has nothing to partition, the program is the one before optimization.
  """
  with tempfile.TemporaryDirectory() as dump:
    compiled = lowered.compile(compiler_options={
      "xla_dump_to": dump, "xla_dump_hlo_as_text": True,
      "xla_dump_hlo_pass_re": "spmd-partitioning"})
    files = sorted(pathlib.Path(dump).iterdir())
    read = lambda ending: [f.read_text() for f in files if ending in f.name]
    text = read("after_spmd-partitioning") or read("before_optimizations")
    report = read("memory-usage-report") or [""]
    if not text:
      raise RuntimeError("this jax writes no HLO dump, so that nothing can be counted")
  return compiled, text[0], report[0]


def parse(text: str) -> Program:
  """The computations of an HLO module and how often each runs, loops multiplied."""
  computations: dict[str, dict[str, Op]] = {}
  entry, current = "", None
  for line in text.splitlines():
    if line.endswith("{") and not line.startswith((" ", "HloModule")):
      name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
      current = computations.setdefault(name, {})
      entry = name if line.startswith("ENTRY") else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and " = " in line:
      name, op = _instruction(line)
      current[name] = op
  times: dict[str, float] = defaultdict(float)
  unknown = _spread(computations, entry, 1.0, times)
  return Program(computations, dict(times), unknown)


def _instruction(line: str) -> tuple[str, Op]:
  name, _, rest = line.strip().partition(" = ")
  root, name = name.startswith("ROOT "), name.removeprefix("ROOT ").lstrip("%")
  end = _closing(rest) + 1 if rest.startswith("(") else re.match(r"[^ ]*", rest).end()
  type_, rest = rest[:end], rest[end:].lstrip()
  opcode, _, rest = rest.partition("(")
  end = _closing("(" + rest) - 1
  operands = re.sub(r"/\*.*?\*/", "", rest[:end])
  names = tuple(part.split(" ")[-1].lstrip("%") for part in _split(operands))
  if opcode in ("constant", "parameter"):
    names = (operands,)
  return name, Op(type_, opcode, names, rest[end:], root)


def _closing(text: str) -> int:
  """The place of the bracket that closes the one at 0."""
  depth = 0
  for i, c in enumerate(text):
    depth += (c in "([{") - (c in ")]}")
    if depth == 0:
      return i
  return len(text)


def _split(text: str) -> list[str]:
  """Parts between commas that stand in no brackets."""
  parts, depth, start = [], 0, 0
  for i, c in enumerate(text):
    depth += (c in "([{") - (c in ")]}")
    if c == "," and depth == 0:
      parts.append(text[start:i].strip())
      start = i + 1
  return [p for p in [*parts, text[start:].strip()] if p]


def _spread(computations, name: str, times: float, out: dict[str, float]) -> int:
  """Adds `times` to a computation and to what it calls; -> loops of unknown length."""
  out[name] += times
  unknown = 0
  for op in computations[name].values():
    for attribute, called in _calls(op):
      if called not in computations or op.opcode in KINDS + ("reduce", "scatter", "sort"):
        continue
      more = times
      if op.opcode == "while":
        length = trip_count(op, computations)
        unknown += length is None and attribute == "body"
        more = times * (1 if length is None else length)
      unknown += _spread(computations, called, more, out)
  return unknown


def _calls(op: Op) -> Iterator[tuple[str, str]]:
  for attribute, names in re.findall(
      r"(condition|body|to_apply|calls|true_computation|false_computation|branch_computations)="
      r"(\{[^}]*\}|[^,\s]+)", op.rest):
    for name in names.strip("{}").split(","):
      yield attribute, name.strip().lstrip("%")


def trip_count(op: Op, computations: Mapping[str, dict[str, Op]]) -> int | None:
  """How often a while loop runs, or None: from XLA's note, or from `i < constant`, i from 0."""
  if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"', op.rest):
    return int(known[1])
  condition = computations[dict(_calls(op))["condition"]]
  root = next(o for o in condition.values() if o.root)
  bounds = [condition[n] for n in root.operands if n in condition]
  bounds = [o.operands[0] for o in bounds if o.opcode == "constant"]
  if root.opcode == "compare" and "direction=LT" in root.rest and len(bounds) == 1:
    return int(bounds[0]) if re.fullmatch(r"-?\d+", bounds[0]) else None
  return None


def type_bytes(type_: str) -> float:
  """Bytes of a type such as `bf16[4096,2]{1,0}`, or of a tuple of them."""
  total = 0.0
  for kind, shape in re.findall(r"([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]", type_):
    bits = _BITS.get(kind) or int(re.search(r"\d+", kind)[0])
    total += math.prod(int(n.strip("<=")) for n in shape.split(",") if n) * bits / 8
  return total


def _type_of(name: str, ops: Mapping[str, Op]) -> str:
  """The type of an operand; `x#3` is the third element of the tuple x."""
  name, _, element = name.partition("#")
  type_ = ops[name].type
  for index in filter(None, element.split("#")):
    type_ = _split(type_[1:-1])[int(index)]
  return re.sub(r"/\*.*?\*/", "", type_)


# -------------------------------------------------------------------- collectives


def collectives(program: Program, mesh: Mapping[str, int]) -> list[Collective]:
  """Every collective with what a device receives, by the usual ring algorithms.

  mesh: axis -> size, in the order of the devices. An all-reduce of which only a piece is used
  counts as a reduce-scatter: accelerators' compilers make it one.
  """
  out = []
  for name, ops in program.computations.items():
    if not (times := program.times.get(name, 0)):
      continue
    for op_name, op in ops.items():
      kind = op.opcode.removesuffix("-start")
      if kind not in KINDS:
        continue
      size = type_bytes(op.type) / (2 if op.opcode.endswith("-start") else 1)
      if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", op.rest)
        pairs = [tuple(map(int, p)) for p in re.findall(r"\{(\d+),(\d+)\}?", pairs[1] + "}")]
        moved = [p for p in pairs if p[0] != p[1]]
        axes = tuple(a for a in mesh if any(a in _varying(p, mesh) for p in moved))
        share = len(moved) / math.prod(mesh.values())
        group = moved[0] if moved else (0,)
      else:
        group = first_group(op.rest, mesh)
        axes, n = _varying(group, mesh), len(group)
        if kind == "all-reduce" and _only_sliced(op_name, ops):
          kind = "reduce-scatter"
        elif kind == "reduce-scatter":
          size *= n  # the type is that of the result
        share = (n - 1) / n * (2 if kind == "all-reduce" else 1)
      if size * share:
        out.append(Collective(kind, axes, size * share, times, group))
  return out


def first_group(rest: str, mesh: Mapping[str, int]) -> tuple[int, ...]:
  """The devices of an instruction's first replica group, in any of XLA's notations."""
  everyone = tuple(range(math.prod(mesh.values())))
  groups = rest.partition("replica_groups=")[2]
  if m := re.match(r"mesh\[(.*?)\]\s*(?:,?\s*device_ids=\S+\s*)?\{(.*?)\}", groups):
    # The devices that share the first place on all axes but those named. An axis may be cut:
    # 'x':(p)s is its part of size s, after a part of size p.
    axes = [(n, int(s)) for n, s in re.findall(r"'([^']+)'=(\d+)", m[1])]
    ids = [0]
    for named, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", m[2]):
      place = [n for n, _ in axes].index(named)
      step = math.prod(s for _, s in axes[place + 1:])
      size = axes[place][1]
      count = int(part or size)
      step *= size // (int(before or 1) * count)
      ids = [i + step * j for i in ids for j in range(count)]
    return tuple(ids)
  if m := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups):
    shape, dims = ([int(n) for n in m[i].split(",")] for i in (1, 2))
    order = [int(n) for n in m[3].split(",")] if m[3] else range(len(dims))
    ids = everyone
    if m[3]:
      strides = [math.prod(dims[i + 1:]) for i in range(len(dims))]
      ids = [0]
      for i in order:
        ids = [k + strides[i] * j for k in ids for j in range(dims[i])]
    return tuple(ids[:math.prod(shape[1:])])
  if m := re.match(r"\{\{([\d,]+)\}", groups):
    return tuple(int(n) for n in m[1].split(","))
  return everyone


def _varying(group: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes along which a group's devices differ."""
  axes, step = [], math.prod(mesh.values())
  for axis, size in mesh.items():
    step //= size
    if len({device // step % size for device in group}) > 1:
      axes.append(axis)
  return tuple(axes)


def _only_sliced(name: str, ops: Mapping[str, Op]) -> bool:
  users = [(n, o) for n, o in ops.items() if name in o.operands]
  return bool(users) and all(
    o.opcode == "dynamic-slice" or (o.opcode in _VIEWS and not o.root and _only_sliced(n, ops))
    for n, o in users)


# -------------------------------------------------------------------- matrix products


def products(program: Program) -> tuple[float, float]:
  """(FLOPs, bytes of operands and results) of all matrix products, loops multiplied."""
  flops = moved = 0.0
  for name, ops in program.computations.items():
    times = program.times.get(name, 0)
    for op in ops.values() if times else ():
      if op.opcode != "dot":
        continue
      types = [_type_of(n, ops) for n in op.operands[:2]]
      flops += times * _product_flops(op, types)
      moved += times * (type_bytes(op.type) + sum(map(type_bytes, types)))
  return flops, moved


def _product_flops(op: Op, types: list[str]) -> float:
  shape = [int(n) for n in re.search(r"\[([\d,]*)\]", types[0])[1].split(",") if n]
  contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.rest)[1]
  depth = math.prod(shape[int(i)] for i in contracted.split(",") if i)
  out = math.prod(int(n) for n in re.search(r"\[([\d,]*)\]", op.type)[1].split(",") if n)
  return 2.0 * out * depth
