"""What this machine has for the program, what it has not, and why.

Invariant: looking never fails. Each probe catches the errors that a missing or broken thing raises
and keeps their words as the reason; a value that could not be read is None, never 0.
The document (`examine`) is plain JSON data; `describe` turns it into lines for people.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import psutil

from edge_runtime import __version__, paths
from edge_runtime.board_checks import findings
from edge_runtime.errors import BitnestError
from edge_runtime.format.manifest import MANIFEST
from edge_runtime.kernels import INSTALL_TORCH
from edge_runtime.machine import read
from edge_runtime.profiles import Board, detect
from edge_runtime.profiles.detect import l4t_release, why_no_jetson

INSTALL_GGUF = "pip install gguf"
INSTALL_TORCH_JETSON = "install NVIDIA's torch for this JetPack first, see jetson/README.md"
JETPACK_OF_L4T = {32: 4, 35: 5, 36: 6, 38: 7, 39: 7}
GIB = 2**30

Section = dict[str, Any]


def examine(root: Path = Path("/")) -> Section:
    """Probe everything; `root` is where /proc, /sys and /etc are looked for."""
    jetson = jetson_board(root)
    board = detect(root)
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": {"system": platform.platform(), "arch": platform.machine()},
        "cpu": cpu(root),
        "memory": memory(),
        "jetson": jetson,
        "torch": torch_install(on_jetson=jetson["board"] is not None),
        "gguf": package("gguf", INSTALL_GGUF),
        "backends": backends(),
        "kernels": cuda_kernels(),
        "cache": cache(),
        "power": power(root),
        "device": _plain(board),
        "findings": [_plain(one) for one in findings(board, root)],
    }


def _plain(value: msgspec.Struct) -> Section:
    """Return a struct as JSON data: lists, no tuples."""
    plain: Section = msgspec.json.decode(msgspec.json.encode(value))
    return plain


def cpu(root: Path = Path("/")) -> Section:
    """Name the CPU, its cores, and those that this process may use."""
    info = read(root / "proc/cpuinfo") or ""
    # x86 gives a name; Arm only gives numbers, and some kernels a "Model" of the whole board
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", info, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(\S+)$", info, re.MULTILINE)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": match.group(1) if match else f"part {part.group(1)}" if part else None,
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable_threads": usable,
    }


def memory() -> Section:
    """Read the machine's memory; `available_bytes` is the kernel's MemAvailable."""
    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "total_bytes": ram.total,
        "available_bytes": ram.available,
        "swap_total_bytes": swap.total,
    }


def jetson_board(root: Path = Path("/")) -> Section:
    """Recognise a Jetson by its device tree and its Linux for Tegra release file."""
    model = read(root / "proc/device-tree/model")
    release = read(root / "etc/nv_tegra_release")
    found: Section = {"board": None, "l4t": None, "jetpack": None, "reason": None}
    if reason := why_no_jetson(root, model, release):
        return found | {"reason": reason}
    found["board"] = model if model is not None else "unknown Jetson"
    found["l4t"] = l4t_release(release)
    if found["l4t"] is None:
        return found | {"reason": "/etc/nv_tegra_release is missing or not understood"}
    major = int(found["l4t"].partition(".")[0])
    found["jetpack"] = JETPACK_OF_L4T.get(major)
    if found["jetpack"] is None:
        found["reason"] = f"L4T R{major} is not one this version knows"
    return found


def package(name: str, install: str) -> Section:
    """Look up an optional package without importing it."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"version": None, "reason": f"not installed: {install}"}
    return {"version": version, "reason": None}


def torch_install(on_jetson: bool) -> Section:
    """Import torch: an install that does not load is reported with the loader's own words."""
    found: Section = {"version": None, "threads": None, "cuda": None, "reason": None}
    try:
        import torch
    except ModuleNotFoundError as error:
        install = INSTALL_TORCH_JETSON if on_jetson else INSTALL_TORCH
        lacks = "not installed" if error.name == "torch" else f"broken ({error})"
        return found | {"reason": f"{lacks}: {install}"}
    except (ImportError, OSError) as error:
        return found | {"reason": f"installed but does not load: {error}"}
    found |= {"version": str(torch.__version__), "threads": torch.get_num_threads()}
    if torch.version.cuda is None:
        return found | {"cuda": {"version": None, "devices": [], "reason": "a build without CUDA"}}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    reason = None if names else "no usable device or driver"
    return found | {"cuda": {"version": torch.version.cuda, "devices": names, "reason": reason}}


def backends() -> list[Section]:
    """Ask the kernels which backends can run here, and why the others cannot."""
    try:
        status = importlib.import_module("edge_runtime.kernels").backend_status()
    except (ImportError, OSError, AttributeError) as error:
        return [{"name": "all", "available": False, "reason": f"kernels do not load: {error}"}]
    return [{"name": n, "available": ok, "reason": why} for n, ok, why in status]


def cuda_kernels() -> Section:
    """Say how the CUDA kernels would be launched: by Triton or from a folder of machine code."""
    from edge_runtime.kernels.cuda import launch

    used, reason = launch.described_way()
    return {"used": used, "reason": reason}


def power(root: Path = Path("/")) -> Section:
    """Look for a source of power readings; under another root than / only files are one."""
    found: Section = {"source": None, "rail": None, "scope": None, "reason": None}
    try:
        from edge_runtime.power import open_meter

        meter = open_meter("auto" if root == Path("/") else "ina3221", root=root)
    except BitnestError as error:
        return found | {"reason": error.message}
    except (ImportError, OSError) as error:
        return found | {"reason": f"power readings do not load: {error}"}
    return found | {"source": meter.source, "rail": meter.rail, "scope": meter.scope}


