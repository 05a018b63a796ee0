"""The tokenizers' directories, made once."""

import pytest

from agent_fixtures import PLAIN_STYLE, QWEN_STYLE, SCAFFOLD, TEXTS, write_tokenizer
from kr.agent.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def compact_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp("compact")
  train_tokenizer(TEXTS, 340, path, SCAFFOLD)
  return path


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory):
  return write_tokenizer(tmp_path_factory.mktemp("qwen"), QWEN_STYLE, jinja_file=True)


@pytest.fixture(scope="session")
def plain_dir(tmp_path_factory):
  """As SmolLM2: no tags among the tokens, and padding is the end of a turn."""
  return write_tokenizer(tmp_path_factory.mktemp("plain"), PLAIN_STYLE, tags=(), pad="<|im_end|>")
