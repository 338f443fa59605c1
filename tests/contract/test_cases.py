"""Inputs that broke other people's batch runs, case by case: the file, its lines, the bodies, the answers."""

import json
from pathlib import Path
from typing import Final

import pytest

from tests.contract.casetable import Case, Ran, Runs, bodies
from tests.harness import CASES, Box, Engine, code, engine, engine_command, model_toml

DEADLY: Final = "STUB:die Item 4."


def whole_bodies(ran: Ran) -> None:
    """Every body reached the engine once, byte for byte."""
    assert all(ran.sent(body) >= 1 for body in bodies(ran.input).values())


def once_each(ran: Ran) -> None:
    """Every body reached the engine exactly once, byte for byte: one attempt a record."""
    assert all(ran.sent(body) == 1 for body in bodies(ran.input).values())


def no_bom_in_ids(ran: Ran) -> None:
    assert list(ran.by_id) == ["bom-1", "bom-2"]


def no_carriage_return(ran: Ran) -> None:
    assert list(ran.by_id) == ["crlf-1", "crlf-2", "crlf-3"]
    assert b"\r" not in (ran.box.folder / "out.jsonl").read_bytes()


def one_message(ran: Ran) -> None:
    assert ran.done.stderr.count("\n") == 2


def one_object_per_line(ran: Ran) -> None:
    assert "hint: write one object per line" in ran.done.stderr
    # The first twenty records are looked at, no more.
    assert ran.done.stderr.count(", line ") == 20


def counts_physical_lines(ran: Ran) -> None:
    assert list(ran.by_id) == ["gap-1", "gap-2", "gap-3"]
    spoiled = ran.input.read_text().replace('"max_tokens":64}}  ', '"max_tokens":64}}}')
    path = ran.box.folder / "spoiled.jsonl"
    path.write_text(spoiled)
    again = ran.run("x", file=path)
    assert "spoiled.jsonl, line 5, column " in again.stderr


def nothing_lost_of_glued_line(ran: Ran) -> None:
    assert "extra data" in ran.done.stderr


def separators_unchanged(ran: Ran) -> None:
    whole_bodies(ran)
    assert ran.sent(ran.body("sep-2")) == 1
    assert "para\u2029graph and nel\x85here".encode() in ran.body("sep-2")


def emoji_equal(ran: Ran) -> None:
    assert list(ran.by_id) == ["\U0001f600-1", "\U0001f600-2"]
    assert rb'"custom_id":"\ud83d\ude00-1"' in (ran.box.folder / "out.jsonl").read_bytes()
    once_each(ran)
    assert all("\U0001f680" in json.loads(body)["messages"][0]["content"] for body in bodies(ran.input).values())


def seeds_digit_for_digit(ran: Ran) -> None:
    once_each(ran)
    assert b'"seed":18446744073709551616' in ran.body("seed-2")
    assert b'"seed":9223372036854775807' in ran.body("seed-3")


def engine_never_saw_deep(ran: Ran) -> None:
    assert not any(b"[[[[" in body for _, body in ran.received)


def last_duplicate_wins(ran: Ran) -> None:
    assert list(ran.by_id) == ["keys-1", "keys-2b"]
    body = (
        b'{"model":"local-model","messages":[{"role":"user","content":"First version."}],'
        b'"max_tokens":8,"max_tokens":64}'
    )
    assert ran.sent(body) == 1


def names_first_use(ran: Ran) -> None:
    assert [line["custom_id"] for line in ran.results] == ["dup", "other", "dup"]
    assert "line 1" in ran.results[2]["error"]["message"]
    assert not any(b"Second owner." in body for _, body in ran.received)


def string_seven_stands(ran: Ran) -> None:
    assert [line["custom_id"] for line in ran.results] == [None, "7", None]


def no_file_named_after_ids(ran: Ran) -> None:
    expected = ["../../outside", "notes/chapter.one.md:12", "C:\\data\\a.txt", "-rf", "50% done?&x=1#y"]
    assert list(ran.by_id) == expected
    names = {path.name for path in ran.box.folder.rglob("*")}
    assert not names & {"outside", "notes", "chapter.one.md:12", "-rf", "a.txt"}
    assert not (ran.box.folder.parent.parent / "outside").exists()


def lists_accepted_urls(ran: Ran) -> None:
    assert not any(b"private text" in body for _, body in ran.received)
    assert all("/v1/chat/completions" in line["error"]["message"] for line in ran.results[1:])


