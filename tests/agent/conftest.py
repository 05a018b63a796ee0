"""The tokenizers' directories, made once."""

import pytest

from agent_fixtures import QWEN_STYLE, SCAFFOLD, TEXTS, write_tokenizer
from kr.agent.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def compact_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp("compact")
  train_tokenizer(TEXTS, 340, path, SCAFFOLD)
  return path


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory):
  return write_tokenizer(tmp_path_factory.mktemp("qwen"), QWEN_STYLE, jinja_file=True)
