"""Every experiment in configs/ loads, has a tiny form, and says how to run it."""

import ast
import importlib.util
import pathlib
import re

import ml_collections
import pytest

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
