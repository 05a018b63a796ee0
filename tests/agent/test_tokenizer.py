"""The quick start's tokenizer: lossless, deterministic, and made for copying."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from agent_fixtures import SCAFFOLD, TEXTS
from kr.agent.template import COMPACT_TEMPLATE
from kr.agent.tokenizer import SPECIAL, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(compact_dir):
  from tokenizers import Tokenizer
  return Tokenizer.from_file(str(compact_dir / "tokenizer.json"))


@settings(deadline=None, max_examples=200)
@given(st.text() | st.lists(st.sampled_from(
    [*SCAFFOLD, *SPECIAL, "a", " ", "\n", "\r", "½", "é", "\u0301", "user", "7"])).map("".join))
def test_decoding_is_lossless(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["Ayacucho", "New York", "Zürich", "users", "140033"])
def test_a_name_is_the_same_tokens_wherever_it_stands(tokenizer, name):
  alone = tokenizer.encode(name).tokens
  for before, after in [(" ", " "), ("\n", "\n"), ('"', '"'), ("(", ")"), ("[", "]"), ("| ", " |"),
                        (SCAFFOLD[0], SCAFFOLD[1]), ("r1 ", ": x"), ("# ", ""), ("", ", x"),
                        ("<think>", "</think>")]:
    left = len(tokenizer.encode(before).tokens)
    tokens = tokenizer.encode(before + name + after).tokens
    assert tokens[left:left + len(alone)] == alone, (before, after)


def test_digits_are_single_tokens(tokenizer):
  assert tokenizer.encode("140033").tokens == list("140033")


def test_scaffold_strings_are_one_ordinary_token_each(tokenizer):
  for text in SCAFFOLD + ["user", "assistant"]:
    assert len(tokenizer.encode(text).ids) == 1
  whole = tokenizer.encode(SCAFFOLD[0] + "Ayacucho" + SCAFFOLD[1]).ids
  assert whole[0] == tokenizer.encode(SCAFFOLD[0]).ids[0]
  assert whole[-1] == tokenizer.encode(SCAFFOLD[1]).ids[0]
  special = {tokenizer.token_to_id(t) for t in SPECIAL}
  assert not special & set(whole) and len(special) == len(SPECIAL)


def test_a_role_name_inside_a_word_is_no_scaffold(tokenizer):
  single = tokenizer.encode("user").ids[0]
  assert single not in tokenizer.encode("superuser").ids
  assert single not in tokenizer.encode("users").ids


def test_training_is_deterministic_and_the_ids_are_dense(tmp_path):
  for name in ("a", "b"):
    train_tokenizer(iter(TEXTS), 300, tmp_path / name, SCAFFOLD)
  files = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
  for file in files:
    assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
  data = json.loads((tmp_path / "a" / files[0]).read_text())
  ids = [*data["model"]["vocab"].values(), *(t["id"] for t in data["added_tokens"])]
  assert sorted(ids) == list(range(300))


def test_transformers_reads_the_directory(compact_dir, tokenizer):
  from transformers import AutoTokenizer
  theirs = AutoTokenizer.from_pretrained(compact_dir)
  text = SCAFFOLD[0] + 'Zürich, "New York"<|im_end|>'
  assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
  assert theirs.decode(theirs(text)["input_ids"]) == text
  assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|endoftext|>")
  assert theirs.chat_template == COMPACT_TEMPLATE


def test_sizes_and_scaffolds_that_cannot_work_are_refused(tmp_path):
  with pytest.raises(ValueError, match="at least 271"):  # 256 bytes + 9 special + 4 roles + 2
    train_tokenizer(TEXTS, 270, tmp_path, ["a{", "b{"])
  with pytest.raises(ValueError, match="plain, non-empty"):
    train_tokenizer(TEXTS, 400, tmp_path, ["<think>x"])
  with pytest.raises(ValueError, match="plain, non-empty"):
    train_tokenizer(TEXTS, 400, tmp_path, [""])
