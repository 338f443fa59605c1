"""A town whose people have files on the service's machine, as at a facility."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from tests.contract.town import MODEL, Town, town
from tests.harness import Json, model_toml, parse_lines, wait_until
from tests.service import chats

ALIAS: Final = "meta-llama/Meta-Llama-3.1-8B-Instruct"
BASE: Final = "/resource_server"
BATCHES: Final = f"{BASE}/v1/batches"
CREATE: Final = f"{BASE}/local/endpoint/v1/batches"
ENDED: Final = frozenset({"completed", "failed", "cancelled"})


class Site:
    """The town, and the folders there: alice reads below `data` and writes below `out`; bob writes below `bobs`."""

    def __init__(self, place: Town, folder: Path) -> None:
        self.town = place
        self.data, self.out, self.bobs, self.outside = (folder / name for name in ("data", "out", "bobs", "outside"))
        for made in (self.data, self.out, self.bobs, self.outside):
            made.mkdir()
        self.configure()

    def configure(self, more: str = "") -> None:
        """Write the settings, with more of them; they are in force at once."""
        entry: dict[str, Any] = {"engine": "endpoint", "source": self.town.end.url}
        models = [
            model_toml(MODEL, **entry),
            model_toml("llama", **entry, batch=True, aliases=[ALIAS]),
            model_toml("chat-only", **entry),
            model_toml("heavy", engine="vllm", source="nobody/nothing", batch=True),
        ]
        paths = (
            f'[paths]\nalice = {{ read = ["{self.data}"], write = ["{self.out}"] }}\n'
            f'bob = {{ write = ["{self.bobs}"] }}\n'
        )
        listen = '[server]\nlisten = "127.0.0.1:0"\n'
        self.town.box.configure(f'{listen}\n{paths}\n{more}\n[pools.sophia]\nprovider = "slurm"\n' + "\n".join(models))

    def write(self, name: str, *texts: str, folder: Path | None = None) -> Path:
        """Write an input with a record for each text."""
        path = (folder or self.data) / name
        path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in chats(*texts)))
        return path

    def ask(self, method: str, path: str, who: str = "alice", **more: Any) -> httpx.Response:
        """Send one request of somebody's."""
        return self.town.as_(who, method, path, **more)

    def create(self, path: Path | str, who: str = "alice", to: str = CREATE, **more: Any) -> httpx.Response:
        """Ask for a batch."""
        headers = more.pop("headers", {})
        return self.ask("POST", to, who, json={"model": ALIAS, "input_file": str(path), **more}, headers=headers)

    def batch(self, path: Path, who: str = "alice", **more: Any) -> str:
        """Make a batch; return its id."""
        answer = self.create(path, who, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()["batch_id"]

    def status(self, batch: str, who: str = "alice") -> str:
        """Return a batch's status."""
        return self.ask("GET", f"{BATCHES}/{batch}", who).json()

    def until(self, batch: str, *statuses: str, who: str = "alice") -> str:
        """Wait until a batch has one of the statuses, and return it."""
        wait_until(lambda: self.status(batch, who) in statuses, f"it is {' or '.join(statuses)}")
        return self.status(batch, who)

    def ended(self, batch: str, who: str = "alice") -> Json:
        """Wait until a batch has ended; return its result."""
        self.until(batch, *ENDED, who=who)
        answer = self.ask("GET", f"{BATCHES}/{batch}/result", who)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def listed(self, who: str = "alice", **query: Any) -> list[Json]:
        """Return the list of somebody's batches."""
        answer = self.ask("GET", BATCHES, who, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @contextmanager
    def holding(self) -> Generator[None]:
        """Have records that begin with "hold" wait for the end of the block."""
        self.town.end.let_go.clear()
        try:
            yield
        finally:
            self.town.end.let_go.set()

    def left(self) -> tuple[list[str], list[str]]:
        """Return the uploads there are, and the folders and unfinished files where alice's batches go."""
        found = [path for path in self.out.rglob("*") if path.is_dir() or path.suffix == ".partial"]
        return sorted(names_in(self.town.box.data / "uploads")), sorted(map(str, found))


def names_in(folder: Path) -> list[str]:
    """Return the names of what is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def lines_of(path: str | Path) -> list[Json]:
    """Return the lines of a results file."""
    return parse_lines(Path(path).read_bytes())


@contextmanager
def site(folder: Path) -> Generator[Site]:
    """Run a service as a facility has it."""
    with town(folder) as place:
        yield Site(place, folder)
