"""Options on a server's command line."""

import pytest

from freight.engines.arguments import given, joined, whole_number

ALIASES = {"-tp": "--tensor", "--no-web": "--ui"}


def test_options_are_read_in_all_their_spellings() -> None:
    words = [
        "--a",
        "1",
        "--b=2",
        "-tp",
        "4",
        "--c_d",
        "--no-e",
        "--f",
        "-1",
        "--g.h",
        "5",
        "value",
        "--a=3",
        "--no-web",
    ]
    assert given(words, ALIASES) == {
        "--a": "3", "--b": "2", "--tensor": "4", "--c-d": "", "--e": "", "--f": "-1", "--g": "5", "--ui": "",
    }  # fmt: skip


def test_ours_stand_before_the_users_and_never_twice() -> None:
    ours = [["--a", "x"], ["--b"], ["--tensor", "2"], ["--names", "n", "m"]]
    assert joined(ours, [], ALIASES) == ["--a", "x", "--b", "--tensor", "2", "--names", "n", "m"]
    assert joined(ours, ["--no-b", "-tp=1"], ALIASES) == ["--a", "x", "--names", "n", "m", "--no-b", "-tp=1"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2M", 2 << 20), ("auto", None), ("", None), ("-1", None)],
)
def test_numbers_are_read_as_servers_read_them(text: str, number: int | None) -> None:
    assert whole_number(text) == number
