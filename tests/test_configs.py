"""Every experiment in configs/ loads, has a tiny form, and says how to run it."""

import ast
import dataclasses
import importlib.util
import pathlib
import re

import ml_collections
import pytest

from kr import experiment
from kr import wiring
from kr.model.config import ModelConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = sorted(p for p in (ROOT / "configs").glob("*.py") if p.name != "__init__.py")


def load(path: pathlib.Path):
  spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def flat(config: ml_collections.ConfigDict, prefix: str = "") -> dict[str, object]:
  out = {}
  for key, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      out.update(flat(value, f"{prefix}{key}."))
    else:
      out[prefix + key] = value
  return out


def test_there_is_a_quickstart():
  assert "quickstart" in [p.stem for p in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
class TestConfig:

  def test_it_loads_and_has_a_tiny_form_with_the_same_keys(self, path):
    module = load(path)
    full, tiny = module.get_config(), module.get_config("tiny")
    assert isinstance(full, ml_collections.ConfigDict)
    assert flat(full).keys() == flat(tiny).keys()
    assert flat(full) != flat(tiny)

  def test_two_loads_give_equal_and_independent_configs(self, path):
    module = load(path)
    assert flat(module.get_config()) == flat(load(path).get_config())
    assert module.get_config() is not module.get_config()

  def test_its_values_are_plain(self, path):
    """So that a workdir can record the config and compare it with the next run's."""
    for key, value in flat(load(path).get_config()).items():
      items = value if isinstance(value, (tuple, list)) else [value]
      assert all(isinstance(v, (int, float, str, bool, type(None))) for v in items), key

  def test_an_unknown_form_is_refused(self, path):
    with pytest.raises(ValueError, match="tiny"):
      load(path).get_config("no_such_form")

  def test_its_docstring_says_command_hardware_time_and_score(self, path):
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"--config=configs/{path.name}" in doc
    for word in ("command", "hardware", "time", "score"):
      assert re.search(rf"\b{word}", doc, re.IGNORECASE), f"no {word} in the docstring"


@pytest.fixture
def config():
  return load(ROOT / "configs" / "quickstart.py").get_config("tiny")


@pytest.mark.parametrize("change, words", [
    ({"learner.mesh": "fdsp=2"}, "config.learner: .*'fdsp' is none of data, fsdp"),
    ({"learner.mesh": "fsdp=two"}, "whole number"),
    ({"learner.precision": "float16"}, "config.learner: precision='float16' is none of float32"),
    ({"learner.remat": "full"}, "remat='full' is none of none, dots"),
    ({"learner.attention": "quick"}, "attention"),
    ({"learner.head_chunk": 0}, "head_chunk"),
    ({"learner.optimizer": "adam"}, "'adam' is neither adamw nor muon"),
    ({"learner.schedule": "step"}, "'step' is none of constant"),
    ({"learner.schedule": "cosine"}, "more steps in total"),  # 3, and a warm-up of 5
    ({"learner.lora_rank": -1}, "lora_rank=-1"),
    ({"learner.lora_rank": 4, "learner.lora_alpha": 0.0}, "lora_alpha=0.0"),
    ({"learner.lora_rank": 4, "learner.lora_alpha": float("inf")}, "lora_alpha=inf"),
    ({"learner.lora_targets": ("wq",)}, "without a lora_rank"),
    ({"rl.row_buckets": 12}, "config.rl: row_buckets=12"),
    ({"rl.row_tokens": 0}, "row_tokens must be at least 1"),
    ({"rl.b2": 1.0}, "b2=1.0"),
    ({"rl.clip_norm": 0.0}, "clip_norm=0.0"),
    ({"rl.warmup_steps": -3}, "warmup_steps=-3"),
    ({"rl.weight_decay": -1.0}, "weight_decay=-1.0"),
    ({"rollout.concurrency": 0}, "rollout.concurrency=0 must be at least 1"),
    ({"server.kind": "sgland"}, "server.kind='sgland' is none of kr, sglang"),
    ({"eval.samples": 0}, "eval.samples=0 must be at least 1"),
    ({"rollout.max_staleness": -1}, "config.rollout: max_staleness must not be negative"),
    ({"rollout.enough": 0.0}, "config.rollout: enough is a share"),
    ({"rollout.max_pauses": 0}, "max_pauses must be at least 1"),
    ({"rollout.budget_s": -1.0}, "budget_s must not be negative"),
    ({"rollout.turn_s": -1.0}, "config.rollout: turn_s must be a number of seconds"),
    ({"rollout.trajectory_s": float("inf")}, "trajectory_s must be a number of seconds"),
    ({"rollout.grace_s": 0.0}, "grace_s=0.0 must be above 0"),
    ({"rollout.max_staleness": 1}, "set rl.off_policy to mask, tis, topr or keep"),
    ({"rollout.max_staleness": 1, "rl.off_policy": "mask"}, "would train on none: take tis"),
    ({"rollout.budget_s": 9.0}, "set rl.off_policy to mask"),
    ({"rollout.enough": 0.5}, "set rl.off_policy to mask"),
    ({"rl.off_policy": "maks"}, "off_policy='maks' is none of strict, mask"),
    ({"rl.ratio_cap": 0.0}, "ratio_cap=0.0 must be above 0"),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_a_learner_that_cannot_be_is_refused_before_anything_starts(config, change, words):
  config.update_from_flattened_dict(change)
  with pytest.raises(wiring.UserError, match=words):
    experiment.check_config(config)


def test_a_step_is_strictly_on_policy_unless_the_config_says_what_becomes_of_older_tokens(config):
  assert experiment.pace(config).oldest == 0
  config.rollout.update(max_staleness=1, enough=0.5, max_pauses=3)
  config.rl.off_policy = "tis"
  experiment.check_config(config)
  assert experiment.pace(config).oldest == 4


@pytest.mark.parametrize("kind", ["splash", "cudnn"])
def test_a_kernel_of_other_hardware_is_refused(kind):
  with pytest.raises(ValueError, match=f"attention='{kind}' needs a .PU, this is a CPU: take auto"):
    experiment.check_platform(kind, "cpu")
  for fits, platform in (("auto", "cpu"), ("splash", "tpu"), ("cudnn", "gpu")):
    experiment.check_platform(fits, platform)


def test_a_shared_prefix_is_refused_where_it_would_not_be_seen():
  dense = ModelConfig(vocab=8, width=8, layers=2, heads=1, kv_heads=1, head_dim=8, mlp=8)
  experiment.check_prefix("auto", dense, "cpu")
  experiment.check_prefix("cudnn", dense, "gpu")
  for kind, cfg, platform, said in (
      ("splash", dense, "tpu", "must be blockwise"), ("auto", dense, "tpu", "must be blockwise"),
      ("auto", dataclasses.replace(dense, window=4, window_layers=(1,)), "cpu", "sliding windows")):
    with pytest.raises(ValueError, match=said):
      experiment.check_prefix(kind, cfg, platform)


def test_a_config_without_the_learner_is_refused_with_the_keys_that_it_lacks(config):
  del config.learner.remat
  with pytest.raises(wiring.UserError, match="lacks learner.remat: take"):
    experiment.check_config(config)
  del config.learner
  with pytest.raises(wiring.UserError, match="lacks learner.mesh, learner.precision"):
    experiment.check_config(config)


def test_a_run_that_began_before_there_were_learner_options_goes_on_as_it_was(config, tmp_path):
  workdir = wiring.Workdir.create(tmp_path / "run")
  old = ml_collections.ConfigDict(wiring.plain(config))
  del old.learner, old.rl.row_buckets, old.rl.share_prefix, old.rl.off_policy
  old.rollout = dict(concurrency=64, budget_s=0.0)
  workdir.save_config(old)
  (workdir.checkpoints / "1").mkdir(parents=True)  # so that every key binds
  experiment.adopt_config(workdir, config)
  assert workdir.load_config().learner.precision == "float32"

  workdir.save_config(old)
  config.learner.lora_rank = 8
  with pytest.raises(wiring.UserError, match="learner.lora_rank: 0 → 8"):
    experiment.adopt_config(workdir, config)


def test_a_run_may_move_to_other_devices_but_not_to_another_optimizer(config, tmp_path):
  workdir = wiring.Workdir.create(tmp_path / "run")
  (workdir.checkpoints / "1").mkdir(parents=True)
  experiment.adopt_config(workdir, config)
  config.learner.update(mesh="fsdp=8", remat="block", scan=True)
  experiment.adopt_config(workdir, config)
  assert workdir.load_config().learner.mesh == "fsdp=8"
  config.learner.optimizer = "muon"
  with pytest.raises(wiring.UserError, match="learner.optimizer: 'adamw' → 'muon'"):
    experiment.adopt_config(workdir, config)
