"""Which media a record may name."""

import json
from typing import Any

import pytest

from freight.core.media import may_name_media, media_host, media_problem

HOSTS = frozenset({"images.example.org", "10.0.0.9"})
PNG = "data:image/png;base64,iVBORw0KGgo="
OK = "https://images.example.org/a.png"
BAD = "http://images.example.org/a.png"


FIELDS = (
    "image_url", "input_image", "image", "images", "audio_url", "input_audio", "audio", "video_url", "input_video",
    "video", "file", "file_url", "file_data", "input_file", "media_url", "document_url", "image_urls", "video_urls",
    "audio_urls", "file_urls", "files", "videos", "image_path", "image_data", "image_file", "ref_audio", "pdf_url",
    "IMAGE_URL", "Image_Url", "imageUrl", "image-url", "fileUri",
)  # fmt: skip


def allowed(body: Any, hosts: frozenset[str] = HOSTS) -> bool:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return media_problem(encoded, hosts) is None


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize("url", [PNG, "DATA:image/png;base64,AA==", "data:,x", OK, OK.replace("https", "HTTPS")])
def test_inline_data_and_https_of_an_allowed_host_pass(url: str) -> None:
    assert allowed(chat({"type": "image_url", "image_url": {"url": url}}))
    assert allowed(chat({"type": "input_image", "image_url": url}))


REFUSED = [
    "http://images.example.org/a.png",
    "https://other.example.org/a.png",
    "https://images.example.org.evil.example/a.png",
    "https://evil.example/images.example.org",
    "https://images.example.org@evil.example/a.png",
    "https://images.example.org:pw@evil.example/a.png",
    "https://evil.example#@images.example.org/",
    "https://evil.example?@images.example.org/",
    "https://evil.example\\@images.example.org/",
    "https://images.example.org\\@evil.example/",
    "https://evil.example\t@images.example.org/",
    "https://evil.example\n.images.example.org/",
    "https://images.example.org\u3002evil.example/",
    "https://images.example.org/a b.png",
    "https://10.0.0.9.evil.example",
    "https://[::1]/a.png",
    "https://images.example.org./a.png",
    "https://images.example.org%2f@evil.example/a.png",
    "https://%69mages.example.org/a.png",
    "https://images.example.org%00.evil.example/a.png",
    "https://images.example.org\x00/a.png",
    "https://im\u200bages.example.org/a.png",
    "https://\uff49mages.example.org/a.png",
    "https://evil.example@images.example.org/a.png",
    "https://images.example.org?@evil.example/a.png",
    "https://images.example.org#@evil.example/a.png",
    "https://images.example.org:443@evil.example/a.png",
    "https://images.example.org:port/a.png",
    "https://images.example.org;evil.example/a.png",
    "https://images.example.org,evil.example/a.png",
    "https:\\\\images.example.org/a.png",
    "https:/\\images.example.org/a.png",
    "https:///images.example.org/a.png",
    "http\u017f://images.example.org/a.png",
    "h\tttps://images.example.org/a.png",
    "https:\n//images.example.org/a.png",
    "\thttps://images.example.org/a.png",
    "\\\\images.example.org\\a.png",
    "https://167772169/a.png",
    "https://0xa000009/a.png",
    "da\tta:,x",
    "data\n:,x",
    "data:",
    "data:/../../etc/passwd.png",
    "data://images.example.org/a,b",
    "s3://images.example.org/a",
    "https://[bad/a.png",
    "https://",
    "https:images.example.org/a.png",
    "//images.example.org/a.png",
    " data:image/png;base64,AA==",
    "file:///etc/passwd",
    "FILE:/etc/passwd",
    "/etc/passwd",
    "../../secret",
    "ftp://images.example.org/a",
    "gopher://images.example.org",
    "javascript:alert(1)",
    "blob:https://images.example.org/1",
    "iVBORw0KGgo=",
    "abcd",
    "",
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_any_other_address_is_refused(url: str) -> None:
    assert not allowed(chat({"type": "image_url", "image_url": {"url": url}}))
    assert not allowed(chat({"type": "input_image", "image_url": url}))


def test_a_port_and_letter_case_do_not_make_another_host() -> None:
    assert allowed({"image": "https://IMAGES.example.org:8443/a"})
    assert not allowed({"image": "https://evil.example:443/images.example.org:443"})


def test_without_allowed_hosts_only_inline_data_passes() -> None:
    assert not allowed({"image": OK}, frozenset())
    assert allowed({"image": PNG}, frozenset())


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "shape",
    [
        lambda url: url,
        lambda url: {"url": url},
        lambda url: {"detail": "low", "uri": url},
        lambda url: {"path": url},
        lambda url: [url],
        lambda url: [{"url": url}],
        lambda url: [PNG, [{"url": {"url": url}}]],
        lambda url: {"file_url": {"url": [url]}},
    ],
)
def test_every_field_counts_in_every_shape(field: str, shape: Any) -> None:
    assert not allowed({"x": [{"y": {field: shape(BAD)}}]})
    assert allowed({"x": [{"y": {field: shape(PNG)}}]})


