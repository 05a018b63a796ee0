"""The import rules of the rooms, read from the source.

    types ◄─ tools ◄─ agent ◄─ data ◄─ eval          types ◄─ agent, data, model ◄─ rl
    binaries import anything, nothing imports a binary;  configs import ml_collections only

jax appears in the model, in rl.loss, in rl.learner and in binaries only. kr.wiring is what
the binaries share, kr.stages, kr.experiment and kr.plan are parts of kr.train: binaries alone
import them.
"""

import ast
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARIES = {"train", "evaluate", "synthesize", "serve", "ask", "view", "convert"}
SHARED = {"wiring", "serving", "stages", "experiment", "plan"}  # of the binaries
# Room -> the rooms that it may import, besides itself and kr.types.
ROOMS = {
    "types": set(),
    "tools": set(),
    "agent": {"tools"},
    "data": {"agent", "tools"},
    "eval": {"data", "agent", "tools"},
    "model": set(),
    "rl": {"agent", "tools", "data", "model"},
}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
JAX_MODULES = {"kr.rl.loss", "kr.rl.optim", "kr.rl.learner"}
# They hold a learner or an engine, and so load jax; they have no jax of their own.
DRIVERS = {"kr.rl.start", "kr.rl.colocated"}


def module_name(path: pathlib.Path, root: pathlib.Path) -> str:
  parts = path.relative_to(root).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: pathlib.Path, root: pathlib.Path, modules: set[str]) -> set[str]:
  """The dotted names that a file imports, wherever in the file: functions and branches too.

  `from a import b` counts as a.b where that is a module of ours, else as a.
  """
  names = set()
  package = list(path.relative_to(root).parent.parts)
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = package[:len(package) - node.level + 1] if node.level else []
      base = ".".join(base + ([node.module] if node.module else []))
      names |= {f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names}
    elif (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
          and getattr(node.func, "attr", getattr(node.func, "id", "")) in
          ("import_module", "__import__")):
      names.add(str(node.args[0].value))
  return names


def room(module: str) -> str:
  """kr.rl.loss -> rl; kr.types -> types; kr -> ""."""
  return (module.split(".") + [""])[1]


def judge(module: str, name: str) -> str | None:
  """What is wrong with `module` importing `name`, or None."""
  mine, top = room(module), name.split(".")[0]
  if module.split(".")[0] == "configs":
    return None if top == "ml_collections" else "configs import ml_collections only"
  binary = mine in BINARIES | SHARED
  if top == "configs":
    return "only kr.train's --config flag reads a config file"
  if top in JAX:
    allowed = binary or mine == "model" or module in JAX_MODULES
    return None if allowed else "jax is for model, rl.loss, rl.learner and binaries"
  if top != "kr":
    return None
  theirs = room(name)
  if theirs in BINARIES:
    return "nothing imports a binary"
  if theirs in SHARED:
    return None if binary else f"only binaries import kr.{theirs}"
  if binary or theirs in ("", "types", mine) or theirs in ROOMS.get(mine, set()):
    return None
  return f"kr.{mine or '__init__'} may import {sorted(ROOMS.get(mine, set())) or 'no other room'}"


def violations(root: pathlib.Path) -> list[str]:
  """One line for each import of kr/ and configs/ that breaks a rule."""
  files = sorted((root / "kr").rglob("*.py")) + sorted((root / "configs").rglob("*.py"))
  modules = {module_name(f, root) for f in files}
  found = []
  for file in files:
    module = module_name(file, root)
    if module.startswith("kr.") and room(module) not in {*ROOMS, *BINARIES, *SHARED}:
      found.append(f"{module}: kr.{room(module)} is neither a room nor a binary of the design")
    found += [f"{module} imports {name}: {wrong}" for name in sorted(imports(file, root, modules))
              if (wrong := judge(module, name))]
  return found + reaches_jax(root, files, modules)


def reaches_jax(root: pathlib.Path, files: list[pathlib.Path], modules: set[str]) -> list[str]:
  """Modules outside of model, loss, learner and binaries that import jax through another one.

  rl's numpy modules may import kr.model.config, say, but not what pulls jax in after it.
  """
  # Importing a.b.c runs the __init__ of a and of a.b first.
  direct = {module_name(f, root): {
      name.rsplit(".", cut)[0] for name in imports(f, root, modules)
      for cut in range(name.count(".") + 1)} for f in files}

  def chain(module: str, seen: tuple[str, ...]) -> tuple[str, ...] | None:
    for name in sorted(direct.get(module, ())):
      if name.split(".")[0] in JAX:
        return seen + (name,)
      if name in direct and name not in seen and (found := chain(name, seen + (name,))):
        return found
    return None

  found = []
  for module in sorted(direct):
    free = (module.startswith("kr.") and room(module) not in {*BINARIES, *SHARED, "model"}
            and module not in JAX_MODULES | DRIVERS)
    if free and (path := chain(module, (module,))) and len(path) > 2:
      found.append(f"{' imports '.join(path)}: jax comes along")
  return found


