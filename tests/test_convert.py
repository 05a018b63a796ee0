"""kr.convert as a command: there and back, and what it says when it cannot."""

import json
import pathlib
import shutil
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import pytest
import tokenizers

from kr import convert
from kr import wiring
from kr.model import checkpoint, hf, transformer
from kr.model.config import ModelConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
START = ROOT / "starts" / "quickstart"
CFG = ModelConfig(vocab=61, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24, max_len=64)


def run(*arguments):
  return subprocess.run([sys.executable, "-m", "kr.convert", *arguments], cwd=ROOT,
                        capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  """A policy as a run leaves it: the tokenizer lies two directories up."""
  path = tmp_path_factory.mktemp("run")
  (path / "start").mkdir()
  tok = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
  tok.save(str(path / "start" / "tokenizer.json"))
  (path / "start" / "tokenizer_config.json").write_text("{}")
  checkpoint.save_policy(path / "checkpoints" / "3", transformer.init(CFG), CFG, "../../start")
  return path / "checkpoints" / "3"


def test_a_checkpoint_goes_to_hugging_face_and_back_bit_for_bit(policy, tmp_path):
  out, back, again = tmp_path / "hf", tmp_path / "orbax", tmp_path / "again"
  done = run(f"--source={policy}", f"--out={out}")
  assert done.returncode == 0 and "Hugging Face directory" in done.stderr, done.stderr
  assert (out / "tokenizer.json").is_file()
  assert run(f"--source={out}", f"--out={back}").returncode == 0
  params, cfg = checkpoint.restore_policy(back)
  assert cfg == CFG
  hf.export(params, cfg, checkpoint.read_meta(back)["tokenizer"], again)
  assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_a_workdir_means_its_newest_checkpoint(policy, tmp_path):
  flags.FLAGS.mark_as_parsed()
  newer = policy.parent / "20"
  checkpoint.save_policy(newer, transformer.init(CFG, seed=5), CFG, "../../start")
  try:
    for source, out in ((policy.parent.parent, "run"), (newer, "step")):
      with flagsaver.flagsaver(source=str(source), out=str(tmp_path / out)):
        convert.main(["kr.convert"])
  finally:
    shutil.rmtree(newer)
  files = [tmp_path / out / "model.safetensors" for out in ("run", "step")]
  assert files[0].read_bytes() == files[1].read_bytes()


def test_bfloat16_on_request(policy, tmp_path):
  done = run(f"--source={policy}", f"--out={tmp_path / 'hf'}", "--dtype=bfloat16")
  assert done.returncode == 0, done.stderr
  assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
  full = sum(x.size * 4 for x in hf.to_tensors(transformer.init(CFG), CFG).values())
  assert (tmp_path / "hf" / "model.safetensors").stat().st_size < 0.6 * full + 4096


@pytest.mark.parametrize("arguments, says", [
    (["--out=x"], "--source is missing"),
    (["--source=/nowhere", "--out=x"], "there is no /nowhere"),
    ([f"--source={ROOT / 'kr'}", "--out=x"], "no Hugging Face directory, no GGUF"),
    ([f"--source={ROOT / 'README.md'}", "--out=x"], "README.md is no GGUF file"),
    ([f"--source={START}", "--out=x", "--dtype=bfloat16"], "leave --dtype out"),
    ([f"--source={START}", f"--out={START}"], "exists already"),
    ([f"--source={START}", f"--out={START}/new"], "inside of --source"),
    ([f"--source={START}", "--out=x", "--tokenizer=/nowhere"], "/nowhere has no tokenizer.json"),
])
def test_the_error_says_what_is_wrong(arguments, says):
  names = ("source", "out", "dtype", "tokenizer")
  given = dict.fromkeys(names) | dict(a.lstrip("-").split("=") for a in arguments)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(**given), pytest.raises(ValueError, match=says) as error:
    convert.main(["kr.convert"])
  assert wiring.explain(error.value)  # ends as one line, not as a traceback


def test_a_mistake_ends_in_one_line_and_status_2():
  done = run("--source=/nowhere", "--out=x")
  assert done.returncode == 2
  assert done.stderr.strip().splitlines()[-1] == "error: there is no /nowhere"