@pytest.mark.parametrize("depth", [1, 10, 200, 240])
@pytest.mark.parametrize("inside", ["list", "object", "media"])
def test_a_field_counts_at_any_depth(depth: int, inside: str) -> None:
    left, right = {"list": (b"[", b"]"), "object": (b'{"x":', b"}"), "media": (b'{"image":', b"}")}[inside]

    for url, verdict in ((BAD, False), (PNG, True)):
        body = b'{"messages":' + left * depth + json.dumps({"file": url}).encode() + right * depth + b"}"
        assert allowed(body) is verdict


def test_nesting_up_to_the_limit_is_walked_without_a_crash() -> None:
    for key in (b"image", b"x"):
        nested = (b'{"' + key + b'":') * 505
        assert not allowed(nested + b'{"image_url":"file:///etc/passwd"}' + b"}" * 505)


def test_a_duplicate_does_not_hide_another() -> None:
    assert not allowed(b'{"image_url":"http://a","image_url":"data:,x"}')
    assert not allowed(b'{"image_url":"data:,x","image_url":"http://a"}')
    assert not allowed(b'{"image_url":{"url":"http://a","url":"data:,x"}}')
    assert not allowed(b'{"x":{"image":"http://a"},"x":1}')


@pytest.mark.parametrize("key", [b"im\\u0061ge_url", b"\\u0069\\u006d\\u0061\\u0067\\u0065_url", b"image\\u005furl"])
def test_a_name_spelt_in_escapes_counts(key: bytes) -> None:
    assert not allowed(b'{"' + key + b'":{"url":"http://a"}}')
    assert not allowed(b'{"' + key + b'":{"\\u0075rl":"http://a"}}')


@pytest.mark.parametrize("name", [*FIELDS, "multi_modal_data", "prompt-embeds", "ref_image"])
@pytest.mark.parametrize("spelling", ["\\u%04x", "\\u%04X"])
def test_a_name_counts_whichever_of_its_letters_is_spelt(name: str, spelling: str) -> None:
    for at, letter in enumerate(name):
        key = name[:at] + spelling % ord(letter) + name[at + 1 :]
        assert not allowed(f'{{"a\\\\":"\\\\","{key}":{{"url":"http://a"}}}}'.encode()), key


@pytest.mark.parametrize(
    "text",
    ['the "image" and the "video"', 'a "file":"x"', "\\u003cimage\\u003e \\u0026 \\u0022", "caf\u00e9 \u4f60 \\u2019"],
)
def test_a_text_that_quotes_such_names_names_no_media(text: str) -> None:
    """Most bodies are not decoded for this: the quick look tells."""
    body = json.dumps(chat({"type": "text", "text": text}), ensure_ascii=False).replace("\\\\u", "\\u").encode()

    assert json.loads(body)
    assert not may_name_media(body)


def test_an_address_spelt_in_escapes_is_read_as_what_it_is() -> None:
    assert not allowed(b'{"image":"\\u0066ile:///etc/passwd"}')
    assert allowed(b'{"image":"d\\u0061ta:,x"}')


def test_base64_passes_where_engines_read_nothing_else() -> None:
    assert allowed(chat({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}))
    assert allowed(chat({"type": "file", "file": {"file_data": "JVBERi0=", "filename": "a.pdf"}}))


@pytest.mark.parametrize("value", ["http://a/b.wav", "file:///a", "/etc/passwd", "../a", "not base64!"])
def test_an_address_where_base64_belongs_is_refused(value: str) -> None:
    assert not allowed(chat({"type": "input_audio", "input_audio": {"data": value, "format": "wav"}}))


@pytest.mark.parametrize("path", ["/etc//passwd", "/dev/tty", "/proc/1/root/etc/key"])
def test_a_path_that_could_be_base64_is_refused(path: str) -> None:
    assert not allowed(chat({"type": "input_audio", "input_audio": {"data": path, "format": "wav"}}))


def test_a_jpeg_as_base64_is_no_path() -> None:
    assert allowed(chat({"type": "image", "data": "/9j/4AAQSkZJ"}))


@pytest.mark.parametrize("kind", ["image", "input_image", "audio", "video", "file", "image_url", "IMAGE"])
@pytest.mark.parametrize("key", ["url", "uri", "path", "source", "src", "href", "data", "URL"])
def test_an_object_that_says_it_is_a_medium_is_one(kind: str, key: str) -> None:
    assert not allowed(chat({"type": kind, key: BAD}))
    assert not allowed(chat({key: BAD, "type": kind}))
    assert not allowed(chat({"Type": kind, key: [BAD]}))
    assert allowed(chat({"type": kind, key: PNG}))
    assert allowed(chat({"type": "text", key: BAD}))


