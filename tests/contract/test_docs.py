"""The documents say what the program does."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from freight.cli.main import COMMANDS
from freight.config import SETTINGS, PathGrant, Pool
from freight.control.embedded import DEDUPE_KEY, IGNORE_KEY
from freight.core.model import ModelEntry
from freight.core.window import OPAQUE_MOST, OPAQUE_START
from tests.harness import ROOT, Box

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_reference_is_what_the_code_says() -> None:
    checked = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    assert checked.returncode == 0, "run: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / target).exists(), target


# The page of benchmarks names options of the benchmarks, and of other programs.
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "benchmarks"], ids=lambda page: page.name)
def test_options_that_pages_name_exist(page: Path) -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    known = set(re.findall(r"--[a-z][a-z-]+", reference))
    # These are of other programs, or of the user's own server.
    others = {"--time", "--requeue", "--port", "--unix-socket", "--max-num-seqs", "--cacert"}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known | others


def test_every_key_of_every_table_is_in_the_reference_with_a_line_of_its_own() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    keys = {f"models.NAME.{key}" for key in ModelEntry.__struct_fields__}
    keys |= {f"pools.NAME.{key}" for key in Pool().written()}
    keys |= {f"paths.USER.{field.name}" for field in fields(PathGrant)}
    keys |= {setting.key for setting in SETTINGS}
    told = dict(re.findall(r"^\| `([a-zA-Z_.]+)` \|.*\| (\S[^|]*) \|$", reference, re.MULTILINE))
    assert keys <= told.keys(), keys - told.keys()


def test_every_command_of_the_table_has_help(box: Box) -> None:
    for command in COMMANDS:
        assert box.freight(command, "--help").status == 0


@pytest.mark.parametrize("page", ["run.md", "decisions/0003-embedded-state.md"])
def test_pages_name_every_option_and_setting_that_a_run_goes_on_with_only_if_it_is_the_same(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for key in (IGNORE_KEY, DEDUPE_KEY, "media.hosts", "limits.record_bytes"):
        assert f"`{key}`" in text


def test_the_page_on_runs_says_what_automatic_concurrency_is() -> None:
    text = " ".join((ROOT / "docs" / "run.md").read_text(encoding="utf-8").split())
    assert f"from {OPAQUE_START} in flight" in text
    assert f"to {OPAQUE_MOST} at most" in text


def test_the_decisions_name_the_pinned_releases() -> None:
    decision = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([A-Za-z0-9_-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name in ("click", "rich", "aiohttp", "uvicorn", "uvloop", "msgspec", "apsw", "numpy", "psutil", "xllamacpp"):
        assert pinned[name] in decision, f"{name} is pinned at {pinned[name]}"