def cache() -> Section:
    """List the cache folder's models and the free disk under it."""
    folder = paths.cache_dir()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    found = [p for p in sorted(folder.rglob("*")) if not _hidden(p.relative_to(folder))]
    models = [_model(p.parent, "checkpoint") for p in found if p.name == MANIFEST]
    models += [_model(p, "gguf") for p in found if p.suffix == ".gguf"]
    return {
        "folder": str(folder),
        "exists": existing == folder,
        "writable": os.access(existing, os.W_OK),
        "free_bytes": shutil.disk_usage(existing).free,
        "models": models,
    }


def _hidden(path: Path) -> bool:
    """Say whether a path lies in a download or conversion that is not finished."""
    return any(part.startswith(".") for part in path.parts)


def _model(path: Path, kind: str) -> Section:
    try:
        files = [path] if path.is_file() else [p for p in path.iterdir() if p.is_file()]
        size = sum(p.stat().st_size for p in files)
    except OSError as error:
        return {"path": str(path), "kind": kind, "bytes": None, "reason": str(error)}
    return {"path": str(path), "kind": kind, "bytes": size, "reason": None}


def describe(document: Section) -> list[str]:
    """Return the document as lines for people; `-` marks what is missing, with the reason."""
    host, cores, ram = document["platform"], document["cpu"], document["memory"]
    lines = [
        f"+ bitnest-edge  {document['version']}, Python {document['python']}, {host['system']}",
        f"+ cpu           {cores['model'] or 'unknown model'} ({host['arch']}), "
        f"{cores['cores'] or '?'} cores, {cores['usable_threads']} of {cores['threads']} threads "
        "usable",
        f"+ memory        {ram['available_bytes'] / GIB:.1f} GiB available of "
        f"{ram['total_bytes'] / GIB:.1f}, swap {ram['swap_total_bytes'] / GIB:.1f}",
        _jetson_line(document["jetson"]),
        *_board_lines(msgspec.convert(document["device"], Board)),
        _power_line(document["power"]),
        *_torch_lines(document["torch"]),
        _line("gguf", document["gguf"]["version"], document["gguf"]["reason"]),
    ]
    for backend in document["backends"]:
        mark = "+" if backend["available"] else "-"
        lines.append(f"{mark} backend {backend['name']:<10} {backend['reason']}")
    lines.append(_kernels_line(document["kernels"]))
    return lines + _cache_lines(document["cache"]) + _finding_lines(document["findings"])


def _line(name: str, value: str | None, reason: str | None) -> str:
    return f"+ {name:<13} {value}" if value is not None else f"- {name:<13} {reason}"


def _kernels_line(found: Section) -> str:
    used = None if found["used"] is None else f"{found['used']} ({found['reason']})"
    return _line("cuda kernels", used, found["reason"])


def _jetson_line(found: Section) -> str:
    if found["board"] is None:
        return _line("jetson", None, f"not a Jetson: {found['reason']}")
    release = f"L4T {found['l4t'] or 'unknown'}, JetPack {found['jetpack'] or 'unknown'}"
    note = f" ({found['reason']})" if found["reason"] else ""
    return _line("jetson", f"{found['board']}, {release}{note}", None)


def _board_lines(board: Board) -> list[str]:
    if not board.is_jetson:
        return []
    now, most = board.gpu.now_mhz, board.gpu.max_mhz
    hottest = max((board.temperatures_c or {}).items(), key=lambda one: one[1], default=None)
    state = [
        f"power mode {board.mode}" if board.mode else "power mode unknown",
        f"GPU {now:.0f} of {most:.0f} MHz" if now and most else "GPU clock unknown",
        f"memory cap {board.emc.max_mhz:.0f} MHz" if board.emc.max_mhz else "",
        f"{board.cpu_cores} CPU cores on" if board.cpu_cores else "",
        f"{hottest[0]} {hottest[1]:.0f} C" if hottest else "",
    ]
    known = f"{board.profile} ({board.reason})" if board.profile else None
    return [
        _line("profile", known, board.reason),
        _line("state", ", ".join(part for part in state if part), None),
    ]


def _power_line(found: Section) -> str:
    named = f"{found['source']}, {found['rail']} ({found['scope']})" if found["source"] else None
    return _line("power", named, found["reason"])


def _finding_lines(found: list[Section]) -> list[str]:
    lines = ["", "to fix, first things first:"] if found else []
    for number, one in enumerate(found, start=1):
        lines.append(f"{number:2}. {one['what']}")
        lines.append(f"    why  {one['why']}")
        lines.append(f"    do   {one['fix']}")
    return lines


def _torch_lines(found: Section) -> list[str]:
    if found["version"] is None:
        return [_line("torch", None, found["reason"])]
    cuda = found["cuda"]
    devices = ", ".join(cuda["devices"])
    named = f"{cuda['version']}: {devices}" if devices else None
    return [
        _line("torch", f"{found['version']}, {found['threads']} threads", None),
        _line("torch cuda", named, cuda["reason"]),
    ]


def _cache_lines(found: Section) -> list[str]:
    state = "" if found["exists"] else ", not made yet"
    if not found["writable"]:
        state += ", NOT writable"
    lines = [
        f"{'+' if found['writable'] else '-'} cache         {found['folder']}{state}, "
        f"{found['free_bytes'] / GIB:.1f} GiB free"
    ]
    for model in found["models"]:
        size = f"{model['bytes'] / 2**20:.0f} MiB" if model["reason"] is None else model["reason"]
        lines.append(f"+ model         {model['path']} ({model['kind']}, {size})")
    if not found["models"]:
        lines.append("- model         none fetched yet: bitnest-edge pull default")
    return lines