def test_a_source_within_a_medium_counts() -> None:
    assert not allowed(chat({"type": "image", "source": {"type": "url", "url": BAD}}))
    assert not allowed(chat({"type": "image", "source": {"type": "base64", "data": "file:///etc/passwd"}}))
    assert allowed(chat({"type": "image", "source": {"type": "base64", "data": "iVBORw0KGgo="}}))


def test_documents_to_be_ranked_are_text_and_their_images_are_media() -> None:
    assert allowed({"query": "q", "documents": ["see http://a/b.png", {"text": "/etc/passwd"}]})
    assert not allowed({"query": "q", "documents": [{"content": [{"type": "image_url", "image_url": {"url": BAD}}]}]})
    assert not allowed({"data_1": {"content": [{"image": "/etc/passwd"}]}, "data_2": "a"})
    assert not allowed({"input": [{"text": "a", "image": "file:///etc/passwd"}]})


def test_images_in_a_tools_answer_count() -> None:
    part = {"type": "image_url", "image_url": {"url": BAD}}
    assert not allowed({"messages": [{"role": "tool", "tool_call_id": "1", "content": [part]}]})
    assert not allowed(
        {"input": [{"type": "function_call_output", "output": [{"type": "input_file", "file_url": BAD}]}]}
    )


@pytest.mark.parametrize("field", ["prompt_embeds", "image_embeds", "multimodal_data", "multi_modal_data"])
def test_tensors_are_base64_and_no_address(field: str) -> None:
    assert allowed({"prompt": "a", field: "AAAA"})
    assert allowed({"prompt": {"prompt_string": "a", field: ["AAAA", "BBBB"]}})
    assert not allowed({"prompt": "a", field: [BAD]})
    assert not allowed({"prompt": "a", field: {"image": "/etc/passwd"}})


def test_letters_that_are_taken_for_others_do_not_hide_a_field() -> None:
    for name in ("image\u017f", "image_lin\u212a", "IMAGE\u017f"):
        assert not allowed({name: [BAD]})
        assert not allowed(json.dumps({name: [BAD]}, ensure_ascii=False).encode())


def test_text_that_speaks_of_media_passes() -> None:
    assert allowed(chat({"type": "text", "text": '{"image_url": "http://a"}'}, {"type": "text", "text": "file:///x"}))
    assert allowed({"prompt": "image_url", "stop": ["image", "http://a"]})


def test_tools_that_are_functions_are_descriptions_and_others_are_not() -> None:
    mask = {"input_image_mask": {"image_url": "file:///etc/passwd"}}
    assert allowed({"tools": [{"type": "function", "function": {"parameters": {"image_url": "http://a"}}}]})
    assert not allowed({"tools": [{"type": "image_generation", **mask}]})
    assert not allowed({"tools": {"type": "function", **mask}})


@pytest.mark.parametrize("field", ["functions", "response_format", "metadata"])
def test_descriptions_and_labels_are_no_media(field: str) -> None:
    assert allowed({field: [{"image_url": {"url": "http://a"}, "file": "/etc/passwd"}]})
    assert not allowed({"x": {field: {"image_url": "http://a"}}})


def test_a_schema_that_names_a_media_property_passes() -> None:
    schema = {"properties": {"image": {"type": "string"}, "file": {"type": "string", "description": "/a"}}}

    assert allowed({**chat(), "guided_json": schema})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"file_id": "file-123"}},
        {"type": "input_file", "file_id": "file-123"},
        {"type": "input_image", "file_id": "https://evil.example/a.png"},
        {"type": "image_file", "image_file": {"file_id": "file-123"}},
    ],
)
def test_a_file_that_somebody_sent_to_the_engine_before_is_refused(part: Any) -> None:
    assert not allowed(chat(part))


def test_what_cites_a_file_is_no_medium() -> None:
    assert allowed(chat({"type": "output_text", "annotations": [{"type": "file_citation", "file_id": "file-1"}]}))


def test_how_an_answer_is_to_sound_is_no_medium() -> None:
    assert allowed({**chat(), "modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}})


@pytest.mark.parametrize(
    "host", ["https://a.example", "a.example:443", "a.example/x", "*.example", "b\u00fccher.example", ""]
)
def test_what_no_host_can_match_is_no_setting(host: str) -> None:
    with pytest.raises(ValueError, match="no host name"):
        media_host(host)


def test_hosts_are_taken_in_any_letter_case() -> None:
    assert (media_host(" A.Example "), media_host("[::1]")) == ("a.example", "::1")
    assert allowed({"image": "https://[::1]/a.png"}, frozenset({"::1"}))


def test_a_refusal_names_the_field_and_the_way_out_but_not_the_address() -> None:
    problem = media_problem(json.dumps(chat({"image_url": {"url": "https://secret.example/x"}})).encode(), HOSTS)

    assert problem is not None
    assert "image_url.url" in problem
    assert "media.hosts" in problem
    assert "secret" not in problem


def test_the_quick_look_passes_over_no_field() -> None:
    for field in FIELDS:
        assert media_problem(b'{"messages":{"%s":"/etc/passwd"}}' % field.encode(), frozenset()) is not None
