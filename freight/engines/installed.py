"""Model servers that the user installed: where they are, how they are started, and what they can do.

Nothing of theirs is imported or run here: what an installed version can do is read from its own source text.
"""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from freight.core.model import ModelEntry
from freight.errors import UserError

_PYTHON: Final = re.compile(r"python[\d.]*")


@dataclass(frozen=True, slots=True)
class Program:
    """A Python server as its project publishes it.

    `package` is what it is called on the index and imported as, `module` what `python -m` runs, `script` the command
    that an installation brings ("" for none), and `options` the files of its package that declare its options.
    """

    label: str
    package: str
    module: str
    script: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Installed:
    """One installation: the words that start it, its package's folder (None: not found) and its virtual environment's
    folder of executables (None: it is in none).
    """

    argv: tuple[str, ...]
    package: Path | None
    environment: Path | None
    program: Program

    def offers(self, option: str, unknown: bool) -> bool:
        """Return whether this version has `option` (as its source has it); `unknown` when no source is found."""
        if self.package is None:
            return unknown
        return option in _source(self.package, self.program.options)

    def variables(self) -> dict[str, str]:
        """Return what must be set for it to find its own tools: compilers that it calls lie beside it."""
        if self.environment is None:
            return {}
        return {"PATH": os.pathsep.join([str(self.environment), os.environ.get("PATH", os.defpath)])}


def find_program(program: Program, name: str, entry: ModelEntry) -> Installed:
    """Return the installation that model `name` runs: the entry's executable, else that on PATH, else this Python's.

    Raises UserError when there is none.
    """
    if entry.executable:
        return _named(program, name, entry.executable)
    found = shutil.which(program.script) if program.script else None
    if found:
        return _by_file(program, Path(found))
    spec = find_spec(program.package)
    if spec is not None and spec.submodule_search_locations:
        argv = (sys.executable, "-m", program.module)
        return Installed(argv, Path(spec.submodule_search_locations[0]), None, program)
    where = f"no {program.script} on PATH, and " if program.script else ""
    raise UserError(
        f"model {name} needs {program.label}, which is not there: {where}no {program.package} in {sys.executable}",
        'install it in a virtual environment and name that folder: executable = "/path/to/venv" (--executable)',
    )


def _named(program: Program, name: str, executable: str) -> Installed:
    path = Path(executable).expanduser()
    if path.is_dir():
        for file in (path / "bin" / program.script, path / "bin" / "python", path / "bin" / "python3"):
            if file.is_file():
                return _by_file(program, file)
        raise UserError(
            f"the executable of model {name}, {path}, is a folder without bin/python",
            f"name a virtual environment that has {program.label}, or the file that starts it",
        )
    return _by_file(program, find_file(name, executable))


def find_file(name: str, executable: str) -> Path:
    """Return the file that `executable` of model `name` names, a path or a name on PATH; raise UserError without it."""
    path = Path(executable).expanduser()
    if path.is_file():
        if os.access(path, os.X_OK):
            return path.absolute()
        raise UserError(f"the executable of model {name}, {path}, may not be executed", f"chmod +x {path}")
    found = shutil.which(executable)
    if found is None:
        raise UserError(f"there is no executable {executable}, which model {name} names", "correct its entry")
    return Path(found).absolute()


def _by_file(program: Program, file: Path) -> Installed:
    folder = file.absolute().parent
    argv = (str(file.absolute()),)
    if _PYTHON.fullmatch(file.name):
        argv = (*argv, "-m", program.module)
    is_environment = (folder.parent / "pyvenv.cfg").is_file()
    return Installed(argv, _package_of(program, file), folder if is_environment else None, program)


def _package_of(program: Program, file: Path) -> Path | None:
    # A link, as tools that install applications make, leads to the environment; Python's own leads out of it.
    for start in (file.absolute(), file.resolve()):
        for pattern in ("lib*/python3*/site-packages", "lib/python3*/dist-packages"):
            for folder in sorted(start.parent.parent.glob(pattern)):
                if (folder / program.package).is_dir():
                    return folder / program.package
    return None


@cache
def _source(package: Path, options: tuple[str, ...]) -> str:
    texts: list[str] = []
    for pattern in options:
        for path in sorted(package.glob(pattern)):
            try:
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
    return "\n".join(texts)
