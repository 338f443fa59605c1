"""Whether a job's time has run out, and which."""

import time

from freight.core.openaifile import OPENAI
from freight.store.rows import JobRow


def overtime(row: JobRow, timeout_s: float, ran_s: float) -> str:
    """Return which time of a job's has run out; "" while it has time left.

    `timeout_s` is the running time that it may use (0: any), `ran_s` what it has used.
    """
    if timeout_s and ran_s >= timeout_s:
        return f"the job's time ran out (--timeout {timeout_s:g} s)"
    if row.api != OPENAI:
        return ""
    # Imported here, as a run has no use for it.
    from freight.control.batchterms import deadline_of, terms_of

    deadline = deadline_of(row)
    if deadline is not None and time.time() >= deadline:
        return f"the batch's completion window ({terms_of(row).completion_window}) is over"
    return ""
