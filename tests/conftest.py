"""The order of the files: the longest first, so that two processes end together."""

import pathlib

LONGEST = ["test_train.py", "test_serving.py", "test_sglang.py", "test_faults.py",
           "test_contract.py", "test_kills.py", "test_colocated.py", "test_smollm2.py",
           "test_resume.py", "test_learner.py", "test_plan.py", "test_families.py",
           "test_benchmarks.py", "test_attention.py", "test_loss.py", "test_hf.py",
           "test_serve.py"]


def pytest_collection_modifyitems(items):
  place = {name: n for n, name in enumerate(LONGEST)}
  items.sort(key=lambda item: place.get(pathlib.Path(item.path).name, len(LONGEST)))