def each_to_its_own_path(ran: Ran) -> None:
    paths = {body: path for path, body in ran.received}
    sent = {custom_id: paths[body] for custom_id, body in bodies(ran.input).items()}
    assert sent == {"mix-1": "/v1/chat/completions", "mix-2": "/v1/embeddings", "mix-3": "/v1/completions"}


def override_runs_all(ran: Ran) -> None:
    message = ran.results[1]["error"]["message"]
    assert "some-other-model" in message
    assert ran.engine.url in message
    assert ran.run("all.jsonl", "--ignore-record-model").status == 0
    assert [code(line) for line in ran.box.results("all.jsonl")] == [None] * 3
    sent = b'{"model":"local-model","messages":[{"role":"user","content":"which model am I?"}]}'
    assert [body for _, body in ran.engine.received()].count(sent) == 1


def model_filled_in(ran: Ran) -> None:
    for body in bodies(ran.input).values():
        assert ran.sent(b'{"model":"local-model",' + body[1:]) == 1


def shows_unknown_key(ran: Ran) -> None:
    assert '" custom_id"' in ran.results[1]["error"]["message"]


def extras_stay_out(ran: Ran) -> None:
    assert [set(line) for line in ran.results] == [{"id", "custom_id", "response", "error"}] * 2
    body = b'{"model":"local-model","messages":[{"role":"user","content":"ok"}],"max_tokens":64}'
    assert ran.sent(body) >= 2


def all_choices_kept(ran: Ran) -> None:
    assert [len(ran.by_id[name]["response"]["body"]["choices"]) for name in ("n-1", "n-2")] == [3, 1]
    once_each(ran)


def engine_text_kept(ran: Ran) -> None:
    once_each(ran)
    line = ran.by_id["ee-2"]
    assert line["response"]["status_code"] == 400
    assert "must not be an empty string" in line["response"]["body"]["error"]["message"]
    assert "must not be an empty string" in line["error"]["message"]


def refused_once(ran: Ran) -> None:
    for name in ("em-2", "em-3"):
        assert ran.sent(ran.body(name)) == 1
        assert ran.by_id[name]["response"]["status_code"] == 400


def template_error_kept(ran: Ran) -> None:
    assert ran.sent(ran.body("role-2")) == 3
    assert ran.by_id["role-2"]["response"]["status_code"] == 500
    assert "must alternate" in ran.by_id["role-2"]["error"]["message"]


def long_prompt_whole(ran: Ran) -> None:
    once_each(ran)
    assert ran.by_id["ctx-3"]["response"]["body"]["usage"]["prompt_tokens"] == 400_000


def cut_answers_counted(ran: Ran) -> None:
    assert [ran.by_id[f"bud-{n}"]["response"]["body"]["choices"][0]["finish_reason"] for n in (1, 2, 3)] == [
        "length", "length", "stop",
    ]  # fmt: skip
    assert "note: 2 of the first 3 records" in ran.done.stderr
    assert "2 cut off by max_tokens" in ran.done.stderr


def error_in_200(ran: Ran) -> None:
    assert "engine failed while answering" in ran.by_id["eb-2"]["error"]["message"]
    # The fourth record of case 96 is the same, and may be on its way by now.
    assert 3 <= ran.sent(ran.body("eb-2")) <= 6


def proxy_pages(ran: Ran) -> None:
    second, fourth = ran.by_id["gw-2"], ran.by_id["gw-4"]
    assert (second["response"]["status_code"], fourth["response"]["status_code"]) == (502, 400)
    assert "502 Bad Gateway" in second["response"]["body"]
    assert fourth["response"]["body"] == ""
    assert [ran.sent(ran.body(f"gw-{n}")) for n in (2, 3, 4)] == [3, 2, 1]


def infinity_is_null(ran: Ran) -> None:
    choice = ran.by_id["lp-1"]["response"]["body"]["choices"][0]
    assert choice["logprobs"]["content"][0]["logprob"] is None


def odd_text_equal(ran: Ran) -> None:
    assert (ran.box.folder / "out.jsonl").read_bytes().count(b"\n") == 4
    assert [ran.content(f"odd-{n}") for n in (1, 2, 3, 4)] == [
        "first\u2028second\u2029third",
        "half \ud835 sign",
        "before\x00after",
        "line one\r\nline \"two\"\r\n'three' \\ end",
    ]


