"""Who may read and write where, and what is said to those who may not."""

import os
from pathlib import Path

import pytest

from freight.config import PathGrant
from freight.control.grants import Grants, checked_path, uid_of
from freight.core.account import Account, Role
from freight.errors import FreightError, NotAllowed, UserError
from freight.store.roots import PUBLIC, Root

ALICE = Account("alice", groups=frozenset({"lab"}))
BOB = Account("bob")


def granting(top: str = "", **more: PathGrant) -> Grants:
    """Return grants to everybody, to alice and to her group; `top` goes before each folder."""
    table = {
        "*": PathGrant((f"{top}/public",), ()),
        "alice": PathGrant((f"{top}/genomes", f"{top}/genomes/deep"), (f"{top}/genomes/out",)),
        "@lab": PathGrant((f"{top}/lab",), (f"{top}/lab/out",)),
        **more,
    }
    return Grants(table, {"alice": 1001, "bob": 1002}.get)


READABLE = {
    "own": (ALICE, "/genomes/x.jsonl", "/genomes"),
    "innermost": (ALICE, "/genomes/deep/x.jsonl", "/genomes/deep"),
    "for output": (ALICE, "/genomes/out/b/x.jsonl", "/genomes/out"),
    "group's": (ALICE, "/lab/x.jsonl", "/lab"),
    "everybody's": (BOB, "/public//./x.jsonl", "/public"),
    "another's": (BOB, "/genomes/x.jsonl", "/"),
    "another group's": (BOB, "/lab/x.jsonl", "/"),
    "beside": (ALICE, "/genomes2/x.jsonl", "/"),
    "an administrator's": (Account("root", Role.ADMIN), "/genomes/x.jsonl", "/"),
    "called like a group": (Account("@lab"), "/lab/x.jsonl", "/"),
    "called like everybody": (Account("*"), "/public/x.jsonl", "/public"),
}


@pytest.mark.parametrize(("account", "path", "root"), READABLE.values(), ids=READABLE)
def test_input_is_opened_below_the_innermost_folder_granted(account: Account, path: str, root: str) -> None:
    found = granting().readable(account, path)
    owner = {"alice": 1001, "bob": 1002}.get(account.user)
    assert found == (PUBLIC if root == "/" else Root(Path(root), owner))


BAD_PATHS = {
    "empty": ("", "is empty"),
    "relative": ("genomes/x", "is not absolute"),
    "of the home folder": ("~/x", "is not absolute"),
    "up": ("/genomes/../etc/passwd", "has .. in it"),
    "up at the end": ("/genomes/..", "has .. in it"),
    "with a NUL": ("/genomes/x\0.jsonl", "control character"),
    "with a line end": ("/genomes/x\n.jsonl", "control character"),
    "not UTF-8": ("/genomes/\udcff", "not valid UTF-8"),
    "half a character": ("/genomes/\ud83d", "not valid UTF-8"),
    "too long": ("/genomes" + "/x" * 2045, "has 4098 bytes; the most is 4095"),
    "too long in bytes": ("/é" * 1366, "has 4098 bytes"),
    "too deep": ("/genomes" + "/x" * 100, "has 101 names in it; the most is 100"),
    "with a long name": ("/genomes/" + "x" * 256, "a name of 256 bytes"),
}


@pytest.mark.parametrize(("path", "words"), BAD_PATHS.values(), ids=BAD_PATHS)
def test_path_that_nothing_can_have_is_refused_with_what_is_wrong(path: str, words: str) -> None:
    grants = granting()
    for ask in (grants.readable, grants.open_input, grants.output_root):
        with pytest.raises(UserError) as refused:
            ask(ALICE, path)
        assert words in refused.value.message
        assert refused.value.hint
        assert refused.value.message.isprintable()
        refused.value.message.encode()


@pytest.mark.parametrize("path", ["/genomes/", "/genomes/x/", "/genomes/x/.", "/"])
def test_input_that_names_a_folder_is_refused_and_output_is_not(path: str) -> None:
    with pytest.raises(UserError, match="names a folder"):
        granting().readable(ALICE, path)
    assert checked_path(path, "output folder", is_folder=True) == Path(path)


def test_longest_names_pass() -> None:
    path = "/genomes/" + "/".join(["x" * 255] * 15)
    assert checked_path(path + "/" + "y" * (4094 - len(path)), "input file")


OUTPUT = {
    "own": (ALICE, "/genomes/out/a/", "/genomes/out", "/genomes/out/a"),
    "the root itself": (ALICE, "/genomes/out", "/genomes/out", "/genomes/out"),
    "group's": (ALICE, "/lab/out/a", "/lab/out", "/lab/out/a"),
    "none named": (ALICE, None, "/genomes/out", "/genomes/out"),
    "none named, group's": (Account("carol", groups=frozenset({"lab", "a"})), None, "/lab/out", "/lab/out"),
}


