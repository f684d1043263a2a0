"""The path guard, and fixtures that several test folders use.

BITNEST_REQUIRE turns a skip into a failure: `model` where the model cannot be fetched, `native`
where the native kernels cannot be built or loaded, `aarch64` where they cannot be built and run for
Arm, `shellcheck` where scripts cannot be linted, `chromium` where there is no
browser.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# With the repository root on sys.path `import kernels` would find our folder in place of the
# package of that name that transformers looks for. `python -m pytest` and an editable install
# both put it there; edge_runtime itself is found without it.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != REPOSITORY]

# A shell without job control starts background jobs with Ctrl-C ignored, and children inherit that:
# tests that interrupt a process would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU the CUDA kernels run in Triton's interpreter, which is chosen when Triton is
# imported, by whatever test comes first.
if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("bitnest", deadline=None, derandomize=True)
hypothesis.settings.load_profile("bitnest")


def _required(what: str) -> bool:
    return what in os.environ.get("BITNEST_REQUIRE", "").split(",")


def _give_up(what: str, reason: str) -> None:
    """Skip with the reason, or fail where BITNEST_REQUIRE says that it must be there."""
    if _required(what):
        pytest.fail(f"BITNEST_REQUIRE={what}, but {reason}")
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a developer's own settings out of the tests; the cache folder stays the user's."""
    for name in ("BITNEST_DEBUG", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def give_up() -> Callable[[str, str], None]:
    """`_give_up`, for tests that need tools or a library."""
    return _give_up


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's source file, from the user's cache or fetched into it."""
    from edge_runtime.convert.pull import pull
    from edge_runtime.errors import DownloadError

    try:
        return pull("default")
    except DownloadError as error:
        _give_up("model", f"the default model cannot be fetched: {error}")
        raise


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Texts and recordings that lie beside a checkout, where there are any."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared/data folder beside this checkout")
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model, converted; its source lies beside it. Do not change either."""
    from tiny_checkpoints import convert_tiny

    return convert_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="session")
def tiny_source(tiny_checkpoint: Path) -> Path:
    """The Hugging Face folder that `tiny_checkpoint` was converted from."""
    return tiny_checkpoint.parent / "source"
