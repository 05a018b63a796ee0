"""The browser: pages from an offline store, HTML rendered to text lines with numbered links."""

from __future__ import annotations

import asyncio
import collections
import html as html_entities
import os
import pathlib
import re
import sqlite3
import threading
import urllib.parse
from typing import Any, Iterable

from selectolax.lexbor import LexborHTMLParser

from kr.tools.base import ToolSpec, clean, clip
from kr.tools.search import Search
from kr.types import ToolResult

_MAX_HTML_CHARS = 2_000_000
_MAX_LINE_CHARS = 600     # longer paragraphs wrap, so that paging by line reaches all of them
_MAX_DEPTH = 512          # parsing is quadratic in the depth: deeper pages lose their tags,
_MAX_OPEN_FORMATS = 50    # and unclosed <b> and the like are cloned into every later block

_DROPPED = frozenset(
    "script style noscript template svg math head iframe object embed canvas audio video select "
    "datalist".split())
_BLOCKS = frozenset(
    "html body address article aside blockquote center dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section "
    "summary table tbody thead tfoot caption tr ul".split())
_FORMATS = frozenset("a b big code em font i nobr s small strike strong tt u".split())
_UNNESTED = frozenset(
    "p li td th tr dt dd option tbody thead tfoot colgroup rb rt rp area base br col embed hr img "
    "input link meta param source track wbr html head body".split())
_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)")
_BREAK = "\n"             # a line break in the stream of text pieces