def test_the_import_rules_hold():
  assert violations(ROOT) == []


@pytest.mark.parametrize("file, line, wrong", [
    ("kr/types.py", "from kr.tools import base", "kr.types may import no other room"),
    ("kr/tools/search.py", "import kr.agent.loop", "kr.tools may import no other room"),
    ("kr/agent/loop.py", "from kr.data.grade import grade", "kr.agent may import ['tools']"),
    ("kr/agent/loop.py", "from ..data import grade", "kr.agent may import ['tools']"),
    ("kr/data/grade.py", "from kr import eval", "kr.data may import"),
    ("kr/eval/runner.py", "from kr.rl import reward", "kr.eval may import"),
    ("kr/model/hf.py", "import kr.types, kr.agent.chat", "kr.model may import no other room"),
    ("kr/rl/reward.py", "import jax.numpy as jnp", "jax is for"),
    ("kr/rl/batch.py", "def f():\n  from orbax import checkpoint", "jax is for"),
    ("kr/rl/server.py", "from kr.model import hf", "jax comes along"),
    ("kr/tools/base.py", "import importlib\nimportlib.import_module('optax')", "jax is for"),
    ("kr/rl/rollout.py", "from kr import train", "nothing imports a binary"),
    ("kr/ask.py", "from kr.evaluate import main", "nothing imports a binary"),
    ("kr/rl/rollout.py", "from kr import wiring", "only binaries import kr.wiring"),
    ("kr/rl/learner.py", "import configs.quickstart", "--config flag"),
    ("configs/quickstart.py", "import kr.types", "ml_collections only"),
    ("configs/quickstart.py", "import os", "ml_collections only"),
    ("kr/helpers/misc.py", "import os", "neither a room nor a binary"),
])
def test_the_checker_catches(file, line, wrong, tmp_path):
  for existing, text in {
      "kr/__init__.py": "", "kr/types.py": "", "kr/train.py": "import jax", "kr/evaluate.py": "",
      "kr/wiring.py": "", "kr/data/__init__.py": "", "kr/data/grade.py": "",
      "kr/eval/__init__.py": "", "kr/model/hf.py": "import jax", "kr/rl/reward.py": "",
      "configs/quickstart.py": "",
  }.items():
    (tmp_path / existing).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / existing).write_text(text)
  assert violations(tmp_path) == []
  (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / file).write_text(line)
  found = violations(tmp_path)
  assert found and wrong in found[0], found


@pytest.mark.parametrize("file, line", [
    ("kr/eval/runner.py", "from kr.agent import loop\nfrom kr.data import grade\nimport kr.types"),
    ("kr/rl/learner.py", "import jax\nfrom kr.model import hf"),
    ("kr/model/decode.py", "import jax\nfrom flax import nnx"),
    ("kr/train.py", "import jax\nfrom kr import wiring\nfrom kr.rl import learner"),
    ("configs/quickstart.py", "from ml_collections import config_dict\nimport ml_collections"),
])
def test_the_checker_allows(file, line, tmp_path):
  (tmp_path / file).parent.mkdir(parents=True)
  (tmp_path / file).write_text(line)
  assert violations(tmp_path) == []


def declared(setup: pathlib.Path) -> set[str]:
  """The distributions that setup.py names, as import names."""
  import_names = {"absl_py": "absl", "orbax_checkpoint": "orbax"}
  names = set()
  for node in ast.walk(ast.parse(setup.read_text())):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      if match := re.match(r"([A-Za-z][\w.-]*)(\[\w+\])?\s*[<>=]=?\s*\d", node.value):
        name = match[1].replace("-", "_").replace(".", "_").lower()
        names.add(import_names.get(name, name))
  return names


def test_every_third_party_import_is_declared_in_setup_py():
  known = declared(ROOT / "setup.py")
  files = [f for d in ("kr", "configs", "tests", "launch") for f in (ROOT / d).rglob("*.py")]
  ours = {"kr", "configs", "tests", *(f.stem for f in files)}
  modules = {module_name(f, ROOT) for f in files}
  used = {}
  for file in files:
    for name in imports(file, ROOT, modules):
      used.setdefault(name.split(".")[0].lower(), file.relative_to(ROOT))
  # These come with a package that is declared and owns their versions.
  with_others = {"jaxlib": "jax", "ml_dtypes": "jax", "setuptools": "python"}
  stdlib = {name.lower() for name in sys.stdlib_module_names}
  undeclared = {name: str(file) for name, file in used.items()
                if name not in known | stdlib | with_others.keys() | {o.lower() for o in ours}}
  assert undeclared == {}