def says_why_all_failed(ran: Ran) -> None:
    assert "no record was answered" in ran.done.stderr
    assert ran.done.last_line().startswith("3 of 3 failed: InferenceFailed (400): ")
    assert "unsupported parameter: logit_bias" in ran.done.last_line()


def counts_agree(ran: Ran) -> None:
    assert "3 of 5 records answered" in ran.done.stderr
    # Three tries, and three for the same body in case 63 where that was run.
    assert ran.sent(ran.body("cnt-4")) in (3, 6)


FAILED, INVALID = "InferenceFailed", "invalid_engine_response"
TABLE: Final = (
    # The file as a whole.
    Case(1, "01_bom.jsonl", 2, also=no_bom_in_ids),
    Case(3, "03_crlf.jsonl", 3, also=no_carriage_return),
    Case(4, "04_utf16le.jsonl", refused=("UTF-16", "save it as UTF-8")),
    Case(6, "06_array.jsonl", refused=("looks like a JSON array. Freight reads JSONL.",), also=one_message),
    Case(7, "07_pretty.jsonl", refused=("line 1, ",), also=one_object_per_line),
    Case(8, "08_gzip_inside.jsonl", refused=("gzip",)),
    Case(10, "10_empty.jsonl", refused=("is empty",)),
    Case(12, "12_blank_lines.jsonl", 3, also=counts_physical_lines),
    Case(13, "13_no_final_newline.jsonl", 2, also=once_each),
    # One line.
    Case(14, "14_glued.jsonl", refused=("line 2, column ",), also=nothing_lost_of_glued_line),
    Case(15, "15_trailing_commas.jsonl", refused=("line 1, column ", "line 2, column ")),
    Case(16, "16_python_repr.jsonl", refused=("line 2, column 2",)),
    Case(18, "18_truncated_tail.jsonl", refused=("line 3, ", "the file ends inside this record")),
    Case(19, "19_unicode_separators.jsonl", 3, also=separators_unchanged),
    Case(20, "20_lone_surrogate.jsonl", 3, also=whole_bodies),
    Case(21, "21_emoji_escapes.jsonl", 2, also=emoji_equal, env={"LC_ALL": "C"}),
    Case(23, "23_nan.jsonl", refused=("line 2, column ", "NaN", "line 3, column ", "-Infinity")),
    Case(24, "24_big_seed.jsonl", 3, also=seeds_digit_for_digit),
    Case(26, "deep26", refused=("line 2: ", "nested deeper than 512 levels"), also=engine_never_saw_deep),
    Case(27, "27_not_objects.jsonl", refused=tuple(f"line {n}: not a JSON object" for n in (2, 3, 4, 5))),
    Case(28, "28_duplicate_keys.jsonl", 2, also=last_duplicate_wins),
    # custom_id.
    Case(29, "29_duplicate_ids.jsonl", 3, bad={3: "duplicate_custom_id"}, also=names_first_use),
    Case(31, "31_missing_id.jsonl", 3, bad={2: "missing_custom_id"}),
    Case(32, "32_number_ids.jsonl", 3, bad={1: "invalid_custom_id", 3: "invalid_custom_id"}, also=string_seven_stands),
    Case(34, "34_long_ids.jsonl", 3, bad={3: "invalid_custom_id"}),
    Case(36, "36_path_like_ids.jsonl", 5, also=no_file_named_after_ids),
    # The rest of the envelope.
    Case(37, "37_missing_method.jsonl", 2, also=whole_bodies),
    Case(38, "38_methods.jsonl", 4, bad={2: "invalid_method", 4: "invalid_method"}),
    Case(40, "40_absolute_url.jsonl", 3, bad={2: "invalid_url", 3: "invalid_url"}, also=lists_accepted_urls),
    Case(42, "42_unknown_url.jsonl", 3, bad={2: "invalid_url"}),
    Case(43, "43_mixed_urls.jsonl", 3, also=each_to_its_own_path),
    Case(44, "44_mixed_models.jsonl", 3, bad={2: "model_mismatch"}, also=override_runs_all),
    Case(45, "45_no_model.jsonl", 2, also=model_filled_in),
    Case(46, "46_body_types.jsonl", 4, bad={2: "invalid_body", 3: "invalid_body", 4: "invalid_body"}),
    Case(47, "47_stream.jsonl", 3, bad={2: "streaming_unsupported", 3: "streaming_unsupported"}),
    Case(48, "48_extra_top_level.jsonl", 2, also=extras_stay_out),
    Case(49, "49_key_with_space.jsonl", 2, bad={2: "missing_custom_id"}, also=shows_unknown_key),
    # The body, handed through to the engine.
    Case(50, "50_pass_through.jsonl", 1, also=once_each),
    Case(51, "51_many_choices.jsonl", 2, also=all_choices_kept),
    Case(52, "52_tools.jsonl", 3, also=once_each),
    Case(53, "53_bad_schema.jsonl", 4, also=once_each),
    Case(56, "56_embedding_empty_text.jsonl", 4, failed={"ee-2": FAILED}, also=engine_text_kept),
    Case(57, "57_empty_messages.jsonl", 4, failed={"em-2": FAILED, "em-3": FAILED}, also=refused_once),
    Case(59, "59_roles_not_alternating.jsonl", 3, failed={"role-2": FAILED}, also=template_error_kept),
    Case(60, "long60", 5, also=long_prompt_whole),
    Case(61, "61_limit_names.jsonl", 6, also=whole_bodies),
    Case(62, "62_small_budget.jsonl", 3, also=cut_answers_counted),
    # What the engine answers.
    Case(63, "63_200_with_error_body.jsonl", 3, failed={"eb-2": INVALID}, also=error_in_200),
    Case(65, "65_html_502.jsonl", 5, failed={"gw-2": FAILED, "gw-4": FAILED}, also=proxy_pages),
    Case(66, "66_inf_logprobs.jsonl", 2, also=infinity_is_null),
    Case(68, "68_reply_odd_text.jsonl", 4, also=odd_text_equal),
    # Results and counts.
    Case(95, "95_all_fail.jsonl", 3, failed={f"af-{n}": FAILED for n in (1, 2, 3)}, also=says_why_all_failed),
    Case(96, "96_two_of_five.jsonl", 5, failed={"cnt-2": FAILED, "cnt-4": INVALID}, also=counts_agree),
)


