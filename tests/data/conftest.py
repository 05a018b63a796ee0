"""Worlds that the tests of this room share: built once a run."""

import pytest

from kr.data import world


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory):
  path = tmp_path_factory.mktemp("tiny") / "world"
  world.build(path, 0, **world.TINY)
  return world.World(path)


@pytest.fixture(scope="session")
def full_world(tmp_path_factory):
  path = tmp_path_factory.mktemp("full") / "world"
  world.build(path, 0)
  return world.World(path)
