"""What kr.train does before the RL; the whole of it runs in test_train.py."""

import os
import pathlib
import shutil

import pytest

from kr import stages
from kr import wiring
from test_configs import ROOT, load


@pytest.fixture
def config():
  return load(ROOT / "configs" / "quickstart.py").get_config("tiny")


def test_large_weights_are_linked_into_the_workdir_and_the_rest_is_copied(config, tmp_path):
  hub, snapshot = tmp_path / "blob", tmp_path / "snapshot"
  with hub.open("wb") as file:
    file.truncate(64 * 2 ** 20)  # sparse
  snapshot.mkdir()
  (snapshot / "model.safetensors").symlink_to(hub)  # as a hub's cache has it
  (snapshot / "config.json").write_text("{}")
  config.start.dir = str(snapshot)
  workdir = wiring.Workdir.create(tmp_path / "run")
  stages.make_start(workdir, config, None, [])
  weights = workdir.start / "model.safetensors"
  assert os.path.samefile(weights, hub) and not weights.is_symlink()
  assert not os.path.samefile(workdir.start / "config.json", snapshot / "config.json")
  shutil.rmtree(workdir.path)
  assert hub.stat().st_size == 64 * 2 ** 20  # the user's model outlives the run


def test_large_weights_are_copied_where_they_cannot_be_linked(config, tmp_path):
  elsewhere = pathlib.Path("/dev/shm")
  if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
    pytest.skip("there is no second file system")
  source = elsewhere / f"kr-test-{os.getpid()}"
  try:
    with source.open("wb") as file:
      file.truncate(64 * 2 ** 20)
    stages._link_or_copy(str(source), str(tmp_path / "copy"))
    assert (tmp_path / "copy").stat().st_size == 64 * 2 ** 20
    assert not os.path.samefile(tmp_path / "copy", source)
  finally:
    source.unlink(missing_ok=True)
