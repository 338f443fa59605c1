"""Clusters and frameworks, as the facility's API calls pools and engine families: what there is and what runs there."""

from collections.abc import Iterable, Sequence

from freight.config import Config
from freight.control.context import Context
from freight.control.resolve import entry_name
from freight.control.rights import LOCAL, check_groups, may_run, seen_by
from freight.control.shelf import more_of
from freight.core.account import Account
from freight.core.facility import FACILITY, FRAMEWORK, INPUT_FILE, STATUSES, shown_time
from freight.core.facilityview import Cluster, ClusterJobs, Endpoints, Framework, ModelShown, OwnJob
from freight.core.job import State
from freight.core.messages import Phase
from freight.core.model import EngineName
from freight.errors import Unknown, UserError
from freight.store.rows import JobRow

_UP = frozenset({Phase.READY, Phase.IDLE})
_SHOWN_MOST = 100


def check_cluster(cluster: str, config: Config) -> None:
    """Raise Unknown for a cluster that there is not, or that cannot be used."""
    if cluster == LOCAL:
        return
    what = "can be used yet" if cluster in config.pools else "is called so"
    raise Unknown(f"no cluster {what}: {_printable(cluster)}", f"clusters: {LOCAL}")


def check_asked(account: Account, cluster: str, framework: str, model: str, config: Config) -> None:
    """Raise UserError or NotAllowed where a batch of a model cannot be had there, saying what can."""
    check_cluster(cluster, config)
    if framework not in set(EngineName):
        raise Unknown(f"there is no framework {_printable(framework)}", f"frameworks: {', '.join(EngineName)}")
    name = entry_name(model, config)
    seen = seen_by(account, config, cluster)
    if name is None:
        raise Unknown(f"there is no model {_printable(model)}", _accepted(seen, framework))
    check_groups(account, name, config, cluster)
    entry = config.models[name]
    if entry.engine != framework:
        raise UserError(
            f"model {_printable(model)} does not run on {framework} but on {entry.engine}",
            f"send it to /resource_server/{cluster}/{entry.engine}/v1/batches; {_accepted(seen, framework)}",
        )
    if not entry.batch:
        raise UserError(f"model {_printable(model)} is not marked for batches", _accepted(seen, framework))


def _accepted(seen: Config, framework: str) -> str:
    names = [name for name, entry in seen.models.items() if entry.batch and entry.engine == framework]
    return f"models for batches on {framework}: {', '.join(names) or 'none'}"


def _printable(text: str) -> str:
    cut = text[:_SHOWN_MOST] + "…" if len(text) > _SHOWN_MOST else text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def endpoints(account: Account, config: Config) -> Endpoints:
    """Return the clusters, their frameworks, and the models there that the user may run."""
    frameworks: dict[str, Framework] = {}
    for name, entry in seen_by(account, config).models.items():
        family = frameworks.setdefault(
            entry.engine, Framework(endpoints={"batches": f"/{entry.engine.value}/v1/batches"})
        )
        family.models.append(name)
        family.aliases.update(dict.fromkeys(entry.aliases, name))
        if entry.batch:
            family.batch_models.append(name)
    return Endpoints(clusters={LOCAL: Cluster(base_url=f"/resource_server/{LOCAL}", frameworks=frameworks)})


async def cluster_jobs(account: Account, cluster: str, context: Context) -> ClusterJobs:
    """Return what runs and waits on a cluster: of others' jobs no more than the registered models."""
    config = context.settings()
    check_cluster(cluster, config)
    roster = context.plane.roster
    rows = [hand.row for hand in (*roster.open.values(), *roster.waiting.values(), *context.checking.values())]
    up = [worker.model for worker in roster.workers.values() if worker.phase in _UP and not worker.stopping]
    # There may be thousands of jobs: nobody else waits while they are gone through.
    return await context.in_thread(_cluster_jobs, account, cluster, config, rows, up)


def _cluster_jobs(
    account: Account, cluster: str, config: Config, rows: Sequence[JobRow], up: Sequence[str]
) -> ClusterJobs:
    here = [row for row in rows if row.spec["request"]["pool"] == cluster]
    running = [row.model for row in here if row.state in (State.RUNNING, State.FINALIZING)]
    queued = [row.model for row in here if STATUSES[row.state] == STATUSES[State.QUEUED]]
    own = [row for row in here if row.user == account.user and row.api == FACILITY]
    return ClusterJobs(
        running=_shown(account, [*running, *up], config, cluster),
        queued=_shown(account, queued, config, cluster),
        jobs=[
            OwnJob(
                batch_id=row.id,
                model=row.model,
                framework=more_of(row)[FRAMEWORK],
                input_file=more_of(row)[INPUT_FILE],
                created_at=shown_time(row.created_at),
                status=STATUSES[row.state],
            )
            for row in sorted(own, key=lambda row: row.created_at, reverse=True)
        ],
    )


def _shown(account: Account, models: Iterable[str], config: Config, cluster: str) -> list[ModelShown]:
    there = {name for name in models if name in config.models and may_run(account, name, config, cluster)}
    return [ModelShown(model=name, framework=config.models[name].engine) for name in sorted(there)]
