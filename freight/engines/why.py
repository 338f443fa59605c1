"""Why a model server ended, from its last output.

A line counts when it begins, behind what servers put before every line, with words that are known and hold nothing
of a record.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

_MOST_CHARACTERS: Final = 400
# To the end of the line.
_REST: Final = r".*"

# The surest first: a server that dies names its reason once and then fails in many other words.
_REASONS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        # A bad command line.
        r"[\w./ -]{1,60}: error: (?:unrecognized argument|argument |the following arguments|ambiguous option)" + _REST,
        r"error: (?:unknown argument|invalid argument|argument |unrecognized argument)" + _REST,
        r"error while handling argument " + _REST,
        # Memory.
        r"(?:[a-z_]+\.)*OutOfMemoryError: (?:CUDA|HIP|XPU) out of memory" + _REST,
        r"(?:CUDA|HIP|XPU) (?:error: )?out of memory" + _REST,
        r"(?:allocating [\d.]+ MiB on device \d+: )?cudaMalloc failed: out of memory",
        r"(?:Free memory on device|Available memory on node) " + _REST,
        r"No available memory for the cache blocks\." + _REST,
        r"To serve at least one request with the models?'s max seq len" + _REST,
        r"Not enough memory\. Please try to (?:increase|reduce) --mem-fraction-static" + _REST,
        r"(?:unable|failed) to allocate [\w ]*buffer" + _REST,
        r"Error in memory profiling\." + _REST,
        r"DefaultCPUAllocator: can't allocate memory" + _REST,
        r"(?:OSError: |MemoryError: )?(?:\[Errno 12\] )?Cannot allocate memory",
        r"(?:OSError: )?(?:\[Errno 28\] )?No space left on device",
        # The model, and its size.
        r"User-specified (?:max_model_len|context_length) \(\d+\) is greater than the derived .*?(?:config\.json\)|$)",
        r"Total number of attention heads \(\d+\) must be divisible by tensor parallel size \(\d+\)",
        r"Model architectures \[.*?\] are not supported for now",
        r"unknown model architecture: '[^']*'",
        r"Unknown quantization method: " + _REST,
        r"The quantization method \w+ is not supported for the current GPU" + _REST,
        r"Bfloat16 is only supported on GPUs" + _REST,
        r"error loading model: " + _REST,
        r"failed to load model,? '[^']*'",
        r"failed to create context with model '[^']*'",
        r"\S+ contains custom code which must be executed to correctly load the model",
        # The hub.
        r"You are trying to access a gated repo" + _REST,
        r"Access to model \S+ is restricted" + _REST,
        r"(?:401|403) Client Error" + _REST,
        r"Repository Not Found for url" + _REST,
        r"\S+ is not a local folder and is not a valid model identifier" + _REST,
        r"\S+ does not appear to have a file named \S+",
        r"Can't load (?:tokenizer|the configuration|the model|image processor) (?:for|of) " + _REST,
        r"Cannot find any model weights with " + _REST,
        # The machine.
        r"(?:error while attempting to bind on address \(.*?\): )?[Aa]ddress already in use",
        r"couldn't bind (?:HTTP )?server socket" + _REST,
        r"Failed to infer device type" + _REST,
        r"No CUDA GPUs are available",
        r"Found no NVIDIA driver on your system" + _REST,
        r"The NVIDIA driver on your system is too old" + _REST,
        r"(?:CUDA error: )?no kernel image is available for execution on the device",
        r"CUDA error: " + _REST,
        r"NCCL error" + _REST,
        r"ModuleNotFoundError: No module named '[\w.]+'",
        r"ImportError: [\w./+-]+: cannot open shared object file" + _REST,
        r"[\w./+-]+: error while loading shared libraries: " + _REST,
        r"(?:OSError: )?(?:\[Errno 24\] )?Too many open files",
    )
)
# What servers put before a line, piece by piece: the process, time, level and place in the code, the exception's class.
_LEADS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"\s+",
        r"\([^()]{1,60}\)",
        r"\[[^\[\]]{1,80}\]",
        r"(?:ERROR|WARNING|INFO|CRITICAL|DEBUG|E|W|I|D)\b:?",
        r"\d[\d:.,/T-]*",
        r"[\w./-]+\.(?:py|cpp|cuh?|c|h|hpp):\d+:?",
        r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception):",
        r"Value error,",
        r"(?:srv|slot|main|common\w*|llama\w*|ggml\w*|load\w*|init\w*|server\w*|alloc\w*)\b:?",
    )
)


def reason(log_tail: Sequence[str]) -> str:
    """Return the last words of the output that are known to say why a server ended; "" when there are none."""
    lines = [list(_beginnings(line)) for line in reversed(log_tail)]
    for pattern in _REASONS:
        for line in lines:
            for text in line:
                match = pattern.match(text)
                if match:
                    return match.group(0).strip().rstrip(".")[:_MOST_CHARACTERS]
    return ""


def _beginnings(line: str) -> Iterator[str]:
    """Yield the line, and it again without each piece that stands before the message."""
    text = re.sub(r"\x1b\[[\d;]*m", "", line)[:2000].strip()
    while text:
        yield text
        match = next((match for lead in _LEADS if (match := lead.match(text))), None)
        if match is None:
            return
        text = text[match.end() :].lstrip(" :")
