"""What the pages say of each other and of the options."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from kempner.config.option import schema
from kempner.run import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = schema(RunConfig)
OPTION = r"^(?:--)?([a-z_.]+)\.([a-z_-]+)\b(?!/)"
TITLES = {page.read_text().splitlines()[0].lstrip("# ").lower() for page in PAGES[1:]}


def rows(page: str) -> list[list[str]]:
    """The cells of all its tables."""
    lines = (ROOT / page).read_text().splitlines()
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if len(row) == 3 and row[0] not in ("There", "---")]


def test_the_options_of_the_other_kits_become_options_that_exist() -> None:
    cells = [row[1] for row in rows("docs/start/coming-from.md")]
    words = [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]
    named = [m for word in words for m in re.findall(OPTION, word)]
    known = {
        (section, key.replace("-", "_"))
        for section, key in named
        if section in SECTIONS and key != "sh"
    }
    assert len(known) > 30
    assert [x for x in known if x[1] not in SECTIONS[x[0]]] == []
    lists = {"rl.env", "freeze.stages"}
    tables = {table for word in words for table in re.findall(r"^\[+([a-z_.]+)\]+$", word)}
    assert {"rl.deployment", "rl.loss", "rl.sampling", "rl.env"} <= tables
    assert tables <= {*SECTIONS, *lists}


def test_no_page_denies_what_another_describes() -> None:
    """The page for users of other kits told those of RL to stay with theirs."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            denies = re.search(r"not built(?! for)|no counterpart here|stay with", line, re.I)
            said = line.lower() if denies else ""
            assert not [title for title in TITLES if title in said], (page.name, line)
            named = re.findall(r"`\[+([a-z_.]+)\]+`", said)
            assert not {*named} & {*SECTIONS}, (page.name, line)


def anchors(page: Path) -> set[str]:
    """The headings as GitHub names them, and the anchors that the page sets itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return {*slugs, *re.findall(r'<a id="([^"]+)">', text)}


def test_each_link_leads_somewhere() -> None:
    assert len(PAGES) >= 40
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]:
        for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", page.read_text()):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page.name, link)
            assert not anchor or anchor in anchors(target), (page.name, link)


def test_each_page_that_a_program_names_exists() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    named = 0
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        path = ROOT / name
        if path.suffix in (".png", ".json") or not path.is_file():
            continue
        for page in re.findall(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|png|json)\b", path.read_text()):
            assert (ROOT / page).exists(), (name, page)
            named += 1
    assert named > 100
