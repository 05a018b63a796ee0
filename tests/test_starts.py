"""The starting policies that ship are whole, small, and what their README says."""

import hashlib
import json
import pathlib

import pytest

from kr.model import hf

ROOT = pathlib.Path(__file__).resolve().parent.parent
STARTS = [ROOT / "starts" / "quickstart"]  # others are made by launch/, and ignored by git


@pytest.mark.parametrize("path", STARTS, ids=lambda p: p.name)
class TestStart:

  def test_checksums_hold_and_cover_every_file(self, path):
    sums = dict(reversed(line.split()) for line in (path / "SHA256SUMS").read_text().splitlines())
    for name, digest in sums.items():
      assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest, name
    assert sums.keys() == {p.name for p in path.iterdir()} - {"README.md", "SHA256SUMS"}

  def test_it_is_at_most_16_mb_and_a_few_million_parameters(self, path):
    assert sum(p.stat().st_size for p in path.iterdir()) <= 16_000_000
    tensors = hf.to_tensors(*hf.load(path))
    assert 1e6 < sum(x.size for x in tensors.values()) < 5e6

  def test_its_log_shows_demonstrations_of_mixed_quality(self, path):
    first, *steps = map(json.loads, (path / "log.jsonl").read_text().splitlines())
    assert 0.1 <= first["correct"] <= 0.5
    assert steps[-1]["log_prob"] > steps[0]["log_prob"]
