"""Saved machine code runs in a process that has neither torch nor Triton, as on a board.

The process prepares nothing itself: planes, activations and the answer come in a file. Without a
GPU the driver is a fake one, which keeps what it is called with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from random_weights import random_linear
from triton_devices import device_of

from edge_runtime.kernels.cuda import driver, linear
from edge_runtime.kernels.cuda.tiles import ROW_TILES
from edge_runtime.kernels.reference.linear import ExactLinear

pytest.importorskip("triton")
N, K, G, M = 192, 256, 64, 5
SAVE = """
import sys
from pathlib import Path
from edge_runtime.kernels.cuda.timing.binaries import save
from edge_runtime.kernels.cuda.timing.entry import Sizes

sizes = Sizes(
    linears={"gate_up": (192, 256)}, hidden=256, inner=96, vocabulary=80, heads=4, kv_heads=2,
    head_dim=64, group_size=64,
)
save(sizes, Path(sys.argv[1]))
"""
RUN = """
import ctypes, json, sys
from pathlib import Path

sys.modules["torch"] = sys.modules["triton"] = None
import numpy as np
from edge_runtime.kernels.cuda import driver
from edge_runtime.kernels.cuda.compile import Compiled

folder, kind = Path(sys.argv[1]), sys.argv[2]
index = json.loads((folder / "index.json").read_text())
facts = next(f for f in index if f["op"] == "linear" and f["view"] == "w8" and f["max_rows"] == 8)
compiled = Compiled.read(folder, facts["file"])
arrays = dict(np.load(folder / "inputs.npz"))
calls, values = [], []

class Fake:
    def __getattr__(self, name):
        def call(*args):
            calls.append((name, args))
            if name == "cuLaunchKernel":  # arguments are gone when it returns
                read = lambda p, kind: ctypes.cast(p, ctypes.POINTER(kind))[0]
                values.extend(read(p, ctypes.c_uint64) for p in args[9][:10])
                values.extend(read(p, ctypes.c_uint32) for p in args[9][10:16])
            return 0
        return call

def allocate(array):
    if kind == "fake":
        return array.ctypes.data
    address = ctypes.c_uint64()
    driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(array.nbytes))
    data = ctypes.c_void_p(array.ctypes.data)
    driver.call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(array.nbytes))
    return address.value

if kind == "fake":
    ctypes.CDLL = lambda name: Fake()
device, context = ctypes.c_int(), ctypes.c_void_p()
driver.call("cuInit", 0)
driver.call("cuDeviceGet", ctypes.byref(device), 0)
driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
driver.call("cuCtxSetCurrent", context)
function = driver.load(compiled, ptx=kind == "ptx")
M, N = arrays["want"].shape
out = np.full((M, N), np.nan, np.float32)
names = ("codes", "sums", "x_scale", "base", "refine", "mult", "scale", "scale", "scale")
pointers = [allocate(arrays[name]) for name in names] + [allocate(out)]
groups = arrays["sums"].shape[1]
numbers = [M, N, groups, 1, arrays["mult"].shape[1], arrays["codes"].shape[1] // 2]
grid = (-(-N // facts["tile_rows"]) * -(-M // facts["tile_columns"]),)
function.launch(grid, [*pointers, *numbers])
if kind == "fake":
    name, args = calls[-1]
    assert name == "cuLaunchKernel", name
    assert args[1:8] == (*grid, 1, 1, 32 * compiled.num_warps, 1, 1, compiled.shared_bytes), args
    assert values == [*pointers, *numbers], values
    loaded = [args for name, args in calls if name == "cuModuleLoadData"]
    assert loaded[0][1].value.startswith(b"\\x7fELF")
else:
    driver.call("cuCtxSynchronize")
    data, size = ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(out.nbytes)
    driver.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(pointers[-1]), size)
    assert np.array_equal(out, arrays["want"])
print(json.dumps(sorted(n for n in sys.modules if n.split(".")[0] in ("torch", "triton"))))
"""


def python(code: str, *args: object) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(driver.__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, root])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], env=environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Machine code, inputs and the reference's answer."""
    folder = tmp_path_factory.mktemp("orin")
    python(SAVE, folder)
    rng = np.random.default_rng(0)
    w = random_linear(rng, N, K, G, bias=False)
    codes = torch.from_numpy(rng.integers(-127, 128, (M, K), dtype=np.int8))
    x_scale = torch.from_numpy(rng.uniform(0.01, 2, M).astype(np.float32))
    tiled = linear.DeviceLinear.from_weights(w, "cpu", row_tile=ROW_TILES[87])
    arrays = {
        "codes": codes, "x_scale": x_scale, "sums": linear.group_sums(codes, G),
        "base": tiled.base, "refine": tiled.refine, "mult": tiled.mult, "scale": tiled.scale,
        "want": ExactLinear.from_weights(w, "w8")(codes.float(), x_scale),
    }  # fmt: skip
    np.savez(folder / "inputs.npz", **{name: array.numpy() for name, array in arrays.items()})
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_folder_of_machine_code(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    assert {(f["op"], f.get("view", f.get("part")), f.get("max_rows")) for f in index} == {
        *(("linear", view, rows) for view in ("w4", "w8") for rows in (8, 16, 256)),
        *(("attention", "weigh", rows) for rows in (1, 8, 16, 256)),
        *(("attention", "add", rows) for rows in (1, 8, 16)),
        ("rope_kv", None, None),
    }
    for facts in index:
        assert (folder / f"{facts['file']}.cubin").read_bytes()[:4] == b"\x7fELF"
        assert ".target sm_87" in (folder / f"{facts['file']}.ptx").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_loaded_and_launched_without_torch_and_triton(folder: Path) -> None:
    assert json.loads(python(RUN, folder, "fake")) == ["torch", "triton"]  # both are None there


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_on_a_gpu_without_torch_and_triton(folder: Path) -> None:
    device_of("cuda")
    capability = torch.cuda.get_device_capability()
    if capability < (8, 7):
        pytest.skip("code for sm_87 needs a GPU of compute capability 8.7 or more")
    kind = "cubin" if capability == (8, 7) else "ptx"
    assert json.loads(python(RUN, folder, kind)) == ["torch", "triton"]
