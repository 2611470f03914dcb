"""What the pages say of each other and of the options."""

from __future__ import annotations

import re
from pathlib import Path

from kempner.config.option import whole_schema
from kempner.run import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = whole_schema(RunConfig)
OPTION = r"^(?:--)?([a-z_.]+)\.([a-z_-]+)\b(?!/)"
TITLES = {page.read_text().splitlines()[0].lstrip("# ").lower() for page in PAGES[1:]}


def rows(page: str) -> list[list[str]]:
    """The cells of all its tables."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if len(row) == 3 and row[0] not in ("There", "---")]


def test_the_options_of_the_other_kits_become_options_that_exist() -> None:
    words = [word for row in rows("coming-from.md") for word in re.findall(r"`([^`]+)`", row[1])]
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
