"""What README.md and docs/ say is so: their Python runs, their commands exist, their links lead somewhere.

The Python blocks of a page, top to bottom, are one program, run on two CPU ranks. In docs/errors.md a block that a text
block follows has to raise exactly that text; a line of it that ends in … may go on as it likes.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from colonnade.cli import main as cli
from colonnade.errors import ColonnadeError
from colonnade.testing.ranks import run_on_ranks

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
ERRORS = ROOT / "docs" / "errors.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = ROOT / "examples" / "train_20_lines.py"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def run_program(code: str, name: str, folder: str) -> None:
    """Run a page's program in a folder of its own; on a rank."""
    with contextlib.chdir(folder):
        exec(compile(code, name, "exec"), {"__name__": "__main__", "__file__": str(EXAMPLE)})


def test_the_script_in_the_readme_is_the_example():
    [shown] = blocks(README, "python")
    assert shown == EXAMPLE.read_text(encoding="utf-8")


def test_the_script_in_the_readme_runs_by_the_command_beside_it(tmp_path):
    command = next(c for c in commands(README) if c[:2] == ["colonnade", "run"] and c[-1].endswith(EXAMPLE.name))
    arguments = [*command[1:-1], str(ROOT / command[-1])]
    run = [sys.executable, "-m", "colonnade.cli.main", *arguments]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss" in done.stdout
    assert list((tmp_path / "trained").glob("model*.safetensors"))


PROGRAMS = [page for page in PAGES if page not in (README, ERRORS) and blocks(page, "python")]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_on_two_ranks(page, tmp_path):
    code = "\n".join(blocks(page, "python"))
    run_on_ranks(2, run_program, code, page.name, str(tmp_path), timeout_s=110)


def test_errors_are_worded_as_their_page_says(tmp_path):
    steps = error_steps()
    assert len([1 for _, text in steps if text]) >= 10
    wrong = run_on_ranks(2, raise_errors, steps, str(tmp_path), timeout_s=110)
    assert wrong == [[], []]


def error_steps() -> list[tuple[str, str]]:
    """(code, text it has to raise or "") of each Python block of docs/errors.md, in order."""
    found = FENCE.findall(ERRORS.read_text(encoding="utf-8"))
    following = [*found[1:], ("", "")]
    return [
        (code, after if kind == "text" else "")
        for (lang, code), (kind, after) in zip(found, following)
        if lang == "python"
    ]


def raise_errors(steps: list[tuple[str, str]], folder: str) -> list[str]:
    """What the blocks raise and should not, on a rank."""
    space: dict = {"__name__": "__main__"}
    wrong = []
    with contextlib.chdir(folder):
        for code, text in steps:
            try:
                exec(compile(code, "docs/errors.md", "exec"), space)
                said = ""
            except ColonnadeError as error:
                said = f"{type(error).__name__}: {error}\n"
            if not as_worded(said, text):
                wrong.append(f"rank {dist.get_rank()} says\n{said}where the page has\n{text}")
    return wrong


def as_worded(said: str, text: str) -> bool:
    said_lines, lines = said.splitlines(), text.splitlines()
    return len(said_lines) == len(lines) and all(
        a.startswith(b.removesuffix("…")) if b.endswith("…") else a == b for a, b in zip(said_lines, lines)
    )


def commands(page: Path) -> list[list[str]]:
    """The lines of a page's shell blocks, as words, without comments."""
    lines = "\n".join(blocks(page, "sh")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist_and_take_the_arguments_shown(page):
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    shown = {words[1] for words in commands(page) if words[0] == "make"} | set(re.findall(r"`make ([a-z-]+)", text))
    assert shown <= targets
    for words in commands(page):
        assert words[0] in ("make", "colonnade", "pip"), words
        if words[0] == "colonnade":
            cli._parser(words[1]).parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_that_exist(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not link.startswith("http")]
    files = [page.parent / link for link in links]
    files += [ROOT / name for name in re.findall(r"`((?:colonnade|tests|scripts|docs|examples)/[\w/.]+\.\w+)`", text)]
    missing = [str(file) for file in files if not file.resolve().exists()]
    assert not missing


def test_the_tables_of_proved_models_list_every_family(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import proved_models

    assert proved_models.check() == []
