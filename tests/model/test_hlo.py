"""The numbers that are read from a compiled program, against programs small enough to count."""

import json
import subprocess
import sys

import pytest

from kr.model import hlo

MESH = {"fsdp": 2, "context": 1, "tensor": 4}

# A loop of 5 rounds that gathers over tensor and multiplies, as XLA writes one.
PROGRAM = """HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%body (p: (s32[], f32[8,16], bf16[4,8])) -> (s32[], f32[8,16], bf16[4,8]) {
  %p = (s32[], f32[8,16]{1,0}, /*index=2*/bf16[4,8]{1,0}) parameter(0)
  %g = bf16[16,8]{1,0} all-gather(%p#2), replica_groups=[2,4]<=[8], dimensions={0}
  %d = f32[8,8]{1,0} dot(%p#1, %g), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[8,16]{1,0}, bf16[4,8]{1,0}) tuple(%p#0, %p#1, %p#2)
}

%condition (p.1: (s32[], f32[8,16], bf16[4,8])) -> pred[] {
  %p.1 = (s32[], f32[8,16]{1,0}, bf16[4,8]{1,0}) parameter(0)
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%p.1#0, %five), direction=LT
}

ENTRY %main (a: (s32[], f32[8,16], bf16[4,8]), b: f32[16]) -> f32[8] {
  %a = (s32[], f32[8,16]{1,0}, bf16[4,8]{1,0}) parameter(0)
  %b = f32[16]{0} parameter(1)
  %w = (s32[], f32[8,16]{1,0}, bf16[4,8]{1,0}) while(%a), condition=%condition, body=%body
  %r = f32[16]{0} all-reduce(%b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %i = s32[] constant(0)
  ROOT %s = f32[8]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={8}
}
"""


def test_loops_are_multiplied_and_collectives_are_laid_to_their_axes():
  program = hlo.parse(PROGRAM)
  gather, scatter = hlo.collectives(program, MESH)
  # 16·8 bfloat16, of which a quarter is one's own, 5 times.
  assert gather[:4] == ("all-gather", ("tensor",), 16 * 8 * 2 * 3 / 4, 5)
  # Of the sum over fsdp only half is used: 16 float32, of which half is received.
  assert scatter[:4] == ("reduce-scatter", ("fsdp",), 16 * 4 / 2, 1)
  assert program.unknown == 0


def test_matrix_products_in_loops():
  flops, moved = hlo.products(hlo.parse(PROGRAM))
  assert flops == 5 * 2 * 8 * 8 * 16
  assert moved == 5 * (8 * 16 * 4 + 16 * 8 * 2 + 8 * 8 * 4)


def test_a_sum_that_is_used_whole_is_sent_twice():
  whole = PROGRAM.replace("dynamic-slice(%r, %i), dynamic_slice_sizes={8}", "negate(%r)")
  *_, reduce = hlo.collectives(hlo.parse(whole), MESH)
  assert reduce[:4] == ("all-reduce", ("fsdp",), 2 * 16 * 4 / 2, 1)


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
  program = hlo.parse(PROGRAM.replace("constant(5)", "parameter(1)"))
  assert program.unknown == 1
  assert hlo.products(program)[0] == 2 * 8 * 8 * 16


@pytest.mark.parametrize("groups, ids", [
    ("replica_groups={{0,4},{1,5}}, x", (0, 4)),
    ("replica_groups={}, x", tuple(range(8))),
    ("replica_groups=[2,4]<=[8], x", (0, 1, 2, 3)),
    ("replica_groups=[4,2]<=[2,4]T(1,0), x", (0, 4)),
    ("replica_groups=[1,8]<=[8], x", tuple(range(8))),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", (0, 4)),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}, x", (0, 1, 2, 3)),
    ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, x", (0, 2)),
    ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}, x", (0, 1)),
    ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}, x", tuple(range(8))),
])
def test_every_notation_of_replica_groups(groups, ids):
  assert hlo.first_group(groups, MESH) == ids


@pytest.mark.parametrize("type_, size", [
    ("f32[]", 4), ("bf16[4096,2,128]{2,1,0}", 2 * 4096 * 256), ("pred[3]", 3), ("s8[5]{0}", 5),
    ("(f32[2]{0}, /*index=1*/s32[1,3]{1,0})", 20), ("u32[2,0]", 0), ("s4[8]", 4),
    ("f8e4m3fn[7]{0}", 7),
])
def test_bytes_of_a_type(type_, size):
  assert hlo.type_bytes(type_) == size


def test_a_permutation_costs_those_that_move():
  text = PROGRAM.replace(
      "%r = f32[16]{0} all-reduce(%b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add",
      "%r = f32[16]{0} collective-permute(%b), source_target_pairs={{0,1},{1,0},{2,2},{3,3}}")
  *_, permute = hlo.collectives(hlo.parse(text), MESH)
  assert permute[:4] == ("collective-permute", ("tensor",), 16 * 4 * 2 / 8, 1)


SCRIPT = """
import json, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from kr.model import hlo, sharding
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = sharding.make_mesh("fsdp=2,tensor=4")
def f(x, ws):  # x [32,64] @ w [64,64], contracted over tensor, 3 times
  step = lambda x, w: (jax.lax.with_sharding_constraint(
      jnp.einsum("bi,io->bo", x, w), NamedSharding(mesh, P("fsdp", None))), None)
  return jax.lax.scan(step, x, ws)[0]
def array(shape, *spec):
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
lowered = jax.jit(f).lower(array((32, 64), "fsdp", None), array((3, 64, 64), None, "tensor", None))
_, text, report = hlo.partitioned(lowered)
program = hlo.parse(text)
print(json.dumps([hlo.collectives(program, dict(mesh.shape)), hlo.products(program)[0],
                  "f32[" in report]))
"""


def test_what_xla_compiles_is_read_as_counted_by_hand():
  done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
  found, flops, reported = json.loads(done.stdout.splitlines()[-1])
  # 16 rows a device, 64 columns, summed over the 4 of tensor; the next round wants a quarter.
  assert [c[:4] for c in found] == [["reduce-scatter", ["tensor"], 16 * 64 * 4 * 3 / 4, 3]]
  assert flops == 3 * 2 * 16 * 64 * 16
  assert reported
