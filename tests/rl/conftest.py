"""What the tests of pool, asynchrony and faults share."""

import pytest

from kr.rl import buffer as buffers


@pytest.fixture
def store(tmp_path):
  with buffers.ReplayBuffer(tmp_path / "buffer.db") as result:
    yield result


@pytest.fixture
def script():
  from test_pool import Script  # here: its assertions are rewritten when it is collected
  return Script()
