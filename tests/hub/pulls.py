"""Pulling a model by the real command, from a stand-in for the hub on loopback."""

import hashlib
import random
import subprocess
from pathlib import Path
from typing import Final

from freight.store.hubcalls import PIECE_BYTES
from tests.harness import Box, Finished, finish, wait_until
from tests.hub.standin import Hub

BIG: Final = random.Random(4).randbytes(3_000_000)
WEIGHTS: Final = "model.safetensors"
NET: Final = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model":{}}',
    "chat_template.jinja": b"{{ messages }}",
    WEIGHTS: BIG,
    "pytorch_model.bin": BIG[::-1],
    "README.md": b"about",
    "onnx/model.onnx": b"x" * 1000,
    "original/model.safetensors": b"y" * 1000,
    "flax_model.msgpack": b"z" * 1000,
    "net-Q4_K_M.gguf": b"g" * 5000,
}
NEEDED: Final = {"config.json", "tokenizer.json", "chat_template.jinja", WEIGHTS}
TOKEN: Final = "hf_averysecretword"


def pull(box: Box, hub: Hub, model: str = "org/net", *options: str, **extra: str) -> Finished:
    return finish(start(box, hub, model, *options, **extra))


def start(box: Box, hub: Hub, model: str = "org/net", *options: str, **extra: str) -> subprocess.Popen[str]:
    own = {"HF_HOME": str(box.folder / "hf"), "HF_TOKEN": "", "HF_HUB_OFFLINE": "", "HF_ENDPOINT": hub.url}
    return box.start("models", "pull", model, *options, **{**own, **extra})


def repo_folder(box: Box) -> Path:
    return box.folder / "data" / "models" / "models--org--net"


def part(folder: Path) -> Path:
    """Return the beginning of the weights that are on their way."""
    return folder / "blobs" / f"{hashlib.sha256(BIG).hexdigest()}.part"


def names(path: str) -> set[str]:
    return {str(file.relative_to(path)) for file in Path(path).rglob("*") if file.is_file()}


def refused(finished: Finished, status: int) -> str:
    """Check that a command failed with an error and a hint, and return both."""
    assert (finished.status, finished.stdout) == (status, ""), finished
    lines = finished.stderr.splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["error", "hint"], finished
    return "\n".join(lines[-2:])


def range_of(hub: Hub, name: str = WEIGHTS) -> str:
    """Return the Range of the last request for a file; "" where there was none."""
    return [seen for seen in hub.requests if seen.path.endswith(name)][-1].headers.get("Range", "")


# What is fetched, and where it is.


def begun(box: Box, hub: Hub, **extra: str) -> subprocess.Popen[str]:
    """Start a pull that stops in the middle of its weights, with all before that on disk."""
    hub.pause_at[WEIGHTS] = 4 * PIECE_BYTES
    child = start(box, hub, **extra)
    folder = repo_folder(box) if "FREIGHT_DATA" not in extra else Path(extra["FREIGHT_DATA"], "models/models--org--net")
    on_its_way = part(folder)
    wait_until(lambda: on_its_way.exists() and on_its_way.stat().st_size > 3 * PIECE_BYTES, "it is half-way")
    return child


def go_on(hub: Hub) -> None:
    hub.pause_at.clear()
    hub.go_on.set()