@pytest.mark.parametrize("number", [pytest.param(case.number, id=f"case-{case.number}") for case in TABLE])
def test_case(number: int, runs: Runs) -> None:
    runs[number].check()


@pytest.mark.parametrize("number", [pytest.param(54, id="case-54")])
def test_record_that_kills_the_engine_fails_alone(number: int, box: Box, tmp_path: Path) -> None:
    command = engine_command(tmp_path)
    box.configure(model_toml("local-model", engine="command", command=command))
    done = box.freight("run", str(CASES / "inputs" / "54_poison_logit_bias.jsonl"), "-o", "out.jsonl")
    assert done.status == 0
    results = box.results()
    assert [code(line) for line in results] == [None, None, None, "worker_crashed", None, None, None, None]
    assert [line["custom_id"] for line in results] == [f"poison-{n}" for n in range(1, 9)]
    # Three deaths, and no more.
    received = Engine("", tmp_path, None).received()  # type: ignore[arg-type]
    assert sum(DEADLY.encode() in body for _, body in received) == 3
    assert done.last_line().startswith("1 of 8 failed: worker_crashed: ")
    assert not box.processes()


@pytest.mark.parametrize("number", [pytest.param(69, id="case-69")])
def test_loading_engine_costs_no_record_a_try(number: int, box: Box, tmp_path: Path) -> None:
    file = CASES / "inputs" / "00_good3.jsonl"
    box.configure(model_toml("local-model", engine="command", command=engine_command(tmp_path, "--loading", "1.5")))
    # This one takes requests, and answers 503, long before its model is loaded.
    with engine(tmp_path / "eager", "--loading", "4", "--no-models") as eager:
        run = box.start("run", str(file), "-o", "eager.jsonl", "--model", eager.url)
        own = box.freight("run", str(file), "-o", "own.jsonl")
        _, said = run.communicate(timeout=60)
        assert (own.status, run.returncode) == (0, 0)
        for name in ("own.jsonl", "eager.jsonl"):
            assert [code(line) for line in box.results(name)] == [None] * 3
        assert "loading the model" in own.stderr
        assert "its health check answers 503" in said
        # Every record was sent and refused at least once before.
        assert eager.counts()["requests"] >= 6