class PageStore:
  """Read-only pages: an SQLite file with one table pages(url PRIMARY KEY, title, html)."""

  def __init__(self, path: str | os.PathLike):
    """Raises FileNotFoundError or ValueError with what to do when `path` is no page store."""
    path = pathlib.Path(path).absolute()
    if not path.is_file():
      raise FileNotFoundError(f"no page store at {path}: build the world first")
    self._lock = threading.Lock()
    self._db = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True,
                               check_same_thread=False)
    try:
      self._db.execute("SELECT url, title, html FROM pages LIMIT 1").fetchone()
    except sqlite3.DatabaseError as e:
      self._db.close()
      raise ValueError(f"{path} is not a page store ({e}): build the world again") from None

  @staticmethod
  def write(path: str | os.PathLike, pages: Iterable[tuple[str, str, str]]) -> int:
    """Writes (url, title, html) rows by URL, replacing `path` when complete; returns the count.

    Raises ValueError when a URL occurs twice.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(path.name + ".building")
    building.unlink(missing_ok=True)
    db = sqlite3.connect(building)
    try:
      db.execute("CREATE TABLE pages(url TEXT PRIMARY KEY, title TEXT NOT NULL, "
                 "html TEXT NOT NULL) WITHOUT ROWID")
      rows = sorted(tuple(map(clean, page)) for page in pages)
      db.executemany("INSERT INTO pages VALUES (?, ?, ?)", rows)
      db.commit()
    except sqlite3.IntegrityError as e:
      raise ValueError(f"two pages share a URL ({e})") from None
    finally:
      db.close()
    os.replace(building, path)
    return len(rows)

  def get(self, url: str) -> tuple[str, str] | None:
    """(title, html) of a page, or None."""
    with self._lock:
      row = self._db.execute("SELECT title, html FROM pages WHERE url = ?",
                             (clean(url),)).fetchone()
    return row and tuple(x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in row)

  def urls(self) -> list[str]:
    """All URLs, sorted."""
    with self._lock:
      return [url for url, in self._db.execute("SELECT url FROM pages ORDER BY url")]

  def close(self) -> None:
    self._db.close()


def render(html: str | bytes, base_url: str) -> tuple[list[str], list[str]]:
  """(lines, links): the page's text, title first, links as `[n] text` with n 1-based into links.

  Never raises on any HTML. Links to the same URL share a number; fragments are dropped, and links
  that lead nowhere (scripts, mail, the page itself) are plain text.
  """
  if isinstance(html, bytes):
    html = html[:4 * _MAX_HTML_CHARS].decode("utf-8", "replace")
  html = clean(html[:_MAX_HTML_CHARS]).replace("\0", "")
  if _too_deep(html):
    return _split([html_entities.unescape(re.sub(r"<[^<>]*>", "\n", html))]), []
  tree = LexborHTMLParser(html)
  renderer = _Renderer(base_url)
  title = tree.css_first("title")
  if title is not None:
    renderer.pieces += [title.text().replace("\n", " "), _BREAK]
  renderer.walk(tree.root)
  lines = _split(renderer.pieces)
  if len(lines) > 1 and title is not None and lines[0] == lines[1]:
    del lines[0]  # the heading repeats the title
  return lines, renderer.links


def _too_deep(html: str) -> bool:
  """Whether unclosed elements pile up beyond what a page means (in linear time)."""
  counts: collections.Counter[str] = collections.Counter()
  depth = formats = 0
  for match in _TAG.finditer(html):
    name = match[2].lower()
    if name in _UNNESTED:
      continue
    step = -1 if match[1] else 1
    if step < 0 and counts[name] == 0:
      continue
    counts[name] += step
    depth += step
    formats += step * (name in _FORMATS)
    if depth > _MAX_DEPTH or formats > _MAX_OPEN_FORMATS:
      return True
  return False


def _split(pieces: list[str]) -> list[str]:
  """Text pieces to lines: white space collapsed, empty lines dropped, long ones wrapped."""
  return [line for text in "".join(pieces).split(_BREAK) for line in _wrap(text)]


def _wrap(text: str) -> list[str]:
  """One line, collapsed, in pieces of at most _MAX_LINE_CHARS characters at word boundaries."""
  text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
  lines = []
  while len(text) > _MAX_LINE_CHARS:
    at = text.rfind(" ", 1, _MAX_LINE_CHARS + 1)
    at = at if at > 0 else _MAX_LINE_CHARS
    lines.append(text[:at])
    text = text[at:].lstrip()
  return lines + [text] if text else lines


class _Renderer:
  """Walks the tree with a stack of its own (no recursion) and collects text pieces and breaks."""

  def __init__(self, base_url: str):
    self.pieces: list[str] = []          # where text goes now: the page's, or an open cell's
    self.links: list[str] = []
    self._base_url = base_url
    self._numbers: dict[str, int] = {}
    self._pending: str | None = None      # the target of a link whose text has not begun
    self._outer: list[list[str]] = []     # the pieces around each open cell
    self._rows: list[list[tuple[str, str]]] = []  # open rows: (tag, text) of their cells
    self._pre = 0

  def walk(self, root) -> None:
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
      node, leaving = stack.pop()
      if leaving:
        self._leave(node.tag)
      elif node.is_text_node:
        self._text(node.text_content or "")
      elif node.is_element_node and node.tag not in _DROPPED and "hidden" not in node.attributes:
        self._enter(node)
        stack.append((node, True))
        children = []
        child = node.child
        while child is not None:
          children.append((child, False))
          child = child.next
        stack += reversed(children)

  def _text(self, text: str) -> None:
    if self._pending is not None and text.strip():
      number = self._numbers.setdefault(self._pending, len(self._numbers) + 1)
      if number > len(self.links):
        self.links.append(self._pending)
      self._pending = None
      stripped = text.lstrip()
      text = f"{' ' * (len(stripped) < len(text))}[{number}] {stripped}"
    self.pieces.append(text if self._pre else text.replace("\n", " "))

  def _enter(self, node) -> None:
    tag = node.tag
    if tag in ("td", "th") and self._rows:
      self._outer.append(self.pieces)
      self.pieces = []
    elif tag == "a":
      self._pending = self._target(node.attributes.get("href"))
    elif tag == "pre":
      self._pre += 1
    if tag == "br" or tag in _BLOCKS:
      self.pieces.append(_BREAK)
    if tag == "tr":
      self._rows.append([])

  def _leave(self, tag: str) -> None:
    if tag in ("td", "th") and self._rows and self._outer:
      self._rows[-1].append((tag, " ".join("".join(self.pieces).split())))
      self.pieces = self._outer.pop()
    elif tag == "tr" and self._rows:
      self.pieces.append(_row(self._rows.pop()))
    elif tag == "a":
      self._pending = None
    elif tag == "pre":
      self._pre -= 1
    if tag in _BLOCKS:
      self.pieces.append(_BREAK)

  def _target(self, href: str | None) -> str | None:
    """The absolute URL that a link leads to, or None for what is no page to open."""
    href = (href or "").strip()
    if not href or href.startswith("#"):
      return None
    try:
      url = urllib.parse.urldefrag(urllib.parse.urljoin(self._base_url, href)).url
      return url if urllib.parse.urlsplit(url).scheme in ("http", "https") else None
    except ValueError:  # such as an unclosed IPv6 bracket
      return None


def _row(cells: list[tuple[str, str]]) -> str:
  """A table row as one line: `key: value` for a heading and a cell, else `a | b | c`."""
  if len(cells) == 2 and cells[0][0] == "th" and cells[1][0] == "td":
    return f"{cells[0][1].rstrip(' :')}: {cells[1][1]}"
  return " | ".join(text for _, text in cells) if any(text for _, text in cells) else ""


class Browser:
  """The session's current page, and the two tools that read it: `open` and `find`.

  `open` takes a result id of `search` ("r3"), a link number of the current page, or a URL, and
  shows `lines` lines from `loc` on; `find` lists the current page's lines that contain a pattern.
  """

  def __init__(self, store: PageStore, search: Search | None = None, lines: int = 40,
               max_chars: int = 4000, max_matches: int = 20):
    self._store, self._search = store, search
    self._lines, self._max_chars, self._max_matches = lines, max_chars, max_matches
    self._current: dict[str, str] = {}    # session -> URL
    self._cache: collections.OrderedDict[str, tuple[list[str], list[str]]] = (
        collections.OrderedDict())

  def tools(self) -> list["_PageTool"]:
    """The tools `open` and `find`, which share this browser's sessions."""
    url = {"type": ["string", "integer"], "maxLength": 2000, "minimum": 1}
    opens = ToolSpec(
        "open", "Opens a page: a result id, a link number of the current page, or a URL.",
        {"type": "object", "additionalProperties": False, "required": ["id"],
         "properties": {"id": url, "loc": {"type": "integer", "minimum": 1}}})
    finds = ToolSpec(
        "find", "Lists the lines of the current page that contain the pattern.",
        {"type": "object", "additionalProperties": False, "required": ["pattern"],
         "properties": {"pattern": {"type": "string", "minLength": 1, "maxLength": 200}}})
    return [_PageTool(opens, self._open, self), _PageTool(finds, self._find, self, keeps=False)]

  async def _open(self, session_id: str, arguments: dict[str, Any]) -> ToolResult:
    url, wrong = await self._resolve(session_id, arguments["id"])
    page = await self._page(url) if url is not None else None
    if page is None:
      return ToolResult(wrong or f"no such page: {clip(str(url), 200)}", ok=False)
    self._current[session_id] = url
    loc, total = arguments.get("loc", 1), len(page[0])
    if loc > total and loc > 1:
      return ToolResult(f"no line {clip(str(loc), 20)}: the page has {total} lines", ok=False,
                        meta={"url": url})
    return ToolResult(self._window(page[0], loc), meta={"url": url})

  def _window(self, lines: list[str], loc: int) -> str:
    """Lines from `loc` on: as many as the two bounds allow, and where they are on the page."""
    shown = lines[loc - 1:loc - 1 + self._lines]
    while len(shown) > 1 and sum(len(line) + 1 for line in shown) > self._max_chars - 40:
      shown.pop()
    text = clip("\n".join(shown) or "(empty page)", self._max_chars - 40)
    if len(shown) < len(lines):
      text += f"\n(lines {loc}-{loc + len(shown) - 1} of {len(lines)})"
    return text

  async def _resolve(self, session_id: str, target: str | int) -> tuple[str | None, str]:
    """The URL that `open`'s id means, or None and what exists instead."""
    if isinstance(target, str) and re.fullmatch(r"[0-9]{1,9}", target):
      target = int(target)
    if isinstance(target, int):
      if session_id not in self._current:
        return None, "no page is open: links are numbers of the current page"
      page = await self._page(self._current[session_id])
      links = page[1] if page else []
      if 1 <= target <= len(links):
        return links[target - 1], ""
      have = f"the page has links 1 to {len(links)}" if links else "the page has no links"
      return None, f"no link {clip(str(target), 20)}: {have}"
    if self._search is not None and re.fullmatch(r"r[0-9]+", target):
      url = self._search.resolve(session_id, target)
      count = self._search.count(session_id)
      have = f"the results are r1 to r{count}" if count else "there are no results yet"
      return url, f"no result {clip(target, 20)}: {have}" if url is None else ""
    return urllib.parse.urldefrag(target.strip()).url if "#" in target else target.strip(), ""

  async def _page(self, url: str) -> tuple[list[str], list[str]] | None:
    """(lines, links) of a page, cached, or None when the store has no such page."""
    if url in self._cache:
      self._cache.move_to_end(url)
      return self._cache[url]
    page = await asyncio.to_thread(self._load, url)
    if page is not None:
      self._cache[url] = page
      while len(self._cache) > 256:
        self._cache.popitem(last=False)
    return page

  def _load(self, url: str) -> tuple[list[str], list[str]] | None:
    found = self._store.get(url)
    if found is None:
      return None
    lines, links = render(found[1], url)
    title = _wrap(found[0])
    return (lines if not title or lines[:1] == title[:1] else title + lines), links

  async def _find(self, session_id: str, arguments: dict[str, Any]) -> ToolResult:
    url = self._current.get(session_id)
    page = await self._page(url) if url is not None else None
    if page is None:
      return ToolResult("no page is open", ok=False)
    wanted = clean(arguments["pattern"]).casefold()
    found = [f"{n}: {line}" for n, line in enumerate(page[0], 1) if wanted in line.casefold()]
    more = ""
    if len(found) > self._max_matches:
      more = f"\n({self._max_matches} of {len(found)} matches)"
    text = clip("\n".join(found[:self._max_matches]) or "no match", self._max_chars - len(more))
    return ToolResult(text + more, meta={"matches": len(found)})


class _PageTool:
  """One of a browser's tools; the first of them keeps the session's state for both."""

  def __init__(self, spec: ToolSpec, call, browser: Browser, keeps: bool = True):
    self.spec, self.call = spec, call
    self._browser, self._keeps = browser, keeps

  def snapshot(self, session_id: str) -> dict[str, Any] | None:
    url = self._browser._current.get(session_id)
    return {"url": url} if self._keeps and url is not None else None

  def restore(self, session_id: str, state: dict[str, Any]) -> None:
    self._browser._current[session_id] = state["url"]

  async def close(self, session_id: str) -> None:
    self._browser._current.pop(session_id, None)

  async def aclose(self) -> None:
    self._browser._current.clear()
