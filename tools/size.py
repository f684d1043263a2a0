"""Lines per folder and the biggest functions; fails over the caps.

A file has at most 400 lines; a function at most 60, or 120 under `kernels/cuda`. Test files are
held to the first cap only. `edge_runtime/{kernels,power,profiles}` are symlinks: a file counts
once, under its real path.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("edge_runtime", "kernels", "power", "profiles", "tests", "tools")
SUFFIXES = {".py", ".c", ".cpp", ".cu", ".h"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
SHOWN = 8


def source_files() -> list[Path]:
    """Return every source file once, relative to the repository root; no symlink is followed."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            linked = any(p.is_symlink() for p in (path, *path.parents) if ROOT in p.parents)
            if path.suffix in SUFFIXES and path.is_file() and not linked:
                found.append(path.relative_to(ROOT))
    return found


def functions(path: Path, text: str) -> list[tuple[int, str]]:
    """Return (lines, "file:line name") of every function of a Python file, decorators excluded."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (n for n in ast.walk(ast.parse(text, str(path))) if isinstance(n, kinds))
    return [
        ((n.end_lineno or n.lineno) - n.lineno + 1, f"{path}:{n.lineno} {n.name}") for n in nodes
    ]


def function_cap(path: Path) -> int | None:
    """Return the longest allowed function in `path`, or None where there is no cap."""
    if path.parts[0] == "tests":
        return None
    return MAX_KERNEL_LINES if path.parts[:2] == ("kernels", "cuda") else MAX_FUNCTION_LINES


def main() -> int:
    """Print the tables and return the exit code."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    sizes: list[tuple[int, str]] = []
    biggest: list[tuple[int, str]] = []
    faults: list[str] = []
    for path in source_files():
        text = (ROOT / path).read_text(encoding="utf-8")
        count = len(text.splitlines())
        folder = "/".join(path.parts[:-1][:2])
        lines[folder] += count
        files[folder] += 1
        sizes.append((count, str(path)))
        if count > MAX_FILE_LINES:
            faults.append(f"{path}: {count} lines, at most {MAX_FILE_LINES}")
        cap = function_cap(path)
        if path.suffix == ".py" and cap is not None:
            found = functions(path, text)
            biggest += found
            faults += [f"{where}: {n} lines, at most {cap}" for n, where in found if n > cap]
    for folder in sorted(lines):
        print(f"{lines[folder]:7d} lines {files[folder]:4d} files  {folder}")
    print(f"{sum(lines.values()):7d} lines {sum(files.values()):4d} files  in all")
    for title, rows in (("biggest files", sizes), ("biggest functions", biggest)):
        print(f"{title}:")
        for count, where in sorted(rows, reverse=True)[:SHOWN]:
            print(f"{count:7d}  {where}")
    for fault in faults:
        print(f"too big: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