@pytest.mark.parametrize(("account", "folder", "root", "place"), OUTPUT.values(), ids=OUTPUT)
def test_output_goes_below_a_granted_folder(account: Account, folder: str | None, root: str, place: str) -> None:
    found, path = granting().output_root(account, folder)
    assert (found.path, path) == (Path(root), Path(place))


@pytest.mark.parametrize("folder", ["/genomes", "/genomes/outer", "/public", "/"])
def test_output_elsewhere_is_refused_with_what_would_be_accepted(folder: str) -> None:
    with pytest.raises(NotAllowed) as refused:
        granting().output_root(ALICE, folder)
    assert refused.value.message == f"the output folder {folder} is not below a folder granted to you for output"
    assert refused.value.hint == "output may lie below /genomes/out, /lab/out"


def test_user_without_any_output_folder_is_told_so() -> None:
    with pytest.raises(NotAllowed, match="no folder for output is granted to you") as refused:
        granting().output_root(BOB)
    assert refused.value.hint is not None
    assert "[paths]" in refused.value.hint
    with pytest.raises(NotAllowed, match="not below a folder granted"):
        granting().output_root(BOB, "/genomes/out")


@pytest.fixture
def open_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everybody enter the test's folder, as far as the service can tell."""
    tmp_path.chmod(0o755)
    monkeypatch.setattr("freight.control.grants.PUBLIC", Root(tmp_path, is_public=True))


@pytest.mark.usefixtures("open_to_all")
def test_nothing_is_said_about_what_lies_outside(tmp_path: Path) -> None:
    for name in ("file", "public/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("outside")
        (tmp_path / name).chmod(0o600)
    (tmp_path / "genomes").mkdir()
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "private" / "there").write_text("outside")
    os.mkfifo(tmp_path / "pipe")
    said: set[tuple[str, str | None]] = set()
    for name in ("file", "nothing", "nothing/below", "file/below", "private", "private/there", "private/gone", "pipe"):
        with pytest.raises(FreightError) as refused:
            granting(str(tmp_path)).open_input(BOB, f"{tmp_path}/{name}")
        assert type(refused.value) is NotAllowed
        assert refused.value.__cause__ is None
        said.add((refused.value.message.replace(f"/{name} ", "/NAME "), refused.value.hint))
    assert said == {
        (
            f"the input file {tmp_path}/NAME is neither below a folder granted to you nor one that everybody may read",
            f"input may lie below {tmp_path}/public; or a file that everybody may read, "
            "in folders that everybody may enter",
        )
    }


def test_link_out_of_a_granted_folder_says_nothing_about_its_end(tmp_path: Path) -> None:
    (tmp_path / "genomes").mkdir()
    (tmp_path / "genomes" / "deep").mkdir()
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "secret").chmod(0o600)
    for end in ("secret", "nothing"):
        link = tmp_path / "genomes" / "deep" / end
        link.symlink_to(tmp_path / end)
        with pytest.raises(NotAllowed, match=f"{end} leads out of {tmp_path}/genomes/deep"):
            granting(str(tmp_path)).open_input(ALICE, str(link))


def test_link_from_an_inner_folder_may_lead_to_the_outer(tmp_path: Path) -> None:
    (tmp_path / "genomes" / "deep").mkdir(parents=True)
    (tmp_path / "genomes" / "file").write_text("inside")
    (tmp_path / "genomes" / "deep" / "link").symlink_to("../file")
    with os.fdopen(granting(str(tmp_path)).open_input(ALICE, f"{tmp_path}/genomes/deep/link")) as file:
        assert file.read() == "inside"


@pytest.mark.usefixtures("open_to_all")
def test_link_in_a_granted_folder_may_lead_to_what_everybody_may_read(tmp_path: Path) -> None:
    (tmp_path / "genomes").mkdir()
    (tmp_path / "genomes").chmod(0o755)
    (tmp_path / "file").write_text("public")
    (tmp_path / "file").chmod(0o644)
    (tmp_path / "genomes" / "link").symlink_to("../file")
    with os.fdopen(granting(str(tmp_path)).open_input(ALICE, f"{tmp_path}/genomes/link")) as file:
        assert file.read() == "public"
    (tmp_path / "genomes").chmod(0o750)
    with pytest.raises(NotAllowed, match="leads out"):
        granting(str(tmp_path)).open_input(ALICE, f"{tmp_path}/genomes/link")


def test_file_that_everybody_may_read_needs_no_grant() -> None:
    os.close(granting().open_input(BOB, "/etc/passwd"))


def test_missing_file_below_a_granted_folder_is_called_missing(tmp_path: Path) -> None:
    (tmp_path / "public").mkdir()
    with pytest.raises(UserError, match=f"there is no {tmp_path}/public/x"):
        granting(str(tmp_path)).open_input(BOB, f"{tmp_path}/public/x")


def test_owner_of_hard_links_is_the_local_user_of_that_name_but_never_the_superuser() -> None:
    assert uid_of("root") is None
    assert uid_of("no user is called so") is None
    assert uid_of("\0") is None
    assert uid_of("daemon") == 1
