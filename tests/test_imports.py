"""The rules of the house: who may import whom. Reads syntax trees; nothing is imported here but by the last test."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401  # its module objects tell which of its private names are modules

PACKAGE = Path(__file__).parent.parent / "colonnade"

# Room: floor. A module belongs to the longest room that its name begins with. Imports go down only, and two rooms on one
# floor do not import one another.
FLOORS = {
    "errors": 0,
    "cluster": 0,
    "comm": 1,
    "model": 1,
    "shardformer.layer": 2,
    "precision": 2,
    "optim": 2,
    "shardformer": 3,
    "pipeline": 3,
    "fsdp": 3,
    "zero": 3,
    "gemini": 3,
    "checkpoint": 4,
    "booster": 5,
    "tools": 6,
    "cli": 7,
}
BESIDE = "testing"  # may import every room; only these import it:
USERS_OF_BESIDE = {"tools", "cli", "testing"}
TOP = ""  # colonnade/__init__.py itself: gathers the public names; a room below the tools never imports from it

IN_FUNCTIONS = {"transformers", "peft", "matplotlib", "numpy", "rich", "tokenizers", "fsspec"}
POLICY_WORDS = {"colonnade.shardformer.words", "colonnade.shardformer.policy", "colonnade.shardformer.description"}


class Import(NamedTuple):
    """One imported module: by whom (module name), what (module name), and the line."""

    importer: str
    target: str
    line: int
    in_function: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


@cache
def sources() -> dict[str, Path]:
    """Module name → file, of the whole package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["colonnade", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


@cache
def imports() -> list[Import]:
    """All imports of the package, those for type checking only included."""
    return [found for module in sources() for found in _imports_below(tree(module), module, False)]


def _imports_below(node: ast.AST, module: str, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(module, alias.name, child.lineno, in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module)
            for alias in child.names:
                name = f"{base}.{alias.name}"
                target = name if name in sources() or _is_private_torch_module(name) else base
                yield Import(module, target, child.lineno, in_function)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports_below(child, module, in_function or inside)


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    is_package = sources()[module].name == "__init__.py"
    base = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def room(module: str) -> str:
    """The room of a module of this package."""
    inner = module.removeprefix("colonnade").removeprefix(".")
    rooms = [name for name in [*FLOORS, BESIDE] if inner == name or inner.startswith(name + ".")]
    return max(rooms, key=len, default=TOP if not inner else "unknown: " + inner)


def within_the_house() -> list[Import]:
    return [i for i in imports() if i.target.split(".")[0] == "colonnade" and room(i.importer) != TOP]


def _look_up(parts: list[str]) -> object:
    found: object = importlib.import_module(parts[0])
    for part in parts[1:]:
        found = getattr(found, part, None)
    return found


def _is_private_torch_module(name: str) -> bool:
    """Whether a dotted name lies in a private module of torch; a private function such as torch._foreach_mul_ does not."""
    parts = name.split(".")
    if parts[0] != "torch" or not any(_is_private(part) for part in parts):
        return False
    for i, part in enumerate(parts):
        if _is_private(part):
            prefix = ".".join(parts[: i + 1])
            try:
                importlib.import_module(prefix)
            except ImportError:
                return isinstance(_look_up(parts[: i + 1]), types.ModuleType)
            return True
    return False


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def test_every_module_belongs_to_a_room():
    wrong = [module for module in sources() if room(module).startswith("unknown")]
    assert not wrong, "\n".join(wrong)


def test_imports_go_down_only():
    wrong = [
        str(i)
        for i in within_the_house()
        if room(i.importer) in FLOORS and room(i.target) in FLOORS and FLOORS[room(i.importer)] < FLOORS[room(i.target)]
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_on_one_floor_do_not_import_one_another():
    wrong = [
        str(i)
        for i in within_the_house()
        if room(i.importer) in FLOORS
        and room(i.target) in FLOORS
        and room(i.importer) != room(i.target)
        and FLOORS[room(i.importer)] == FLOORS[room(i.target)]
        and room(i.target) != "errors"  # on the ground floor, everyone raises errors
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_tools_import_the_testing_room():
    wrong = [str(i) for i in within_the_house() if room(i.target) == BESIDE and room(i.importer) not in USERS_OF_BESIDE]
    assert not wrong, "\n".join(wrong)


def test_no_room_imports_from_the_package_root():
    """The root gathers public names from the rooms; a room that imported it back would close a circle."""
    wrong = [str(i) for i in within_the_house() if room(i.target) == TOP and FLOORS.get(room(i.importer), 9) < 6]
    assert not wrong, "\n".join(wrong)


def test_only_optional_packages_are_imported_inside_functions():
    wrong = [str(i) for i in imports() if i.in_function and i.target.split(".")[0] not in IN_FUNCTIONS]
    assert not wrong, "\n".join(wrong)


def test_policies_import_only_the_words():
    """A policy file is data: it says what a model family looks like, and knows nothing of how that is done."""
    wrong = [
        str(i)
        for i in imports()
        if i.importer.startswith("colonnade.shardformer.policies.")
        and i.target not in POLICY_WORDS
        and not i.target.startswith("colonnade.shardformer.policies.")
        and i.target != "__future__"
    ]
    assert not wrong, "\n".join(wrong)


def test_private_modules_of_torch_are_used_in_one_file_only():
    files: dict[str, list[str]] = {}
    for module in sources():
        for line, name in _names_used(module):
            if _is_private_torch_module(name):
                files.setdefault(module, []).append(f"line {line}: {name}")
    assert len(files) <= 1, files


def _names_used(module: str) -> Iterator[tuple[int, str]]:
    """Every imported module and every dotted name that begins with an imported one, aliases resolved."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                if alias.asname:
                    aliases[alias.asname] = alias.name
                else:
                    aliases[alias.name.split(".")[0]] = alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and (name := _dotted(node)):
            first, _, rest = name.partition(".")
            if first in aliases:
                yield node.lineno, f"{aliases[first]}.{rest}"


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


@pytest.mark.parametrize(
    "name, private",
    [
        ("torch._C", True),
        ("torch.distributed._functional_collectives.all_reduce", True),
        ("torch.distributed.tensor._dtensor_spec", True),
        ("torch._foreach_mul_", False),
        ("torch.distributed.tensor", False),
        ("torch.__version__", False),
    ],
)
def test_the_check_tells_private_modules_from_private_functions(name, private):
    assert _is_private_torch_module(name) is private


def test_the_check_reads_relative_and_nested_imports():
    code = ast.parse("from .. import comm\nfrom .words import col\ndef f():\n    import colonnade.zero.bucket\n")
    found = list(_imports_below(code, "colonnade.shardformer.policy", False))
    assert [(i.target, i.in_function) for i in found] == [
        ("colonnade.comm", False),
        ("colonnade.shardformer.words", False),
        ("colonnade.zero.bucket", True),
    ]


def test_importing_the_package_imports_torch_but_not_transformers():
    code = "import sys, colonnade; print('torch' in sys.modules, [m for m in sys.modules if m.split('.')[0] == 'transformers'])"
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True []", done.stderr
