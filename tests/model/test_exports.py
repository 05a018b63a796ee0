"""Exports: the policy that a server of Hugging Face directories gets, and what is tidied up."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from kr.model import checkpoint
from kr.model import hf
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.model.exports import Exports

CFG = ModelConfig(vocab=31, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=16, max_len=128)


@pytest.fixture(name="policy")
def fixture_policy(tmp_path):
  checkpoint.save_policy(tmp_path / "policy", transformer.init(CFG, 0), CFG)
  return tmp_path / "policy"


def names(path):
  return sorted(p.name for p in path.glob("*/*"))


def test_an_export_holds_the_checkpoints_parameters_bit_for_bit(policy, tokenizer_dir, tmp_path):
  exports = Exports(tmp_path / "exports", tokenizer_dir)
  params, cfg = hf.load(exports.add(policy, 3))
  want, _ = checkpoint.restore_policy(policy)
  assert cfg == CFG
  jax.tree.map(np.testing.assert_array_equal, params, want)


def test_a_hugging_face_directory_is_served_where_it_lies(policy, tokenizer_dir, tmp_path):
  exports = Exports(tmp_path / "exports", tokenizer_dir)
  path = exports.add(policy, 3)
  assert exports.add(path, 4) == path and names(tmp_path / "exports") == ["3"]


def test_only_what_is_served_is_kept_and_nothing_at_the_end(policy, tokenizer_dir, tmp_path):
  exports = Exports(tmp_path / "exports", tokenizer_dir)
  for version in (1, 2, 3):
    exports.add(policy, version)
  exports.keep(3)
  assert names(tmp_path / "exports") == ["3"]
  exports.close()
  assert not (tmp_path / "exports").exists()


def test_what_a_dead_process_left_is_removed_and_a_living_ones_is_not(tokenizer_dir, tmp_path):
  dead = subprocess.Popen([sys.executable, "-c", ""])
  dead.wait()
  host = socket.gethostname()
  for name in (f"{host}-{dead.pid}", f"{host}-{os.getppid()}", f"{host}-{os.getpid()}",
               f"other.{host}-{dead.pid}"):
    (tmp_path / "exports" / name / "7").mkdir(parents=True)
  Exports(tmp_path / "exports", tokenizer_dir)
  left = sorted(p.name for p in (tmp_path / "exports").iterdir())
  assert left == sorted([f"{host}-{os.getppid()}", f"other.{host}-{dead.pid}"])
