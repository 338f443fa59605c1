"""Models that were fetched from a hub: where they lie, and what was fetched when. Never touches the network.

They lie as in the hub library's own cache: a folder a repository, the contents in `blobs` by their hash, and a folder
of links a commit in `snapshots`.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from freight.core.hubfiles import HubId, choose, missing_parts, parse_hub_id
from freight.errors import UserError
from freight.store.files import sync_folder

RECORD: Final = "freight.json"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class Pull(msgspec.Struct, frozen=True):
    """What one pull fetched: `files` are paths in the repository with their sizes, the first one first."""

    repo: str
    file: str
    revision: str
    commit: str
    files: dict[str, int]
    pulled_at: str


def models_folder(data_folder: Path) -> Path:
    """Return where fetched models lie: a hub cache of Freight's own."""
    return data_folder / "models"


def repo_folder(models: Path, repo: str) -> Path:
    """Return a repository's folder in a hub cache."""
    return models / f"models--{repo.replace('/', '--')}"


def find_model(data_folder: Path, hub_id: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder or the file of a model of a hub that is on this machine as a whole; None where it is not.

    Looks at what `freight models pull` fetched, the latest first, then at the user's own hub cache. For a model in
    several files of one set this is the first one.
    """
    try:
        wanted = parse_hub_id(hub_id)
    except UserError:
        return None
    own = repo_folder(models_folder(data_folder), wanted.repo)
    for pull in read_pulls(own):
        found = pulled_path(own, pull) if _answers(pull, wanted) else None
        if found is not None:
            return found if pull.file == wanted.file else _in_snapshot(own / "snapshots" / pull.commit, wanted)
    for cache in _user_caches(environment):
        for snapshot in _snapshots(repo_folder(cache, wanted.repo)):
            found = _in_snapshot(snapshot, wanted)
            if found is not None:
                return found
    return None


def is_commit(revision: str) -> bool:
    """Return whether a revision is a commit, which never moves."""
    return _COMMIT.fullmatch(revision) is not None


def read_pulls(folder: Path) -> list[Pull]:
    """Return what was fetched of a repository, the latest first; nothing where the record is missing or damaged."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=list[Pull])[::-1]
    except (OSError, msgspec.DecodeError):
        return []


def note_pull(folder: Path, pull: Pull) -> None:
    """Record a pull; it takes the place of an earlier one of the same files at the same commit."""
    same = (pull.file, pull.revision, pull.commit)
    kept = [old for old in reversed(read_pulls(folder)) if (old.file, old.revision, old.commit) != same]
    aside = folder / f"{RECORD}.new"
    with aside.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode([*kept, pull]), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(folder / RECORD)
    sync_folder(folder)


def pulled_path(folder: Path, pull: Pull) -> Path | None:
    """Return the folder, or for a file that file, of a pull whose files are all there in their sizes."""
    snapshot = folder / "snapshots" / pull.commit
    for name, size in pull.files.items():
        try:
            if (snapshot / name).stat().st_size != size:
                return None
        except OSError:
            return None
    return snapshot / next(iter(pull.files)) if pull.file and pull.files else snapshot


def _answers(pull: Pull, wanted: HubId) -> bool:
    if not wanted.file or pull.file == wanted.file:
        return pull.file == wanted.file
    with suppress(UserError):
        return bool(choose(wanted, list(pull.files)))
    return False


def _user_caches(environment: Mapping[str, str]) -> list[Path]:
    """Return the user's own hub cache, found as the hub's library finds it."""
    get = environment.get
    with suppress(RuntimeError):  # No home folder.
        cache = get("XDG_CACHE_HOME") or "~/.cache"
        home = get("HF_HOME") or str(Path(cache) / "huggingface")
        named = get("HF_HUB_CACHE") or get("HUGGINGFACE_HUB_CACHE") or str(Path(home) / "hub")
        return [Path(os.path.expandvars(named)).expanduser()]
    return []


def _snapshots(folder: Path) -> list[Path]:
    """Return the folders of a repository's commits: that of main first, then the latest."""
    try:
        found = [entry for entry in (folder / "snapshots").iterdir() if entry.is_dir()]
        found.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    except OSError:
        return []
    main = ""
    with suppress(OSError):
        main = (folder / "refs" / "main").read_text().strip()
    return sorted(found, key=lambda entry: entry.name != main)


def _in_snapshot(snapshot: Path, wanted: HubId) -> Path | None:
    """Return the wanted file, or the snapshot itself, where all that the model needs is there."""
    # A link into `blobs` whose content is not there is no file.
    there = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    try:
        needed = choose(wanted, there)
    except UserError:
        return None
    if missing_parts(needed):
        return None
    if wanted.file:
        return snapshot / needed[0]
    return snapshot if _is_whole(snapshot, wanted, needed) else None


def _is_whole(snapshot: Path, wanted: HubId, there: Iterable[str]) -> bool:
    """Return whether nothing is missing, by the listing that the hub's library kept, else by the weights' own index."""
    have = set(there)
    listing = _read_json(snapshot.parents[1] / "trees" / f"{snapshot.name}.json", lambda found: list(found["files"]))
    if listing is not None:
        with suppress(UserError):
            return set(choose(wanted, listing)) <= have
    for index in have:
        if index.endswith(".index.json"):
            shards = _read_json(snapshot / index, lambda found: set(found["weight_map"].values()))
            if shards is None or not {str(Path(index).with_name(shard)) for shard in shards} <= have:
                return False
    return bool(have & {"config.json", "params.json"})


def _read_json(path: Path, take: Callable[[dict[str, Any]], Iterable[str]]) -> list[str] | None:
    try:
        return [str(name) for name in take(cast(dict[str, Any], msgspec.json.decode(path.read_bytes())))]
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None
