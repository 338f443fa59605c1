"""Installations of model servers that only look like it: enough to find them, and to see what they can do."""

from pathlib import Path
from typing import Final

# As the sources of versions that have everything say it.
VLLM_NOW: Final = {
    "engine/arg_utils.py": 'allowed_media_domains: list[str]\n"--enable-log-requests",\n',
    "entrypoints/launchers/cli_args.py": "class A:\n    uds: str | None = None\n",
}
# As those of a version said it that was the last without a Unix socket.
VLLM_OLD: Final = {
    "engine/arg_utils.py": "'--disable-log-requests',\n",
    "entrypoints/openai/cli_args.py": "# clouds: \n",
}
SGLANG_NOW: Final = {"srt/server_args.py": "allowed_media_domains: List[str]\n"}


def environment(folder: Path, package: str, sources: dict[str, str], *scripts: str) -> Path:
    """Make the folder of a virtual environment that has a package, and executables beside its python."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("")
    for name in ("python", *scripts):
        executable(folder / "bin" / name)
    for name, text in sources.items():
        path = folder / "lib" / "python3.11" / "site-packages" / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    """Make a file that may be executed."""
    path.write_text(text)
    path.chmod(0o755)
    return path
