"""Fixed strange bodies that real engines and proxies have answered with."""

from typing import Final

# One line on purpose: a client that stores answers one a line can keep these bytes unchanged.
# Odd spacing, needless escapes, an unusual key order, a raw accent, an odd float and an
# integer past 64 bits: anything that parses and prints this again alters it.
EXACT_BODY: Final[bytes] = (
    rb'{ "usage":{"total_tokens":2 ,  "completion_tokens":1,"prompt_tokens":1}, "model":"local-model",'
    rb'"choices" : [ {"finish_reason":"stop","index":0 ,"message":{ "content":"\u0063af\u00e9 \/ '
    rb"\ud83d\ude80 "
    b"caf\xc3\xa9"
    rb'","role":"assistant"},"logprobs":null}],  "seed":18446744073709551616,"temperature":1.0E+2,'
    rb'"minus_zero":-0.0 ,"id":"exact-1","object":"chat.completion","created":1700000000 }'
)

PROXY_PAGE: Final[bytes] = (
    b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>\r\n"
    b"<center><h1>502 Bad Gateway</h1></center>\r\n</body>\r\n</html>\r\n"
)

LOGIN_PAGE: Final[bytes] = b"<!DOCTYPE html>\n<html><body><p>Please sign in to continue.</p></body></html>\n"

# Texts an answer may carry; each broke some reader of line-separated JSON.
ODD_TEXTS: Final[dict[str, str]] = {
    "reply-u2028": "first\u2028second\u2029third",
    "reply-lone-surrogate": "half \ud835 sign",
    "reply-nul": "before\x00after",
    "reply-crlf-and-quotes": "line one\r\nline \"two\"\r\n'three' \\ end",
}
