"""What a run and a submission check alike, and the limits that both have from the settings."""

from freight.config import Config
from freight.control.inputs import Sample
from freight.control.intake import Limits, Problem
from freight.control.jobrun import EngineLimits
from freight.control.policy import Policy
from freight.core.model import ModelSpec
from freight.core.record import Rules
from freight.errors import UserError


def intake_rules(config: Config, model: ModelSpec) -> Rules:
    """Return what each record of a job is checked by."""
    return Rules(model.fits, frozenset(host.lower() for host in config["media.hosts"]), model.name)


def intake_limits(config: Config) -> Limits:
    """Return the most that is taken from a local user."""
    return Limits(config["limits.record_bytes"], None, config["limits.file_bytes"])


def engine_limits(config: Config) -> EngineLimits:
    """Return when a model server is given up."""
    return EngineLimits(
        config["engines.start_stall"],
        config["engines.start_timeout"],
        config["engines.stall"],
        config["engines.suspend_after"],
        config["media.hosts"],
        config.local_pool().stage,
    )


def policy_of(config: Config) -> Policy:
    """Return how a control plane treats its devices, and what it gives up."""
    return Policy(
        engine_limits(config),
        release_timeout_s=config["devices.release_timeout"],
        quarantine_retry_s=config["devices.quarantine_retry"],
        most_loads=config.local_pool().max_loads,
    )


def check_models(shown: str, model: ModelSpec, sample: Sample) -> None:
    """Raise UserError when every record of the sample asks for another model than the job's."""
    if model.fits is None or not sample.models:
        return
    others = [name for name in sample.models if name is not None and name not in model.fits]
    if len(others) == len(sample.models):
        named = ", ".join(sorted({repr(name) for name in others})[:3])
        raise UserError(
            f"{shown}: all of the first {len(others)} records ask for model {named}, and this job runs {model.name}",
            f"use --ignore-record-model, or give {model.name} that alias: freight models add … --alias {others[0]}",
        )


def listing(shown: str, problems: list[Problem]) -> str:
    """Return the bad lines of a file as text, in order."""
    ordered = sorted(problems, key=lambda problem: problem.number)
    return "\n".join(f"{shown}, line {p.number}: {p.rejection.code}: {p.rejection.message}" for p in ordered)
